"""The host program: what the CPU of every rank does, in order. Pure and SPMD: one text for all ranks (law L6).

Buffers are named like the program's tensors; sizes are local and are expressions in the program's
symbols, which are bound from the inputs at each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import final

from meshfuse.base.dtypes import DataType
from meshfuse.base.text import block_field, out_field
from meshfuse.expr.nodes import IntExpr
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.ir.ops import Expr
from meshfuse.kernel.nodes import IndexName, Kernel


class Collective(Enum):
    all_gather = "all_gather"
    all_reduce = "all_reduce"
    reduce_scatter = "reduce_scatter"


@final
@dataclass(frozen=True, slots=True)
class HostBuffer:
    """A tensor on this rank: element type, local sizes, and memory order (tensor axes, slowest first)."""

    name: TensorName = out_field()
    dtype: DataType
    shape: tuple[IntExpr, ...]
    order: tuple[int, ...]
    mesh: DeviceMesh | None = None


@final
@dataclass(frozen=True, slots=True)
class Allocate:
    """Fresh uninitialised memory for `buffer`, contiguous in its memory order."""

    buffer: TensorName = out_field()


@final
@dataclass(frozen=True, slots=True)
class Free:
    """Drop the program's reference: the last use has been issued."""

    buffer: TensorName


@final
@dataclass(frozen=True, slots=True)
class Launch:
    """Run a kernel over buffers in the kernel's argument order; `sizes` gives its extents (strides come with the buffers)."""

    kernel: str
    buffers: tuple[TensorName, ...]
    scalars: tuple[ScalarName, ...] = ()
    sizes: Mapping[IndexName, IntExpr] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Evaluate:
    """Run expressions one by one through torch, on local shapes, binding each output to its result.

    With `into`, the last result is copied into that existing buffer (an in-place update).
    """

    into: TensorName | None = None
    body: tuple[Expr, ...] = block_field()


@final
@dataclass(frozen=True, slots=True)
class Communicate:
    """Post a collective over the rank's team along `mesh_axis`; `out` may be read after the Wait of this number.

    Both buffers are contiguous in memory order, with the gathered or scattered axis slowest. `bytes` is
    what the input holds on one rank, `cause` the op that needed it.
    """

    out: TensorName = out_field()
    collective: Collective
    src: TensorName
    number: int
    mesh: DeviceMesh
    mesh_axis: ParallelType
    bytes: IntExpr
    cause: str
    function: str | None = None


@final
@dataclass(frozen=True, slots=True)
class Wait:
    """The collective of this number is complete on the current stream."""

    number: int


@final
@dataclass(frozen=True, slots=True)
class View:
    """`out` is block k of `src` along `axis`, k being this rank's coordinate on `mesh_axis`. Shares memory."""

    out: TensorName = out_field()
    src: TensorName
    axis: int
    mesh: DeviceMesh
    mesh_axis: ParallelType


Node = Allocate | Free | Launch | Evaluate | Communicate | Wait | View


@final
@dataclass(frozen=True, slots=True)
class SizeBinding:
    """symbol = size of tensor axis `axis` of input `tensor`, times `factor` (the ranks that split the axis)."""

    symbol: IndexName
    tensor: TensorName
    axis: int
    factor: int = 1


@final
@dataclass(frozen=True, slots=True)
class HostOutput:
    """A result: returned, or (with `alias`) copied into that input by the body and not returned."""

    buffer: TensorName
    alias: TensorName | None = None


@final
@dataclass(frozen=True, slots=True)
class HostProgram:
    """Symbols bound from input sizes, buffers by name (inputs included), inputs and outputs in call order, kernels, body.

    Every input's local sizes must equal its buffer's, once the symbols are bound.
    """

    symbols: tuple[SizeBinding, ...]
    buffers: Mapping[TensorName, HostBuffer]
    inputs: tuple[TensorName | ScalarName, ...]
    outputs: tuple[HostOutput, ...]
    kernels: Mapping[str, Kernel]
    body: tuple[Node, ...]
