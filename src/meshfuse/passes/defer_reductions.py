"""Reduce across ranks later, where fewer bytes move: behind what works on each term by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.trace import Note
from meshfuse.expr import IntExpr, const
from meshfuse.facts.facts import Facts, facts_of, output_names
from meshfuse.facts.nominal import nominal_value
from meshfuse.facts.sharding import Sharding, axis_sharded_on, sharding_of
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.comm import AllReduce, ReduceScatter
from meshfuse.ir.infer import is_tensor
from meshfuse.ir.ops import Cast, Expr, Pointwise, Set
from meshfuse.ir.printer import print_expr
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import Name, fresh_axes, map_names, with_exprs, without_unnamed
from meshfuse.passes.apply_sharding import place_tensor
from meshfuse.passes.sites import received_bytes
from meshfuse.passes.terms_carried import term_operands

STAGE = "defer_reductions"

Reduce = AllReduce | ReduceScatter


def defer_reductions(program: Program, notes: Sequence[Note]) -> tuple[Program, tuple[Note, ...]]:
    """Push reductions across ranks through linear expressions where that saves bytes.

    T2 = all_reduce(T0);  T3 = all_reduce(T1);  T4 = add(T2, T3)
    ->  T5 = add(T0, T1);  T4 = all_reduce(T5)

    Only through tensors that are read once and are no outputs. `notes` are those of the reductions;
    those that vanish are left out of the result.
    """
    found, told = True, list(notes)
    while found:
        found = False
        facts = facts_of(program)
        for expr in program.fusion.exprs:
            if isinstance(expr, Reduce) and facts.definitions.get(expr.out) is expr:
                deferral = _best_deferral(program, facts, expr)
                if deferral is not None:
                    program, note = _apply(program, deferral)
                    gone = {reduce.out for reduce in deferral.reduces}
                    told = [old for old in told if old.subject not in gone]
                    told.append(note)
                    facts, found = facts_of(program), True
    return program, tuple(told)


@final
@frozen_dataclass
class _Deferral:
    """Reductions, of one kind and mesh axis, to be done behind `through`, which are in order."""

    reduces: tuple[Reduce, ...]
    through: tuple[Expr, ...]
    before: IntExpr
    after: IntExpr

    @property
    def result(self) -> TensorName:
        return TensorName(self.through[-1].outs[0])

    @property
    def saved(self) -> int:
        return nominal_value(self.before) - nominal_value(self.after)


def _best_deferral(program: Program, facts: Facts, reduce: Reduce) -> _Deferral | None:
    """The one that saves most, if any does; the shortest of several."""
    best: _Deferral | None = None
    for deferral in _deferrals(program, facts, reduce):
        if deferral.saved > (0 if best is None else best.saved):
            best = deferral
    return best


def _deferrals(program: Program, facts: Facts, reduce: Reduce) -> Iterator[_Deferral]:
    """Ever longer ways behind `reduce`."""
    reduces: tuple[Reduce, ...] = (reduce,)
    through: tuple[Expr, ...] = ()
    tensor = reduce.out
    while (reader := _only_reader(program, facts, tensor)) is not None:
        if not _can_work_on_terms(program, reader, reduce):
            return
        positions = _term_positions(program, reader, reduce, tensor)
        others = [TensorName(str(reader.ins[k])) for k in positions if reader.ins[k] != tensor]
        if not positions or len(positions) != len(others) + 1:
            return
        for other in others:
            way = _way_from_reduction(program, facts, other, reduce)
            if way is None or way[0] in reduces:
                return
            reduces, through = (*reduces, way[0]), (*through, *way[1])
        through = (*through, reader)
        tensor = TensorName(reader.outs[0])
        before = sum((_bytes(program, each, each.out) for each in reduces), const(0))
        yield _Deferral(reduces, through, before, _bytes(program, reduce, tensor))


def _only_reader(program: Program, facts: Facts, tensor: TensorName) -> Expr | None:
    readers = facts.uses.get(tensor, ())
    return readers[0] if len(readers) == 1 and tensor not in output_names(program) else None


def _can_work_on_terms(program: Program, expr: Expr, reduce: Reduce) -> bool:
    """Whether the result lies such that terms of it can be reduced as `reduce` does."""
    if len(expr.outs) != 1 or not is_tensor(program, expr.outs[0]):
        return False
    out = TensorName(expr.outs[0])
    lying, wanted = sharding_of(program, out), sharding_of(program, reduce.out)
    if lying.mesh != wanted.mesh or program.tensor(out).root:
        return False
    if isinstance(reduce, ReduceScatter):
        return isinstance(expr, Pointwise | Cast | Set) and lying == wanted
    return axis_sharded_on(lying, reduce.mesh_axis) < 0 and lying.partial == wanted.partial


def _term_positions(
    program: Program, expr: Expr, reduce: Reduce, tensor: TensorName
) -> tuple[int, ...]:
    """The operands that must be terms if `tensor` is; () if the result would not be terms."""
    tensors = [k for k, operand in enumerate(expr.ins) if is_tensor(program, operand)]
    for positions in term_operands(expr, program, reduce.function):
        if tensor not in [expr.ins[k] for k in positions]:
            continue
        if isinstance(reduce, ReduceScatter) and len(positions) < len(tensors):
            continue  # The others lie in blocks over the ranks that have terms.
        if sum(operand == tensor for operand in expr.ins) == 1:
            return positions
    return ()


def _way_from_reduction(
    program: Program, facts: Facts, tensor: TensorName, like: Reduce
) -> tuple[Reduce, tuple[Expr, ...]] | None:
    """A reduction like `like` from which `tensor` is made by what works on terms, and that."""
    through: tuple[Expr, ...] = ()
    while _only_reader(program, facts, tensor) is not None:
        expr = facts.definitions.get(tensor)
        if isinstance(expr, AllReduce | ReduceScatter):
            alike = replace(expr, out=like.out, src=like.src) == like
            meshes = [sharding_of(program, each.src).mesh for each in (expr, like)]
            return (expr, through) if alike and meshes[0] == meshes[1] else None
        if expr is None or not _can_work_on_terms(program, expr, like):
            return None
        single = [p for p in term_operands(expr, program, like.function) if len(p) == 1]
        if len(single) != 1:
            return None
        through = (expr, *through)
        tensor = TensorName(str(expr.ins[single[0][0]]))
    return None


def _bytes(program: Program, reduce: Reduce, tensor: TensorName) -> IntExpr:
    """What a rank receives if `tensor` is made by a reduction like `reduce`."""
    return received_bytes(
        program, tensor, _terms_sharding(program, reduce, tensor), sharding_of(program, tensor)
    )


def _terms_sharding(program: Program, reduce: Reduce, tensor: TensorName) -> Sharding:
    """How terms of `tensor` lie that `reduce` would reduce."""
    lying, terms = sharding_of(program, tensor), sharding_of(program, reduce.src)
    partial = {**lying.partial, reduce.mesh_axis: reduce.function}
    axes = terms.axes if isinstance(reduce, ReduceScatter) else lying.axes
    return Sharding(lying.mesh, axes, partial)


# Rewriting.


def _apply(program: Program, deferral: _Deferral) -> tuple[Program, Note]:
    reduce, result = deferral.reduces[0], deferral.result
    terms: dict[Name, Name] = {each.out: each.src for each in deferral.reduces}
    replaced: dict[int, tuple[Expr, ...]] = {id(each): () for each in deferral.reduces}
    for expr in deferral.through:
        out = TensorName(expr.outs[0])
        program, terms[out] = _new_terms(program, reduce, out)
        replaced[id(expr)] = (map_names(expr, terms),)
    last = replace(reduce, out=result, src=TensorName(terms[result]))
    replaced[id(deferral.through[-1])] += (last,)
    exprs = [new for old in program.fusion.exprs for new in replaced.get(id(old), (old,))]
    kind = "all_reduce" if isinstance(reduce, AllReduce) else "reduce_scatter"
    saved = deferral.before - deferral.after
    done = ", ".join(print_expr(expr) for expr in deferral.through)
    reason = f"done behind {done}, which saves {saved} of {deferral.before} bytes"
    note = Note(STAGE, result, kind, reason, str(deferral.after))
    return without_unnamed(with_exprs(program, exprs)), note


def _new_terms(program: Program, reduce: Reduce, tensor: TensorName) -> tuple[Program, TensorName]:
    """A tensor for the terms of `tensor`: its axes, and a partial one behind them."""
    sharding = _terms_sharding(program, reduce, tensor)
    definition, mesh = program.tensor(tensor), sharding.mesh
    assert mesh is not None
    kept = [axis for axis in definition.logical if axis.kind is not AxisKind.partial]
    waiting = [owner for owner in mesh.parallel_types() if owner in sharding.partial]
    program, logical = fresh_axes(program, [(axis.kind, axis.extent) for axis in kept])
    sizes = [(AxisKind.partial, const(mesh.axis_size(owner))) for owner in waiting]
    program, partial = fresh_axes(program, sizes)
    definition = replace(definition, logical=(*logical, *partial))
    bindings = {axis.name: owner for axis, owner in zip(partial, waiting, strict=True)}
    return place_tensor(program, definition, sharding, bindings)
