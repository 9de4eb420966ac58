"""How a tensor lies in memory, by axis number. Without an allocation it is row-major."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.program import Program


@final
@dataclass(frozen=True, slots=True)
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
