"""Segments with reductions: every reduction keeps the same axes and reduces the same axes.

A point of the kept axes is a row. One program computes rows from beginning to end: each pass over
the reduced axes reads the inputs again, which then lie in cache, and computes what is pointwise
anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.facts.facts import facts_of, tensor_operands, tensor_outputs
from meshfuse.facts.refusal import Refusal
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Reduction, Reshape, Welford
from meshfuse.ir.program import Program
from meshfuse.schedulers.cost import inputs_and_outputs
from meshfuse.schedulers.iteration_space import (
    IterationSpace,
    SpaceAxis,
    iteration_space,
    reductions_of,
)
from meshfuse.schedulers.scheduler import LaunchHints
from meshfuse.schedulers.segment_checks import describe_axes, refuse_operations, refuse_sizes
from meshfuse.schedulers.tiling import Tiling, apply_tiling


@final
@frozen_dataclass
class Rows:
    """Kept and reduced axes of the space."""

    space: IterationSpace
    kept: frozenset[SpaceAxis]
    reduced: frozenset[SpaceAxis]


def rows_of(program: Program, scheduler: str) -> Rows | Refusal:
    """The rows that all reductions of a segment share, or why there are none."""
    refusal = refuse_operations(program, scheduler)
    if refusal is not None:
        return refusal
    reductions = reductions_of(program)
    if not reductions:
        return Refusal(scheduler, "it reduces nothing")
    space = iteration_space(program)
    rows = Rows(space, space.kept(reductions[0]), space.reduced(reductions[0]))
    for expr in reductions:
        kept, reduced = space.kept(expr), space.reduced(expr)
        if (kept, reduced) != (rows.kept, rows.reduced):
            first = reductions[0].outs[0]
            reason = (
                f"it reduces {describe_axes(space, reduced)} and keeps "
                f"{describe_axes(space, kept)}; {first} reduces "
                f"{describe_axes(space, rows.reduced)} and keeps {describe_axes(space, rows.kept)}"
            )
            return Refusal(scheduler, reason, expr.outs[0])
    return _refuse_reshapes(program, scheduler) or _refuse_tensors(program, scheduler, rows) or rows


def _refuse_reshapes(program: Program, scheduler: str) -> Refusal | None:
    """The value of a reduction is there for the elements of its own axes alone."""
    after = {*tensors_after_reductions(program)}
    after.update(out for expr in reductions_of(program) for out in expr.outs)
    for expr in program.fusion.exprs:
        if isinstance(expr, Reshape) and expr.src in after:
            return Refusal(scheduler, "it reshapes what comes after a reduction", expr.out)
    return None


def _refuse_tensors(program: Program, scheduler: str, rows: Rows) -> Refusal | None:
    """Each tensor has an axis of the space once; each output is a value or a row for each row."""
    space = rows.space
    for expr in program.fusion.exprs:
        for tensor in tensor_outputs(program, expr):
            spanned = space.spanned(program.tensor(tensor).maybe_root)
            if len(set(spanned)) < len(spanned):
                return Refusal(scheduler, "two of its axes run together", tensor)
    for output in program.fusion.outputs:
        spanned = frozenset(space.of_tensor(output.tensor))
        if spanned not in (rows.kept, rows.kept | rows.reduced):
            reason = (
                f"it runs over {describe_axes(space, spanned)}; rows are kept "
                f"{describe_axes(space, rows.kept)} and reduced "
                f"{describe_axes(space, rows.reduced)}"
            )
            return Refusal(scheduler, reason, output.tensor)
    return refuse_sizes(space, scheduler)


def tensors_after_reductions(program: Program) -> Iterator[TensorName]:
    """The tensors that are computed from the result of a reduction, those results left out."""
    after: set[TensorName] = set()
    for expr in program.fusion.exprs:
        outs = tensor_outputs(program, expr)
        if after.intersection(tensor_operands(program, expr)):
            after.update(outs)
            yield from outs
        elif isinstance(expr, Reduction | Welford):
            after.update(outs)


def normalizes(program: Program, rows: Rows) -> TensorName | None:
    """A tensor that runs over the reduced axes again, after a reduction over them."""
    for tensor in tensors_after_reductions(program):
        if rows.reduced.intersection(rows.space.spanned(program.tensor(tensor).logical)):
            return tensor
    return None


def apply_rows(program: Program) -> tuple[Program, LaunchHints]:
    """Rows on the grid; vectors along the axis that is innermost in memory.

    If that axis is reduced, a row is reduced by vectors and their lanes come together at its end.
    If it is kept, a vector is LANES rows side by side.
    """
    rows = rows_of(program, "rows")
    if isinstance(rows, Refusal):
        raise AssertionError(f"asked to schedule what was refused: {rows}")
    order = _memory_order(program, rows)
    kept = tuple(axis for axis in order if axis in rows.kept)
    reduced = tuple(axis for axis in order if axis in rows.reduced)
    if not order:
        tiling = Tiling((), (), ())
    elif order[-1] in rows.reduced:
        tiling = Tiling(kept, reduced[:-1], reduced[-1:])
    else:
        tiling = Tiling(kept[:-1], reduced, kept[-1:], chunk_groups=0)
    return apply_tiling(program, rows.space, tiling), LaunchHints()


def _memory_order(program: Program, rows: Rows) -> tuple[SpaceAxis, ...]:
    """All axes, slowest first: as in the widest input, then as the first reduction has them."""
    definitions = facts_of(program).definitions
    inputs = [tensor for tensor in inputs_and_outputs(program) if tensor not in definitions]
    widest = max(inputs, key=lambda tensor: len(rows.space.of_tensor(tensor)), default=None)
    order = () if widest is None else rows.space.memory_order(widest)
    own = [axis for axis in order if axis in rows.kept | rows.reduced]
    root = program.tensor(reductions_of(program)[0].outs[0]).maybe_root
    missing = [axis for axis in rows.space.spanned(root) if axis not in own]
    return (*missing, *own)
