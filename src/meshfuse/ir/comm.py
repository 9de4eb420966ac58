"""Communication expressions: pure redistributions along one mesh axis, made by decomposition only.

`src` and `out` have the same tensor axes; they differ in sharding on `mesh_axis` alone. `axis`
counts tensor axes. The team of a rank is its line through the mesh along `mesh_axis`, in mesh
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from meshfuse.base.text import Out
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import UnaryExpr


class Communication(UnaryExpr):
    """Abstract."""

    __slots__ = ()
    mesh_axis: ParallelType


@final
@dataclass(frozen=True, slots=True)
class AllGather(Communication):
    """`src` is block k of `axis` on the k-th rank of the team; `out` has all blocks everywhere."""

    out: Out[TensorName]
    src: TensorName
    mesh_axis: ParallelType
    axis: int


@final
@dataclass(frozen=True, slots=True)
class AllReduce(Communication):
    """`src` is partial over `mesh_axis`; `out` is the whole reduction, on every rank."""

    out: Out[TensorName]
    src: TensorName
    mesh_axis: ParallelType
    function: str = "sum"


@final
@dataclass(frozen=True, slots=True)
class ReduceScatter(Communication):
    """`src` is partial over `mesh_axis`; the k-th rank gets block k of `axis` of the reduction."""

    out: Out[TensorName]
    src: TensorName
    mesh_axis: ParallelType
    axis: int
    function: str = "sum"


@final
@dataclass(frozen=True, slots=True)
class LocalSlice(Communication):
    """`src` is replicated along `mesh_axis`; the k-th rank keeps block k of `axis`: a view."""

    out: Out[TensorName]
    src: TensorName
    mesh_axis: ParallelType
    axis: int
