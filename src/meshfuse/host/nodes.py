"""The host program: what the CPU of every rank does, in order (law 6). One text for all ranks.

Buffers are named like the program's tensors; sizes are local and are expressions in the program's
symbols, which are bound from the inputs at each call, and in the coordinates of the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from enum import Enum
from typing import NewType, TypeAlias, final

from meshfuse.base.dtypes import DataType
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.text import Block, Out, Rest
from meshfuse.expr.nodes import IntExpr
from meshfuse.facts.holdings import value_at
from meshfuse.facts.sharding import Sharding
from meshfuse.host.symbols import Coordinate, Demand, SizeOf
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.ir.ops import Expr
from meshfuse.ir.ops_random import RandomSource
from meshfuse.ir.schedule import MemoryType
from meshfuse.kernel.nodes import IndexName, Kernel

KernelName = NewType("KernelName", str)


class Collective(Enum):
    """The value is the name of the request that a transport understands."""

    all_gather = "all_gather"
    all_reduce = "all_reduce"
    reduce_scatter = "reduce_scatter"
    exchange = "exchange"
    fetch = "fetch"
    deliver = "deliver"


@final
@frozen_dataclass
class HostBuffer:
    """A tensor on this rank, with local sizes. `order`: axes, slowest first; () is row-major.

    `sharding` says which ranks hold what; None without a mesh. `whole` has the global sizes, ()
    where each rank's are those. With `gaps`, which views may have, strides are any, 0 for expanded
    axes too. A rank outside the mesh has an empty tensor in its place.
    """

    name: Out[TensorName]
    dtype: DataType
    shape: tuple[IntExpr, ...]
    order: tuple[int, ...] = ()
    sharding: Sharding | None = None
    whole: tuple[IntExpr, ...] = ()
    gaps: bool = False

    @property
    def memory_order(self) -> tuple[int, ...]:
        return self.order or tuple(range(len(self.shape)))

    @property
    def mesh(self) -> DeviceMesh | None:
        return None if self.sharding is None else self.sharding.mesh

    @property
    def extents(self) -> tuple[IntExpr, ...]:
        """The global sizes."""
        return self.whole or self.shape

    def lies_like(self, other: HostBuffer) -> bool:
        """Whether one may be in place of the other, as a piece of memory without gaps."""
        return not (self.gaps or other.gaps) and (self.dtype, self.shape, self.memory_order) == (
            other.dtype,
            other.shape,
            other.memory_order,
        )

    def is_on(self, rank: int) -> bool:
        """Whether `rank` holds a part."""
        return self.mesh is None or rank in self.mesh.places


@final
@frozen_dataclass
class Allocate:
    """Fresh uninitialised memory for `buffer`, contiguous in its memory order.

    `bytes` is what one rank needs, of the largest block where blocks are uneven. Symmetric memory
    is such as peers can read, where there is any.
    """

    buffer: Out[TensorName]
    memory: MemoryType
    bytes: IntExpr


@final
@frozen_dataclass
class Free:
    """Drop the program's references: the last use has been issued."""

    buffers: Rest[tuple[TensorName, ...]]


@final
@frozen_dataclass
class Launch:
    """Run a kernel over buffers in its argument order.

    `sizes` gives its extents; strides come with the buffers.
    """

    kernel: KernelName
    buffers: tuple[TensorName, ...]
    scalars: tuple[ScalarName, ...] = ()
    sizes: Mapping[IndexName, IntExpr] = field(default_factory=dict[IndexName, IntExpr])


@final
@frozen_dataclass
class Evaluate:
    """Run expressions one by one through torch, on local shapes, binding each output to its result.

    With `into` the body is one expression of that name, whose result is written into the existing
    buffer. `sum_over` is the index of a loop around it: only the first iteration writes, later ones
    add the result to what the buffer has.
    """

    into: TensorName | None = None
    body: Block[tuple[Expr, ...]] = ()
    sum_over: IndexName | None = None

    def adds(self, indices: Mapping[str, int]) -> bool:
        """Whether the result is added, at these indices of the loops."""
        return self.sum_over is not None and indices[self.sum_over] > 0


