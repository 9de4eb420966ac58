"""When one rank does what of a host program, by a cost model: no device is needed.

Nodes become actions on streams, with the time that each takes; host/list_schedule.py says when they
happen. The ranks of a team are taken to post at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

from typing_extensions import assert_never

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, evaluate
from meshfuse.facts.sharding import rank_extents
from meshfuse.host.device_rates import DeviceRates
from meshfuse.host.events import CALLER, AwaitMark, Mark
from meshfuse.host.expression_work import ExpressionWork, LocalTensor, work_of
from meshfuse.host.list_schedule import Action, Arrival, Computation, Posting, schedule
from meshfuse.host.memory_use import is_view, read_outside_torch
from meshfuse.host.nodes import (
    Allocate,
    Chunk,
    Clear,
    Communicate,
    Evaluate,
    ForLoop,
    Free,
    HostProgram,
    Launch,
    Node,
    OnStream,
    Pick,
    Record,
    View,
    Wait,
    WaitEvent,
    all_nodes,
)
from meshfuse.host.presence import nodes_here
from meshfuse.host.timeline import Item, Kind, Label, Segments, label_of
from meshfuse.host.uses import views_made
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Broadcast, Expand, Expr, Permute, Reshape, Set, Squeeze

Sizes = Mapping[str, int]
Transmissions = Mapping[int, "Sequence[Transmission]"]
"""By number of the communication, iteration by iteration where it stands in loops."""


@final
@frozen_dataclass
class Transmission:
    """What a rank receives in a communication, and how long that takes once all have come, behind
    what it takes to `begin`, while the link may carry something else."""

    bytes: int
    seconds: float
    begin: float = 0.0


def predict_items(
    program: HostProgram,
    segments: Segments,
    sizes: Sizes,
    rank: int,
    rates: DeviceRates,
    transmissions: Transmissions,
) -> tuple[Item, ...]:
    """The items of `rank`, for which `sizes` hold, in the order in which they begin.

    Work counts as the longest of its arithmetic and its memory traffic, behind the time that it
    takes to begin; views, allocations, the copies of packed communications and what a rank fetches
    of itself or delivers to itself count nothing.
    """
    nodes = list(all_nodes(program.body))
    arriving = {n.out: n for n in nodes if isinstance(n, Communicate) and n.into is not None}
    views = dict(pair for node in nodes for pair in views_made(node))
    dense = read_outside_torch(program)
    model = _Model(program, segments, sizes, rank, rates, dense, arriving, views)
    return schedule(_actions(model, rank, transmissions))


def _actions(
    model: _Model, rank: int, transmissions: Transmissions
) -> Iterator[tuple[int, Action]]:
    """What the rank does that takes time, or says what comes behind what, on which stream."""
    posted: Counter[int] = Counter()
    under_way: dict[int, int] = {}
    for node, there, stream in _nodes_done(model.program, model.program.body, rank, model.sizes):
        match node:
            case Communicate(number=number):
                sent = transmissions[number][posted[number]]
                posted[number] += 1
                under_way[number] = posted.total()
                yield stream, _posting(node, under_way[number], sent, rank, there, model.segments)
            case Wait(number):
                yield stream, Arrival(under_way.pop(number))
            case Record(event, instance):
                yield stream, Mark(event, evaluate(instance, there))
            case WaitEvent(event, instance):
                yield stream, AwaitMark(Mark(event, evaluate(instance, there)))
            case _:
                work = _computation(node, replace(model, sizes=there))
                if work is not None and work.seconds:
                    yield stream, work


def _nodes_done(
    program: HostProgram, body: Sequence[Node], rank: int, sizes: Sizes, stream: int = CALLER
) -> Iterator[tuple[Node, Sizes, int]]:
    """What the rank does, loops iteration by iteration, with the sizes there and the stream."""
    for node, _ in nodes_here(program, body, rank):
        if isinstance(node, ForLoop):
            for k in range(evaluate(node.count, sizes)):
                there = {**sizes, node.index: k}
                yield from _nodes_done(program, node.body, rank, there, stream)
        elif isinstance(node, OnStream):
            worker = evaluate(node.stream, sizes)
            yield from _nodes_done(program, node.body, rank, sizes, worker)
        elif node is not None:
            yield node, sizes, stream


def _posting(
    node: Communicate, number: int, sent: Transmission, rank: int, sizes: Sizes, segments: Segments
) -> Posting:
    """Between two ranks one transfer need not wait for another."""
    if is_own(node, rank, sizes):
        sent = Transmission(0, 0.0)
    label = label_of(node, segments)
    in_order = not node.is_transfer
    return Posting(number, label, sent.seconds, sent.bytes, in_order, sent.begin)


def is_own(node: Communicate, rank: int, sizes: Sizes) -> bool:
    """Whether a rank fetches of itself, or delivers to itself: the result is the source."""
    if node.mesh_axis is None or node.owner is None:
        return False
    place = node.mesh.coordinate(rank, node.mesh_axis)
    return place is not None and node.owner_at(place, sizes) == place


def _computation(
    node: Allocate | Free | View | Chunk | Launch | Evaluate | Pick | Clear | ForLoop | OnStream,
    model: _Model,
) -> Computation | None:
    match node:
        case Allocate() | Free() | View() | Chunk() | ForLoop() | OnStream():
            return None  # of a loop its body counts
        case Launch():
            return Computation(label_of(node, model.segments), *model.launch(node))
        case Evaluate():
            return Computation(label_of(node, model.segments), *model.evaluate(node))
        case Pick(out):
            return Computation(Label(f"pick {out}", Kind.operation, ""), *model.copy(out))
        case Clear(buffer):
            return Computation(Label(f"clear {buffer}", Kind.operation, ""), *model.fill(buffer))
        case _:
            assert_never(node)


@final
@frozen_dataclass
class _Model:
    """What nodes take on one rank: seconds, bytes, operations.

    `dense`: names that are read elsewhere than in torch's operations. `arriving`: what brings the
    results that may arrive where they are wanted, by name. `views`: what each view is of.
    """

    program: HostProgram
    segments: Segments
    sizes: Sizes
    rank: int
    rates: DeviceRates
    dense: Collection[str]
    arriving: Mapping[TensorName, Communicate]
    views: Mapping[TensorName, TensorName]

    def launch(self, node: Launch) -> tuple[float, int, int]:
        """One pass over the buffers; what lies between the expressions stays in registers."""
        segment = self.segments.get(node.kernel)
        if segment is None:
            raise InvariantError(f"nobody says what {node.kernel} is made of")

        def tensors(name: str) -> LocalTensor | None:
            if name not in segment.fusion.tensors:
                return None
            tensor = TensorName(name)
            return self._local(rank_extents(segment, tensor), segment.tensor(tensor).dtype)

        works = [work_of(expr, tensors) for expr in segment.fusion.exprs]
        flops = sum(work.other_flops for work in works)
        amount = sum(self._buffer(name).bytes for name in dict.fromkeys(node.buffers))
        seconds = max(flops / self.rates.other_flops, amount / self.rates.memory_bytes)
        return self.rates.launch + seconds, amount, flops

    def evaluate(self, node: Evaluate) -> tuple[float, int, int]:
        """One expression after the other; each reads and writes memory."""
        seconds, amount, flops = 0.0, 0, 0
        for expr in node.body:
            if (
                self._is_there(expr, node)
                or self._makes_view(expr)
                or not any(name in self.program.buffers for name in expr.outs)
            ):
                continue
            work = work_of(expr, self._tensor)
            seconds += self.rates.operation + self._seconds(work)
            amount, flops = amount + work.bytes, flops + work.contraction_flops + work.other_flops
        return seconds, amount, flops

    def copy(self, out: TensorName) -> tuple[float, int, int]:
        amount = 2 * self._buffer(out).bytes
        return self.rates.operation + amount / self.rates.memory_bytes, amount, 0

    def fill(self, out: TensorName) -> tuple[float, int, int]:
        amount = self._buffer(out).bytes
        return self.rates.operation + amount / self.rates.memory_bytes, amount, 0

    def _is_there(self, expr: Expr, node: Evaluate) -> bool:
        """Whether a first term, or what is fetched, need not be copied: it has arrived there, or
        is the rank's own and a part of the same memory."""
        if not isinstance(expr, Set) or node.into is None or node.adds(self.sizes):
            return False
        brought = self.arriving.get(expr.src)
        if brought is None or brought.into != node.into or not brought.arrives_there(self.sizes):
            return False
        if not is_own(brought, self.rank, self.sizes):
            return True
        return self._memory(brought.src) == self._memory(node.into)

    def _memory(self, name: TensorName) -> TensorName:
        """What a name is a view of, else the name itself."""
        while name in self.views:
            name = self.views[name]
        return name

    def _makes_view(self, expr: Expr) -> bool:
        if not isinstance(expr, Broadcast | Expand | Permute | Reshape | Squeeze):
            return False
        src, out = self.program.buffers[expr.src], self.program.buffers[expr.out]
        return expr.out not in self.dense or is_view(expr, src, out)

    def _seconds(self, work: ExpressionWork) -> float:
        return max(
            work.contraction_flops / self.rates.contraction_flops_of(work.dtype),
            work.other_flops / self.rates.other_flops,
            work.bytes / self.rates.memory_bytes,
        )

    def _tensor(self, name: str) -> LocalTensor | None:
        is_tensor = name in self.program.buffers
        return self._buffer(TensorName(name)) if is_tensor else None

    def _buffer(self, name: TensorName) -> LocalTensor:
        buffer = self.program.buffers[name]
        return self._local(buffer.shape, buffer.dtype)

    def _local(self, extents: Sequence[IntExpr], dtype: DataType) -> LocalTensor:
        return LocalTensor(tuple(evaluate(extent, self.sizes) for extent in extents), dtype)
