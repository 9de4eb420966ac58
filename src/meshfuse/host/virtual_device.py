"""A device without data: what one rank's part of a host program does to memory, and when.

Buffers are names of memories, or of parts of them, which last as long as any of their names. Two
uses of which one writes the same part must be in order; it is enough to keep of each part the last
write and the reads since (as Flanagan and Freund do, "FastTrack", 2009).

Memory is its stream's, that on which it was made: as soon as the host lets go of it, what is next
on that stream may have it. So other streams use it only behind the place where it was made, and it
is freed when that stream knows all uses to be over, whichever stream is current then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import final

from typing_extensions import assert_never

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import evaluate
from meshfuse.host.clocks import Marks, Moment, Timelines, Transfer
from meshfuse.host.events import CALLER
from meshfuse.host.faults import FaultKind, node_text, stream_text
from meshfuse.host.nodes import (
    Allocate,
    Chunk,
    Clear,
    Communicate,
    Evaluate,
    ForLoop,
    Free,
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
from meshfuse.host.regions import WHOLE, Memory, Region, chunk_of, view_of
from meshfuse.host.unroll import Issued, Unrolled
from meshfuse.host.uses import MAY_SHARE
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.ops import Expr, Set
from meshfuse.ir.rewrite import read_names

Name = TensorName | ScalarName
Report = Callable[[FaultKind, int | None, Name | None, str, int | None], None]
"""Kind, place in the body (None: its end), buffer, explanation, number of a communication."""


@final
@frozen_dataclass
class _Held:
    """A name that exists, and what it shows of a memory. `writes`: how often that had been written
    when this view was made; 0 for what is no view, or a chunk: whoever reads those wants the
    latest."""

    memory: Memory
    region: Region = WHOLE
    writes: int = 0


@final
class VirtualDevice:
    """One rank's memory. After a fault it goes on as if the program had been right."""

    def __init__(self, shown: Unrolled, rank: int, report: Report) -> None:
        self._shown = shown
        self._program = shown.program
        self._rank = rank
        self._report = report
        self._told: set[tuple[FaultKind, Name | None, int | None]] = set()
        self._place: int | None = None
        self._node: Node | None = None
        self._there = Issued()
        self._values = self._values_at(self._there)
        self._held: dict[Name, _Held] = {}
        self._freed: set[Name] = set()
        self._own: set[Name] = set()  # results of transfers in which nothing moved
        self._time = Timelines()
        self._pending: dict[int, Transfer] = {}
        self._posts: dict[int, tuple[int, Communicate]] = {}
        self._events: dict[int, Marks] = {}

    def run(self) -> None:
        """Do all that the rank does, and report what is wrong."""
        self._time.step(None)
        given = () if self._program.random is None else self._program.random.outs
        for name in (*self._program.inputs, *given):
            self._make_written(name)
        nodes = nodes_here(self._program, self._program.body, self._rank)
        for place, (node, elsewhere) in enumerate(nodes):
            self._go_to(place, node)
            if node is not None:
                self._do(node)
            for name in elsewhere:  # empty tensors
                self._make_written(name)
        self._place = self._node = None
        self._time.step(None)
        self._finish()

    def _go_to(self, place: int, node: Node | None) -> None:
        self._place, self._node = place, node
        there = self._shown.issued[place]
        if there.indices is not self._there.indices:
            self._values = self._values_at(there)
        self._there = there
        self._time.step(place, there.stream)

    def _values_at(self, there: Issued) -> Mapping[str, int]:
        """Those of all symbols on this rank."""
        coordinates = {found.symbol: found.of(self._rank) for found in self._program.coordinates}
        return {**self._shown.sizes, **coordinates, **there.indices}

    def _tell(
        self, kind: FaultKind, name: Name | None, explanation: str, number: int | None = None
    ) -> None:
        """Once for what one cause makes wrong again and again."""
        if (kind, name, number) not in self._told:
            self._told.add((kind, name, number))
            what = "" if self._node is None else f"{node_text(self._node)}: "
            self._report(kind, self._place, name, f"{what}{explanation}", number)

    # Nodes.

    def _do(self, node: Node) -> None:
        match node:
            case Allocate(buffer):
                self._make(buffer, _Held(Memory(self._time.now())))
            case Free(buffers):
                for name in buffers:
                    self._free(name)
            case View(out, src, axis, mesh, mesh_axis):
                self._share(out, src, (axis, mesh, mesh_axis))
            case Chunk():
                self._cut(node)
            case Clear(buffer):
                self._write(buffer)
            case ForLoop() | OnStream():
                raise InvariantError("loops are unrolled to be checked")
            case Record():
                self._mark(node)
            case WaitEvent():
                self._await_mark(node)
            case Launch():
                self._launch(node)
            case Pick(out, src):
                self._read(src)
                self._write(out)
            case Evaluate():
                self._evaluate(node)
            case Communicate():
                self._post(node)
            case Wait(number):
                self._wait(number)
            case _:
                assert_never(node)

    def _cut(self, node: Chunk) -> None:
        source, buffer = self._look_up(node.src), self._program.buffers[node.out]
        start = evaluate(node.start, self._values)
        length = evaluate(buffer.shape[node.cut_axis], self._values)
        region = source.region
        if node.pieces is not None:
            region = view_of(region, (node.axis, evaluate(node.pieces, self._values)))
        region = chunk_of(region, node.cut_axis, start, length)
        self._make(node.out, _Held(source.memory, region))

    def _launch(self, node: Launch) -> None:
        kernel = self._program.kernels[node.kernel]
        pairs = list(zip(node.buffers, kernel.buffers, strict=True))
        for name in (*node.scalars, *(name for name, buffer in pairs if not buffer.written)):
            self._read(name)
        for name in (name for name, buffer in pairs if buffer.written):
            self._write(name)

    def _evaluate(self, node: Evaluate) -> None:
        for expr in node.body:
            if isinstance(expr, MAY_SHARE) and expr.out != node.into:
                self._share(expr.out, expr.src, object())
                continue
            if isinstance(expr, Set) and node.sum_over is None and self._is_there(expr):
                continue
            for name in read_names(expr):
                self._read(name)
            if node.into is not None and node.sum_over is not None:  # not in a first iteration
                self._read(node.into)
            self._define(expr, node.into)

    def _is_there(self, copied: Set) -> bool:
        """Whether the rank's own, which does not move, is copied into the place where it is: torch
        does nothing then. What comes from others is in its place, too, but not before it came."""
        source, place = self._held.get(copied.src), self._held.get(copied.out)
        if copied.src not in self._own or source is None or place is None:
            return False
        if source.memory is not place.memory:
            return False
        names = copied.src, copied.out
        source_buffer, buffer = (self._program.buffers[name] for name in names)
        return source.region == place.region and source_buffer.lies_like(buffer)

    def _define(self, expr: Expr, into: TensorName | None) -> None:
        for name in expr.outs:
            if name == into:
                self._write(name)
            else:
                self._make_written(name)

    def _post(self, node: Communicate) -> None:
        """The transfer reads and writes from now on; what it does must be in order with what was
        done."""
        if node.number in self._posts:
            self._tell(
                FaultKind.double_post, None, f"number {node.number} stands twice", node.number
            )
        if node.makes_result:
            self._make_result(node)
        source, result = self._look_up(node.src), self._look_up(node.out)
        moves = not self._is_own(node)
        self._check_read(node.src, source)
        if moves:
            self._check_write(node.out, result)
        transfer = self._time.begin(node.number)
        source.memory.read(source.region, transfer.moment)
        if node.in_place:  # a name for what was there
            self._held[node.src] = replace(source, writes=source.memory.writes)
        if moves:
            self._record_write(result, transfer.moment)
        self._posts[node.number] = (self._place or 0, node)
        self._pending[node.number] = transfer

    def _is_own(self, node: Communicate) -> bool:
        """Whether what is fetched, or delivered, is the rank's own: nothing moves then."""
        if node.owner is None or node.mesh_axis is None:
            return False
        place = node.mesh.coordinate(self._rank, node.mesh_axis)
        return evaluate(node.owner, self._values) == place

    def _make_result(self, node: Communicate) -> None:
        self._own.discard(node.out)
        if node.in_place:
            held = replace(self._look_up(node.src), writes=0)
        elif self._is_own(node):
            held = self._look_up(node.src)
            self._own.add(node.out)
        elif node.into is not None:
            held = self._look_up(node.into)
        else:
            held = _Held(Memory(self._time.now()))
        self._make(node.out, held)

    def _wait(self, number: int) -> None:
        transfer = self._pending.pop(number, None)
        if transfer is not None:
            self._time.end(transfer)
        elif number in self._posts:
            again = "has been awaited already"
            self._tell(FaultKind.double_wait, None, f"number {number} {again}", number)
        else:
            never = "nothing of this number has been posted"
            self._tell(FaultKind.wait_without_post, None, never, number)

    def _mark(self, node: Record) -> None:
        marks, instance = self._events.setdefault(node.event, Marks()), self._instance(node)
        meant = self._there.stands_for
        steps = {self._instance(node, index) - instance: meant[index] for index in meant}
        marks.add(instance, self._time.mark(), steps)

    def _instance(self, node: Record, index: str | None = None) -> int:
        """The instance that is marked, or that of the next iteration of a loop."""
        values = self._values if index is None else {**self._values, index: self._values[index] + 1}
        return evaluate(node.instance, values)

    def _await_mark(self, node: WaitEvent) -> None:
        instance = evaluate(node.instance, self._values)
        if instance < 0:
            return
        clock = self._events.get(node.event, Marks()).find(instance)
        if clock is None:
            why = f"instance {instance} of event {node.event} has not been recorded before"
            self._tell(FaultKind.unrecorded_event, None, why)
        else:
            self._time.learn(clock)

    # Names.

    def _make(self, name: Name, held: _Held) -> None:
        if name in self._held:
            if name in self._program.buffers:
                self._tell(FaultKind.double_allocation, name, f"{name} exists already")
            self._drop(name)
        self._freed.discard(name)
        held.memory.names.add(name)
        self._held[name] = held

    def _make_written(self, name: Name) -> None:
        memory = Memory(self._time.now())
        memory.write(WHOLE, memory.made)
        self._make(name, _Held(memory))

    def _share(self, out: Name, src: Name, view: Hashable) -> None:
        """`out` is a view of `src`, of what is in it now if anything is."""
        held = self._look_up(src)
        if held.memory.is_written(held.region):
            self._read(src)
        region = view_of(held.region, view)
        self._make(out, _Held(held.memory, region, held.memory.writes))

    def _free(self, name: TensorName) -> None:
        if name in self._freed:
            self._tell(FaultKind.double_free, name, f"{name} has been freed already")
            return
        if name in self._program.inputs:
            self._tell(FaultKind.foreign_free, name, f"{name} belongs to the caller")
            return
        held = self._look_up(name)
        if held.memory.names == {name}:
            self._check_free(name, held.memory)
        self._drop(name)
        self._freed.add(name)

    def _drop(self, name: Name) -> None:
        self._held.pop(name).memory.names.discard(name)

    def _look_up(self, name: Name) -> _Held:
        """What a name is of. A missing one is made, so that one fault does not bring others."""
        if name not in self._held:
            if name in self._freed:
                self._tell(FaultKind.use_after_free, name, f"{name} has been freed")
            else:
                self._tell(FaultKind.use_before_allocation, name, f"{name} does not exist yet")
            self._make_written(name)
        return self._held[name]

    # Uses.

    def _read(self, name: Name) -> None:
        held = self._look_up(name)
        self._check_read(name, held)
        held.memory.read(held.region, self._time.now())

    def _write(self, name: Name) -> None:
        held = self._look_up(name)
        self._check_write(name, held)
        self._record_write(held, self._time.now())

    def _record_write(self, held: _Held, moment: Moment) -> None:
        held.memory.write(held.region, moment)
        held.memory.is_sampled |= self._there.is_sample

    def _check_read(self, name: Name, held: _Held) -> None:
        memory, region = held.memory, held.region
        self._check_made(name, memory)
        if not memory.is_written(region) and not self._is_empty(name):
            why = f"nothing has been written to {name}"
            self._tell(FaultKind.unwritten_read, name, why)
        for write in [uses.write for uses in memory.uses(region) if uses.write is not None]:
            if not self._time.knows(write):
                kind = FaultKind.read_before_wait if write.number is not None else FaultKind.race
                who = self._who(write)
                why = f"{name} is read{self._here} while {who} may still be writing it"
                self._tell(kind, name, why, write.number)
                return
        if 0 < held.writes < memory.last_write(region):
            others = ", ".join(sorted(memory.names - {name}))
            why = f"{name} shows the memory of {others}, which has been overwritten since"
            self._tell(FaultKind.overwritten_read, name, why)

    def _is_empty(self, name: Name) -> bool:
        """Whether it has no element, for the sizes that are assumed."""
        buffer = self._program.buffers.get(TensorName(name))
        return buffer is not None and 0 in (evaluate(e, self._values) for e in buffer.shape)

    def _check_write(self, name: Name, held: _Held) -> None:
        self._check_made(name, held.memory)
        for moment, doing in _moments(held.memory, held.region):
            if not self._time.knows(moment):
                is_moving = moment.number is not None
                kind = FaultKind.write_in_flight if is_moving else FaultKind.race
                who = self._who(moment)
                why = f"writes {name}{self._here} while {who} may still be {doing} it"
                self._tell(kind, name, why, moment.number)

    def _check_made(self, name: Name, memory: Memory) -> None:
        """Its stream may still use what was there before, and may still be making an input."""
        made = memory.made
        if not self._time.knows(made):
            where = "there" if made.place is None else f"made by {self._who(made)}"
            why = f"{name} is used{self._here}, which does not wait until it is {where}"
            self._tell(FaultKind.race, name, why)

    def _check_free(self, name: TensorName, memory: Memory) -> None:
        stream = memory.made.stream
        for moment, doing in _moments(memory, WHOLE):
            if not self._time.knows(moment, stream):
                who, number = self._who(moment), moment.number
                why = f"frees {name} while {who} may still be {doing} it"
                if stream != CALLER:
                    why = f"{why}, for all that {stream_text(stream)} knows, whose memory it is"
                kind = FaultKind.freed_in_use if number is None else FaultKind.free_in_flight
                self._tell(kind, name, why, number)

    @property
    def _here(self) -> str:
        stream = self._time.stream
        return "" if stream == CALLER else f" on {stream_text(stream)}"

    def _who(self, moment: Moment) -> str:
        """What is or was done then: with the node if it is no transfer."""
        if moment.number is not None:
            return f"number {moment.number}"
        if moment.place is None:
            return "the caller"
        node = node_text(self._program.body[moment.place])
        return f"node {moment.place} on {stream_text(moment.stream)} ({node})"

    # The end.

    def _finish(self) -> None:
        for number in self._pending:
            self._place, node = self._posts[number]
            why = f"no wait({number}) follows {node_text(node)}"
            self._tell(FaultKind.never_awaited, node.out, why, number)
        self._place = None
        for name, held in self._held.items():
            self._check_joined(name, held.memory)
        for output in self._program.outputs:
            self._check_output(output.buffer, output.alias)
        returned = {output.buffer for output in self._program.outputs}
        given = (*self._program.inputs, *self._program.scalars)
        for name in self._held:
            if name in self._program.buffers and name not in returned and name not in given:
                self._tell(FaultKind.never_freed, name, f"{name} is left at the end")

    def _check_output(self, name: TensorName, alias: TensorName | None) -> None:
        """A result must be there and complete, or have been copied into its input."""
        if alias is not None:
            memory = self._held[alias].memory
            if memory.writes == 1 and self._program.buffers[alias].is_on(self._rank):
                why = f"{alias} is never updated by {name}"
                self._tell(FaultKind.output_unwritten, alias, why)
            return
        held = self._held.get(name)
        if held is None:
            state = "has been freed" if name in self._freed else "is never made"
            self._tell(FaultKind.output_missing, name, f"the result {name} {state}")
        elif not held.memory.is_written(WHOLE) and not self._is_empty(name):
            why = f"nothing has been written to the result {name}"
            self._tell(FaultKind.output_unwritten, name, why)
        else:
            self._check_read(name, held)

    def _check_joined(self, name: Name, memory: Memory) -> None:
        """What the caller does next with inputs and results comes behind all that was done."""
        for moment, doing in _moments(memory, WHOLE):
            if moment.number not in self._pending and not self._time.knows(moment):
                why = f"{self._who(moment)} may still be {doing} {name}"
                self._tell(FaultKind.not_joined, name, why, moment.number)


def _moments(memory: Memory, region: Region) -> Iterator[tuple[Moment, str]]:
    """What must be over before the region is written, and what that does."""
    for uses in memory.uses(region):
        yield from uses


def check_memory(shown: Unrolled, rank: int, report: Report) -> None:
    """Report what is wrong with the memory and the waits of one rank."""
    VirtualDevice(shown, rank, report).run()