@final
@frozen_dataclass
class Communicate:
    """Post a collective over the rank's team along `mesh_axis`, or an exchange, which has none.

    `out` may be read and `src` written after the Wait of this number. What ranks send and receive
    follows from the shardings of both. Where `packed` is not set, both buffers are contiguous in
    memory order, with the gathered or scattered axis slowest. `mesh` is that of `src`, and of `out`
    unless `to_mesh` says otherwise. `bytes` is what `src` holds on one rank, of the largest part
    where they are uneven; `cause` is the op that needed it. With `in_team_order` sums are not left
    to the backend: terms are added in the team's order, 16-bit floats in float32.

    Fetch and deliver make `out`. `owner` is a place along `mesh_axis`: `out` is what the rank there
    has in `src`; or `src` is for the rank there, and `out` what another had for this one. Where
    that is the rank itself, nothing moves and `out` is `src`. With `into` it arrives where it is
    wanted: `out` is that buffer. With `sum_over` it is so only in the first iteration of that loop,
    whose term is the first of a sum there.

    With `in_place` an all-reduce makes `out`, too: it is the memory of `src`, which nobody reads
    from here on.
    """

    out: Out[TensorName]
    collective: Collective
    src: TensorName
    number: int
    mesh: DeviceMesh
    mesh_axis: ParallelType | None
    bytes: IntExpr
    cause: str
    function: str | None = None
    to_mesh: DeviceMesh | None = None
    packed: bool = False
    in_team_order: bool = False
    owner: IntExpr | None = None
    into: TensorName | None = None
    sum_over: IndexName | None = None
    in_place: bool = False

    @property
    def is_transfer(self) -> bool:
        """Whether it is a fetch or a delivery: which memory `out` is depends on the rank."""
        return self.owner is not None

    @property
    def makes_result(self) -> bool:
        """Whether `out` begins to exist here."""
        return self.is_transfer or self.in_place

    def arrives_there(self, indices: Mapping[str, int]) -> bool:
        """Whether `out` is the buffer `into`, in the iteration that the indices say, if it is not
        the rank's own."""
        if self.into is None:
            return False
        return self.sum_over is None or indices[self.sum_over] == 0

    def owner_at(self, place: int, sizes: Mapping[str, int]) -> int | None:
        """Of a fetch or delivery, the owner for the rank at this place along the mesh axis."""
        if self.owner is None or self.mesh_axis is None:
            return None
        return value_at(self.owner, self.mesh, self.mesh_axis, place, sizes)

    @property
    def ranks(self) -> frozenset[int]:
        """All that may send or receive, in any team."""
        return frozenset((*self.mesh.ids, *(self.to_mesh.ids if self.to_mesh else ())))

    @property
    def moves(self) -> bool:
        """Whether ranks meet for it at all."""
        if self.mesh_axis is None:
            return len(self.ranks) > 1
        return self.mesh.axis_size(self.mesh_axis) > 1


@final
@frozen_dataclass
class Wait:
    """The collective of this number is complete on the current stream."""

    number: int


@final
@frozen_dataclass
class View:
    """`out` is block k of `src` along `axis`, or every n-th of its indices from k on; k is the
    rank's place on `mesh_axis`. Shares memory."""

    out: Out[TensorName]
    src: TensorName
    axis: int
    mesh: DeviceMesh
    mesh_axis: ParallelType


@final
@frozen_dataclass
class Pick:
    """Copy into `out` what the rank is to hold of `src` along `axis`, where no view is that."""

    out: Out[TensorName]
    src: TensorName
    axis: int
    mesh: DeviceMesh
    mesh_axis: ParallelType


@final
@frozen_dataclass
class Chunk:
    """`out` is what `src` has along `axis` from `start` on, as much as `out` is long there, or as
    `src` has. Shares memory.

    With `pieces` it is that of each of so many equal blocks of the axis: `out` has an axis more,
    `axis` for the block and the next for what is in it.
    """

    out: Out[TensorName]
    src: TensorName
    axis: int
    start: IntExpr
    pieces: IntExpr | None = None

    @property
    def cut_axis(self) -> int:
        """The axis of `out` that is as long as a chunk is."""
        return self.axis if self.pieces is None else self.axis + 1


