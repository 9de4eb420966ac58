"""How a tensor lies in memory, by axis number. Without an allocation it is row-major."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from meshfuse.base.dtypes import ITEM_BYTES
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, const, mul
from meshfuse.facts.sharding import local_extents
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Allocation


@final
@frozen_dataclass
class Layout:
    """`order` lists tensor axes, slowest first, `contiguity` a flag for each, as in Allocation."""

    order: tuple[int, ...]
    contiguity: tuple[bool | None, ...]

    @property
    def is_row_major(self) -> bool:
        """Whether the axes stand in order; gaps may lie between them."""
        return self.order == tuple(range(len(self.order)))


def layout_of(program: Program, tensor: TensorName) -> Layout:
    """The layout of the part of `tensor` that one rank holds."""
    axes = program.tensor(tensor).tensor_axes
    allocation = program.schedule(tensor).allocation
    if allocation is None:
        flags = tuple(None if axis.kind is AxisKind.broadcast else True for axis in axes)
        return Layout(tuple(range(len(axes))), flags)
    places = {axis.name: place for place, axis in enumerate(axes)}
    return Layout(tuple(places[name] for name in allocation.order), allocation.contiguity)


def contiguous_in(program: Program, tensor: TensorName, order: Sequence[int]) -> Layout:
    """The layout without gaps that has the tensor axes in `order`."""
    axes = program.tensor(tensor).tensor_axes
    flags = (None if axes[place].kind is AxisKind.broadcast else True for place in order)
    return Layout(tuple(order), tuple(flags))


def allocation_of(program: Program, tensor: TensorName, layout: Layout) -> Allocation:
    """A layout in the names of a tensor's axes."""
    axes = program.tensor(tensor).tensor_axes
    return Allocation(tuple(axes[place].name for place in layout.order), layout.contiguity)


def is_contiguous(program: Program, tensor: TensorName) -> bool:
    """Whether one rank's part is promised to have no gaps. Axes of local size 1 make none."""
    sizes, layout = local_extents(program, tensor), layout_of(program, tensor)
    places = zip(layout.order, layout.contiguity, strict=True)
    return all(flag or sizes[place] is const(1) for place, flag in places)


def without_single(program: Program, tensor: TensorName, order: Sequence[int]) -> tuple[int, ...]:
    """`order` without the axes of local size 1, whose place in memory makes no difference."""
    sizes = local_extents(program, tensor)
    return tuple(place for place in order if sizes[place] is not const(1))


def local_bytes(program: Program, tensor: TensorName) -> IntExpr:
    """The bytes that one rank holds; of the largest block where blocks are uneven."""
    size = const(ITEM_BYTES[program.tensor(tensor).dtype])
    return mul(size, *local_extents(program, tensor))
