"""Communication expressions: pure redistributions, made by decomposition, and of those by loops.

`src` and `out` have the same tensor axes and differ in sharding. But for `Exchange`, they lie on
one mesh and differ along `mesh_axis` alone: the team of a rank is its line through the mesh along
it, in mesh order. `axis` counts tensor axes. What the k-th rank of the team holds of `axis` is what
the digits of the sharding say (facts/holdings.py): a block, strided pieces, fewer or none.
"""

from __future__ import annotations

from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.text import Out
from meshfuse.expr.nodes import IntExpr
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import UnaryExpr


class Communication(UnaryExpr):
    """Abstract."""

    __slots__ = ()


@final
@frozen_dataclass
class AllGather(Communication):
    """The k-th rank has part k of `axis` in `src`; `out` has the parts of all, in order."""

    out: Out[TensorName]
    src: TensorName
    mesh_axis: ParallelType
    axis: int


@final
@frozen_dataclass
class AllReduce(Communication):
    """`src` is partial over `mesh_axis`; `out` is the whole reduction, on every rank."""

    out: Out[TensorName]
    src: TensorName
    mesh_axis: ParallelType
    function: str = "sum"


@final
@frozen_dataclass
class ReduceScatter(Communication):
    """`src` is partial over `mesh_axis`; the k-th rank gets part k of `axis` of the reduction."""

    out: Out[TensorName]
    src: TensorName
    mesh_axis: ParallelType
    axis: int
    function: str = "sum"


@final
@frozen_dataclass
class LocalSlice(Communication):
    """`src` is replicated along `mesh_axis`; the k-th rank keeps part k of `axis`."""

    out: Out[TensorName]
    src: TensorName
    mesh_axis: ParallelType
    axis: int


@final
@frozen_dataclass
class Exchange(Communication):
    """Every rank gets what it is to hold of `out` and lacks of `src` from a rank that has it.

    Any sharding to any other, also on another mesh or part of one; terms of a reduction stay terms.
    """

    out: Out[TensorName]
    src: TensorName


# In loops that have one chunk for each rank along a mesh axis. `owner` is a rank's place along it,
# in the index of the loop and the coordinates of the running rank.


@final
@frozen_dataclass
class Fetch(Communication):
    """`out` is what the rank at place `owner` along `mesh_axis` holds of `src`.

    A chunk of the all-gather of `src`. What a rank has itself does not move: `out` is `src`.
    """

    out: Out[TensorName]
    src: TensorName
    mesh_axis: ParallelType
    owner: IntExpr


@final
@frozen_dataclass
class Deliver(Communication):
    """`src` is destined for the rank at place `owner` along `mesh_axis`, and `out` is what another
    has made for this one: a chunk of the terms of a reduce-scatter.

    Each rank gets something from one. What it has made for itself does not move: `out` is `src`.
    """

    out: Out[TensorName]
    src: TensorName
    mesh_axis: ParallelType
    owner: IntExpr
