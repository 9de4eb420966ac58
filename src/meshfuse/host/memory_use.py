"""How much memory one rank needs for a host program: a walk over what it allocates and frees."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

from meshfuse.base.dtypes import ITEM_BYTES
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import evaluate
from meshfuse.host.nodes import (
    Allocate,
    Chunk,
    Communicate,
    Evaluate,
    ForLoop,
    Free,
    HostBuffer,
    HostProgram,
    Node,
    OnStream,
    View,
    Wait,
    all_nodes,
)
from meshfuse.host.uses import names_needed
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Broadcast, Expand, Expr, Permute, Reshape, Squeeze

Sizes = Mapping[str, int]
"""The values of all symbols of a host program, coordinates included."""


@final
@frozen_dataclass
class MemoryUse:
    """Bytes on one rank. `peak` is the most that exists at once, first while node `at` runs.

    `inputs` (weights among them) exist all the time; `outputs` are those that are new at the end.
    """

    peak: int
    at: int
    inputs: int
    outputs: int


def memory_use(program: HostProgram, sizes: Sizes, rank: int) -> MemoryUse:
    """What a run needs at its worst moment on `rank`, for which `sizes` hold.

    Views count nothing and keep what they show. Packed communications have, from post to wait, a
    copy of both sides. Iterations on several streams are taken to be at their worst all at once.
    What torch's operations and kernels use inside is left out, and so is what an allocator keeps
    for later.
    """
    use = _Use(program, sizes, rank)
    for name in program.inputs:
        if name in program.buffers:
            use.make(TensorName(name))
    inputs = peak = use.live
    at = 0
    dense = read_outside_torch(program)
    for place, node in enumerate(program.body):
        most = _most_while([node], use, sizes, dense, {})
        if most > peak:
            peak, at = most, place
    held = {use.memory[output.buffer] for output in program.outputs if output.alias is None}
    outputs = sum(use.bytes_of(name) for name in held if name not in program.inputs)
    return MemoryUse(peak, at, inputs, outputs)


def _most_while(
    body: Iterable[Node],
    use: _Use,
    sizes: Sizes,
    dense: Collection[str],
    on_streams: dict[int, int],
) -> int:
    """The most that exists at once while the nodes run. `on_streams`: what the iterations so far
    needed on each."""
    most = use.live
    for node in body:
        if isinstance(node, ForLoop):
            for k in range(evaluate(node.count, sizes)):
                there = {**sizes, node.index: k}
                most = max(most, _most_while(node.body, use, there, dense, on_streams))
        elif isinstance(node, OnStream):
            stream, before = evaluate(node.stream, sizes), use.live
            needed = _most_while(node.body, use, sizes, dense, {}) - before
            on_streams[stream] = max(needed, on_streams.get(stream, 0))
            most = max(most, before + sum(on_streams.values()))
        else:
            use.sizes = sizes
            use.do(node, dense)
            most = max(most, use.live)
            if isinstance(node, Free):
                use.drop(node.buffers)
    return most


@final
@dataclass(slots=True, eq=False, repr=False)
class _Use:
    """What exists now. `memory` has for each buffer the one whose memory it shows."""

    program: HostProgram
    sizes: Sizes
    rank: int
    live: int = 0
    memory: dict[TensorName, TensorName] = field(default_factory=dict[TensorName, TensorName])
    shown: dict[TensorName, int] = field(default_factory=dict[TensorName, int])
    lent: dict[int, int] = field(default_factory=dict[int, int])

    def do(self, node: Node, dense: Collection[str]) -> None:
        """What a node brings; frees come when it is over."""
        match node:
            case Allocate(buffer):
                self.make(buffer)
            case View(out, src) | Chunk(out, src):
                self.show(out, src)
            case Evaluate(into, body):
                for expr in body if into is None else ():
                    self.evaluate(expr, dense)
            case Communicate(out, _, src) if node.in_place:
                self.show(out, src)
            case Communicate(out, _, src) if node.is_transfer:
                if self.is_own(node):
                    self.show(out, src)
                elif node.into is not None and node.arrives_there(self.sizes):
                    self.show(out, node.into)
                else:
                    self.make(out)
            case Communicate() if node.packed:
                self.borrow(node.number, (node.src, node.out))
            case Wait(number):
                self.give_back(number)
            case _:
                pass

    def is_own(self, node: Communicate) -> bool:
        """Whether what a rank fetches or gets is its own."""
        if node.mesh_axis is None:
            return False
        place = node.mesh.coordinate(self.rank, node.mesh_axis)
        return place is not None and node.owner_at(place, self.sizes) == place

    def bytes_of(self, name: TensorName) -> int:
        buffer = self.program.buffers[name]
        if not buffer.is_on(self.rank):
            return 0
        count = ITEM_BYTES[buffer.dtype]
        for extent in buffer.shape:
            count *= evaluate(extent, self.sizes)
        return count

    def make(self, name: TensorName) -> None:
        self.live += self.bytes_of(name)
        self.memory[name], self.shown[name] = name, 1

    def show(self, name: TensorName, of: TensorName) -> None:
        self.memory[name] = self.memory[of]
        self.shown[self.memory[of]] += 1

    def drop(self, names: Collection[TensorName]) -> None:
        for name in names:
            shown = self.memory.get(name)
            if shown is not None:
                self.shown[shown] -= 1
                self.live -= 0 if self.shown[shown] else self.bytes_of(shown)

    def borrow(self, number: int, names: Collection[TensorName]) -> None:
        self.lent[number] = sum(map(self.bytes_of, names))
        self.live += self.lent[number]

    def give_back(self, number: int) -> None:
        self.live -= self.lent.pop(number, 0)

    def evaluate(self, expr: Expr, dense: Collection[str]) -> None:
        for out in expr.outs:
            if out not in self.program.buffers:
                continue  # a scalar
            name = TensorName(out)
            if isinstance(expr, Broadcast | Expand | Permute | Reshape | Squeeze):
                have = self.program.buffers[expr.src]
                if name not in dense or is_view(expr, have, self.program.buffers[name]):
                    self.show(name, expr.src)
                    continue
            self.make(name)


def is_view(
    expr: Broadcast | Expand | Permute | Reshape | Squeeze, src: HostBuffer, out: HostBuffer
) -> bool:
    """Whether torch's view lies in memory as readers of the result count on."""
    if out.gaps or isinstance(expr, Broadcast | Squeeze):
        return True
    if isinstance(expr, Permute):
        return out.memory_order == tuple(expr.dims.index(dim) for dim in src.memory_order)
    return isinstance(expr, Reshape) and not src.order


def read_outside_torch(program: HostProgram) -> set[str]:
    """What outputs and nodes other than Evaluate read: it must be dense in its memory order."""
    found: set[str] = {output.buffer for output in program.outputs}
    for node in all_nodes(program.body):
        if not isinstance(node, Free | Evaluate | ForLoop | OnStream):
            found.update(names_needed(node))
    return found
