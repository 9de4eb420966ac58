"""When one rank does what of a host program, by a cost model: no device is needed.

The compute lane does one node after the other. A communication is under way on the communication
lane from its post, or from the end of the one before, to its completion; a wait holds up the
compute lane until then. The ranks of a team are taken to post at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from typing_extensions import assert_never

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, evaluate
from meshfuse.facts.sharding import rank_extents
from meshfuse.host.device_rates import DeviceRates
from meshfuse.host.expression_work import ExpressionWork, LocalTensor, work_of
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
)
from meshfuse.host.presence import nodes_here
from meshfuse.host.timeline import Item, Kind, Label, Lane, Segments, label_of, wait_for
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Broadcast, Expand, Expr, Permute, Reshape, Squeeze

Sizes = Mapping[str, int]
Transmissions = Mapping[int, "Sequence[Transmission]"]
"""By number of the communication, iteration by iteration where it stands in loops."""


@final
@frozen_dataclass
class Transmission:
    """What a rank receives in a communication, and how long that takes once all have come."""

    bytes: int
    seconds: float


def predict_items(
    program: HostProgram,
    segments: Segments,
    sizes: Sizes,
    rank: int,
    rates: DeviceRates,
    transmissions: Transmissions,
) -> tuple[Item, ...]:
    """The items of `rank`, for which `sizes` hold, in the order in which they begin.

    Work counts as the longest of its arithmetic
    and its memory traffic, behind the time that it takes to begin; views, allocations and the
    copies of packed communications count nothing.
    """
    clock = _Clock(transmissions)
    model = _Model(program, segments, sizes, rates, read_outside_torch(program))
    for node, there in _nodes_done(program, program.body, rank, sizes):
        _advance(clock, node, replace(model, sizes=there))
    return tuple(sorted(clock.items, key=lambda item: item.start))


def _nodes_done(
    program: HostProgram, body: Sequence[Node], rank: int, sizes: Sizes
) -> Iterator[tuple[Node, Sizes]]:
    """What the rank does, loops iteration by iteration, with the sizes there."""
    for node, _ in nodes_here(program, body, rank):
        if isinstance(node, ForLoop):
            for k in range(evaluate(node.count, sizes)):
                yield from _nodes_done(program, node.body, rank, {**sizes, node.index: k})
        elif isinstance(node, OnStream):
            yield from _nodes_done(program, node.body, rank, sizes)
        elif node is not None:
            yield node, sizes


def _advance(clock: _Clock, node: Node, model: _Model) -> None:
    match node:
        case Allocate() | Free() | View() | Chunk() | ForLoop():
            pass  # of a loop its body counts
        case OnStream() | Record() | WaitEvent():
            pass
        case Launch():
            clock.compute(label_of(node, model.segments), *model.launch(node))
        case Evaluate():
            clock.compute(label_of(node, model.segments), *model.evaluate(node))
        case Pick(out):
            clock.compute(Label(f"pick {out}", Kind.operation, ""), *model.copy(out))
        case Clear(buffer):
            clock.compute(Label(f"clear {buffer}", Kind.operation, ""), *model.fill(buffer))
        case Communicate():
            clock.post(node.number, label_of(node, model.segments))
        case Wait(number):
            clock.wait(number)
        case _:
            assert_never(node)


@final
@dataclass(slots=True)
class _Clock:
    """How far each lane has come, and what is under way."""

    transmissions: Transmissions
    items: list[Item] = field(default_factory=list[Item])
    computed: float = 0.0
    communicated: float = 0.0
    under_way: dict[int, Item] = field(default_factory=dict[int, Item])
    posted: Counter[int] = field(default_factory=Counter[int])

    def compute(self, label: Label, seconds: float, amount: int, flops: int) -> None:
        if seconds:
            self.items.append(Item(label, Lane.compute, self.computed, seconds, amount, flops))
            self.computed += seconds

    def post(self, number: int, label: Label) -> None:
        sent = self.transmissions[number][self.posted[number]]
        self.posted[number] += 1
        start = max(self.computed, self.communicated)
        item = Item(label, Lane.communication, start, sent.seconds, sent.bytes)
        self.items.append(item)
        self.under_way[number] = item
        self.communicated = item.end

    def wait(self, number: int) -> None:
        item = self.under_way.pop(number)
        blocked = item.end - self.computed
        if blocked > 0:
            label = wait_for(item.label)
            self.items.append(Item(label, Lane.compute, self.computed, blocked))
            self.computed = item.end


@final
@frozen_dataclass
class _Model:
    """What nodes take on one rank: seconds, bytes, operations.

    `dense`: names that are read elsewhere than in torch's operations.
    """

    program: HostProgram
    segments: Segments
    sizes: Sizes
    rates: DeviceRates
    dense: Collection[str]

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
            if self._makes_view(expr) or not any(
                name in self.program.buffers for name in expr.outs
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
