"""Pointwise segments: every output runs over the same axes, and nothing is reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from meshfuse.expr import mul
from meshfuse.facts.layout import contiguous_in, layout_of
from meshfuse.facts.refusal import Refusal
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.ops import Cast, Pointwise, Reshape, Set
from meshfuse.ir.program import Program
from meshfuse.schedulers.cost import (
    LAUNCH_MICROSECONDS,
    inputs_and_outputs,
    microseconds_to_move,
)
from meshfuse.schedulers.iteration_space import (
    IterationSpace,
    SpaceAxis,
    iteration_space,
    reductions_of,
)
from meshfuse.schedulers.scheduler import LaunchHints, Scheduler
from meshfuse.schedulers.segment_checks import describe_axes, refuse_operations, refuse_sizes
from meshfuse.schedulers.tiling import Tiling, apply_tiling

PROGRAMS = 64
"""Programs that a kernel should have at least, so that every core gets its share."""

FLAT_OPERATIONS = (Pointwise, Cast, Set, Reshape)
"""What keeps the elements of a tensor in their order."""


@final
class PointwiseScheduler(Scheduler):
    """Rows on the grid, vectors along the axis that is innermost in the output's memory.

    Where all tensors lie in memory alike, the whole space is one row.
    """

    __slots__ = ()
    name = "pointwise"

    def can(self, program: Program) -> Refusal | None:
        refusal = refuse_operations(program, self.name)
        if refusal is not None:
            return refusal
        for expr in reductions_of(program):
            return Refusal(self.name, "it is a reduction", expr.outs[0])
        space = iteration_space(program)
        first, *others = (output.tensor for output in program.fusion.outputs)
        for other in others:
            ours, theirs = (sorted(space.of_tensor(tensor)) for tensor in (first, other))
            if ours != theirs:
                reason = (
                    f"it runs over {describe_axes(space, frozenset(theirs))}, output {first} over "
                    f"{describe_axes(space, frozenset(ours))}"
                )
                return Refusal(self.name, reason, other)
        return refuse_sizes(space, self.name)

    def estimate(self, program: Program) -> float:
        return LAUNCH_MICROSECONDS + microseconds_to_move(program, inputs_and_outputs(program))

    def apply(self, program: Program) -> tuple[Program, LaunchHints]:
        space = iteration_space(program)
        order = space.memory_order(program.fusion.outputs[0].tensor)
        if not order or lies_alike(program, space, order) or is_flat(program):
            tiling = Tiling((), (), order, chunk_groups=PROGRAMS)
        else:
            *rows, columns = dict.fromkeys(order)
            tiling = Tiling(tuple(rows), (), (columns,), groups_for(space, rows))
        return apply_tiling(program, space, tiling), LaunchHints()


def is_flat(program: Program) -> bool:
    """Whether all tensors have their elements in memory in one order, whatever axes they give them.

    Indices of reshaped axes then come together to the place in that order.
    """
    tensors = program.fusion.tensors
    return all(isinstance(expr, FLAT_OPERATIONS) for expr in program.fusion.exprs) and all(
        layout_of(program, tensor) == contiguous_in(program, tensor, range(tensors[tensor].ndim))
        and all(axis.kind is AxisKind.iteration for axis in tensors[tensor].tensor_axes)
        for tensor in inputs_and_outputs(program)
    )


def groups_for(space: IterationSpace, rows: Sequence[SpaceAxis]) -> int | None:
    """Into how many groups of columns to cut each row: one, unless the rows are known to be few."""
    count = mul(1, *(space.extents[axis] for axis in rows)).high
    if count is None or count >= PROGRAMS:
        return None
    return -(-PROGRAMS // max(count, 1))


def lies_alike(program: Program, space: IterationSpace, order: tuple[SpaceAxis, ...]) -> bool:
    """Whether every tensor in memory is contiguous in `order`, or a single element."""

    def fits(tensor: TensorName) -> bool:
        own = space.memory_order(tensor)
        return not own or (own == order and space.is_contiguous(tensor))

    return len(set(order)) == len(order) and all(map(fits, inputs_and_outputs(program)))
