"""Undo rfactor: where kernels are scheduled automatically, how a reduction is cut is decided later.

T2 [i, i{3}, r{4}] = sum(T0, [1]);  T1 [i, r{3}] = sum(T2, [1])
->  T1 [i, r{12}] = sum(T0, [1]), its reduced axis split into r{3} and r{4}
"""

from __future__ import annotations

from dataclasses import replace

from meshfuse.base.errors import Unsupported
from meshfuse.base.trace import Note
from meshfuse.facts.facts import Facts, facts_of, output_names
from meshfuse.ir.axes import AxisKind, AxisName, TensorName
from meshfuse.ir.ops import Expr, Reduction, Welford
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import add_tensor, map_names, rename_axes, with_exprs, without_unnamed
from meshfuse.ir.rfactor import is_part
from meshfuse.ir.schedule import step_sources

STAGE = "join_reductions"


def join_reductions(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Make each reduction that rfactor took apart one expression again.

    Loops and mesh axes of its parts become loops of the whole. Raises Unsupported for a part that
    something else reads.
    """
    parts = [expr for expr in program.fusion.exprs if is_part(program, expr)]
    notes: list[Note] = []
    for part in reversed(parts):  # a part of a part is the earlier one
        program, joined = _join(program, facts_of(program), part)
        notes.append(Note(STAGE, joined, "joined", f"its part {part.outs[0]} is not kept apart"))
    return (without_unnamed(program) if parts else program), tuple(reversed(notes))


def _join(program: Program, facts: Facts, part: Expr) -> tuple[Program, TensorName]:
    whole = _only_reader(program, facts, part)
    renamed = dict(zip(part.outs, whole.outs, strict=True))
    for inner, outer in renamed.items():
        program = _merge_tensors(program, TensorName(inner), TensorName(outer))
    exprs = [
        map_names(part, renamed) if expr is part else expr
        for expr in program.fusion.exprs
        if expr is not whole
    ]
    return with_exprs(program, exprs), TensorName(whole.outs[0])


def _only_reader(program: Program, facts: Facts, part: Expr) -> Expr:
    """The reduction of the parts."""
    readers = {id(reader): reader for out in part.outs for reader in facts.uses.get(out, ())}
    shown = output_names(program).intersection(map(TensorName, part.outs))
    whole = next(iter(readers.values()), None)
    if shown or len(readers) != 1 or not isinstance(whole, Reduction | Welford):
        raise Unsupported(
            f"{STAGE}: {part.outs[0]} is one part of a reduction, by rfactor, and is used by "
            "itself; only a kernel scheduled by hand can compute it (manual_execute)"
        )
    return whole


def _merge_tensors(program: Program, inner: TensorName, outer: TensorName) -> Program:
    """Give `outer` the axes that `inner` speaks of by its root, and the loops that reduce them."""
    part, whole = program.tensor(inner), program.tensor(outer)
    renamed: dict[AxisName, AxisName] = {
        mine.name: theirs.name for mine, theirs in zip(part.tensor_axes, whole.logical, strict=True)
    }
    axes, schedule = program.all_axes(inner), program.schedule(inner)
    cuts = tuple(
        step
        for step in schedule.steps
        if all(axes[source].kind is AxisKind.reduction for source in step_sources(step))
    )
    reduced = [leaf for leaf in schedule.leaves if axes[leaf].kind is AxisKind.reduction]
    logical = tuple(replace(a, name=renamed.get(a.name, a.name)) for a in part.root)
    mine = program.schedule(outer)
    joined = replace(
        mine,
        leaves=(*mine.leaves, *reduced),
        steps=(*(rename_axes(step, renamed) for step in part.root_steps), *mine.steps, *cuts),
        bindings={
            **mine.bindings,
            **{leaf: b for leaf, b in schedule.bindings.items() if leaf in reduced},
        },
    )
    return add_tensor(program, outer, replace(whole, logical=logical), joined)
