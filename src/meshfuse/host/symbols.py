"""What a host program says of sizes: where its symbols get values, and what sizes must be."""

from __future__ import annotations

from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.text import Out
from meshfuse.expr.nodes import IntExpr
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.kernel.nodes import IndexName


@final
@frozen_dataclass
class SizeOf:
    """`symbol` is the size of an axis of input `tensor` times `factor`, the ranks that share it.

    A call may give the global size instead; with a factor of 1 both must agree.
    """

    symbol: Out[IndexName]
    tensor: TensorName
    axis: int
    factor: int = 1


@final
@frozen_dataclass
class Coordinate:
    """`symbol` is where the rank stands along `mesh_axis`."""

    symbol: Out[IndexName]
    mesh: DeviceMesh
    mesh_axis: ParallelType

    def of(self, rank: int) -> int:
        """The value on a rank; 0 on one outside the mesh, which has no use for it."""
        return self.mesh.coordinate(rank, self.mesh_axis) or 0


@final
@frozen_dataclass
class Divides:
    """`extent` must be a multiple of `divisor`: `tensor` is reshaped block by block."""

    divisor: int
    extent: IntExpr
    tensor: TensorName

    @property
    def extents(self) -> tuple[IntExpr, ...]:
        return (self.extent,)


@final
@frozen_dataclass
class Covers:
    """`extent`, of an axis of `tensor`, must be at most `most`: ranks hold no more in all."""

    most: int
    extent: IntExpr
    tensor: TensorName

    @property
    def extents(self) -> tuple[IntExpr, ...]:
        return (self.extent,)


@final
@frozen_dataclass
class Equals:
    """`extent`, of an axis of `tensor`, must be `other`: an operand has that where they meet.

    `elements`: these are the numbers of all elements, of a tensor and of what it is reshaped from.
    """

    extent: IntExpr
    other: IntExpr
    tensor: TensorName
    elements: bool = False

    @property
    def extents(self) -> tuple[IntExpr, ...]:
        return (self.extent, self.other)


@final
@frozen_dataclass
class NotNegative:
    """`extent`, of an axis of `tensor`, must be 0 or more: numbers that users pass are in it."""

    extent: IntExpr
    tensor: TensorName

    @property
    def extents(self) -> tuple[IntExpr, ...]:
        return (self.extent,)


Demand = Divides | Covers | Equals | NotNegative
"""What sizes must be at each call. `extents` are the expressions that it speaks of."""