@final
@frozen_dataclass
class Clear:
    """Fill a buffer with zeros."""

    buffer: TensorName


@final
@frozen_dataclass
class ForLoop:
    """The body, `count` times, with 0, 1, .. for `index` in the sizes that name it.

    What the body makes it also frees. In iteration k the number n of a communication stands for
    n + k * m, with m communications in the program.
    """

    index: IndexName
    count: IntExpr
    body: Block[tuple[Node, ...]] = ()


@final
@frozen_dataclass
class OnStream:
    """The body, on worker stream number `stream`; behind it the one from before is current again.

    As an iteration of a loop, the body frees what it makes and awaits what it posts; of what stands
    outside it makes and frees nothing. None stands in another.
    """

    stream: IntExpr
    body: Block[tuple[Node, ...]] = ()


@final
@frozen_dataclass
class Record:
    """Marks all that was put on the current stream so far: event number `event`, which stands once
    in the text, of this `instance`, which tells iterations apart."""

    event: int
    instance: IntExpr


@final
@frozen_dataclass
class WaitEvent:
    """What follows on the current stream begins behind that mark; the host goes on.

    To wait for a negative instance is to wait for nothing: there is no iteration before the first.
    """

    event: int
    instance: IntExpr


Node: TypeAlias = (
    Allocate
    | Free
    | Launch
    | Evaluate
    | Communicate
    | Wait
    | View
    | Pick
    | Chunk
    | Clear
    | ForLoop
    | OnStream
    | Record
    | WaitEvent
)
NODES: tuple[type, ...] = (
    Allocate,
    Free,
    Launch,
    Evaluate,
    Communicate,
    Wait,
    View,
    Pick,
    Chunk,
    Clear,
    ForLoop,
    OnStream,
    Record,
    WaitEvent,
)


def all_nodes(body: Iterable[Node]) -> Iterator[Node]:
    """The nodes of a body in the order of the text, those inside of others behind these."""
    for node in body:
        yield node
        if isinstance(node, ForLoop | OnStream):
            yield from all_nodes(node.body)


def nodes_in_row(body: Iterable[Node]) -> Iterator[Node]:
    """The nodes of a body, with those on worker streams in their place; a loop is one node."""
    for node in body:
        if isinstance(node, OnStream):
            yield from nodes_in_row(node.body)
        else:
            yield node


def loop_around(body: Iterable[Node], node: Node) -> ForLoop | None:
    """The innermost loop around a node that stands somewhere in a body."""
    loops = (found for found in all_nodes(body) if isinstance(found, ForLoop))
    return next((loop for loop in loops if node in nodes_in_row(loop.body)), None)


@final
@frozen_dataclass
class HostOutput:
    """A result: returned, or (with `alias`) copied into that input by the body and not returned."""

    buffer: TensorName
    alias: TensorName | None = None


@final
@frozen_dataclass
class HostProgram:
    """Inputs and outputs in call order; scalars, symbols, buffers (inputs included), kernels; body.

    A scalar's name is a symbol, too. A symbol that several entries give is the first's that the
    rank has a part of. Every input's local sizes must equal its buffer's, once the symbols are
    bound, and all of `demands` must hold. `random` gives two scalars at each call, on all ranks
    alike.
    """

    inputs: tuple[TensorName | ScalarName, ...]
    outputs: tuple[HostOutput, ...]
    scalars: Mapping[ScalarName, DataType]
    symbols: tuple[SizeOf, ...]
    demands: tuple[Demand, ...]
    buffers: Mapping[TensorName, HostBuffer]
    kernels: Mapping[KernelName, Kernel]
    body: tuple[Node, ...]
    coordinates: tuple[Coordinate, ...] = ()
    random: RandomSource | None = None

    @property
    def meshes(self) -> tuple[DeviceMesh, ...]:
        """Those that buffers lie on, each once."""
        meshes = (buffer.mesh for buffer in self.buffers.values())
        return tuple(dict.fromkeys(mesh for mesh in meshes if mesh is not None))
