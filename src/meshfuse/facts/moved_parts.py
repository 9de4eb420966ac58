"""How the parts that ranks move lie in the tensors that they move between.

Parts are straight where each is one piece of memory if the axis is the slowest there; all others
are packed to be sent, whatever the memory order.
"""

from __future__ import annotations

from meshfuse.expr import is_const
from meshfuse.facts.digits import is_every_nth, is_one_block
from meshfuse.facts.holdings import is_even
from meshfuse.facts.sharding import sharding_of
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import AllGather, Communication, Exchange, LocalSlice, ReduceScatter
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.program import Program


def packing_reason(program: Program, expr: Communication) -> str | None:
    """Why the parts of a collective cannot be straight; None if they can.

    Those of symbolic size can: a call whose ranks hold unequal parts packs them.
    """
    match expr:
        case Exchange():
            return "ranks send one another pieces of any shape"
        case AllGather(_, src, mesh_axis, axis):
            return _unlike_blocks(program, src, mesh_axis, axis)
        case ReduceScatter(out, _, mesh_axis, axis):
            return _unlike_blocks(program, out, mesh_axis, axis)
        case _:
            return None


def _unlike_blocks(
    program: Program, name: TensorName, mesh_axis: ParallelType, axis: int
) -> str | None:
    digits = sharding_of(program, name).axes[axis]
    extent = program.tensor(name).tensor_axes[axis].extent
    if not is_one_block(digits, mesh_axis):
        return f"axis {axis} of {name} is dealt out along {mesh_axis} in more than one piece a rank"
    if is_const(extent) and not is_even(digits, extent):
        return f"ranks hold unequal parts of axis {axis} of {name}"
    return None


def slices_in_place(program: Program, expr: LocalSlice) -> bool:
    """Whether a local slice is a view of its source."""
    digits = sharding_of(program, expr.out).axes[expr.axis]
    return is_one_block(digits, expr.mesh_axis) or is_every_nth(digits, expr.mesh_axis)
