"""A device without data: what one rank's part of a host program does to memory, and when.

Buffers are names of memories, which last as long as any of their names. Two uses of a memory of
which one writes must be in order; it is enough to keep the last write and the reads since (as
Flanagan and Freund do, "FastTrack", 2009), so that every node costs the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from typing_extensions import assert_never

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.host.clocks import Moment, Timelines, Transfer
from meshfuse.host.faults import FaultKind, node_text
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
from meshfuse.host.uses import MAY_SHARE
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.ops import Expr
from meshfuse.ir.rewrite import read_names

Name = TensorName | ScalarName
Report = Callable[[FaultKind, int | None, Name | None, str, int | None], None]
"""Kind, place in the body (None: its end), buffer, explanation, number of a communication."""


@final
@dataclass(slots=True)
class _Memory:
    """What one or more names share. `reads`: the last on each timeline since `write`."""

    names: set[Name] = field(default_factory=set[Name])
    write: Moment | None = None
    reads: dict[int, Moment] = field(default_factory=dict[int, Moment])
    writes: int = 0


@final
@frozen_dataclass
class _Held:
    """A name that exists. `writes`: how often its memory had been written when this view of it was
    made; 0 for what was made before, or is no view: whoever reads those wants the latest."""

    memory: _Memory
    writes: int = 0


@final
class VirtualDevice:
    """One rank's memory. After a fault it goes on as if the program had been right."""

    def __init__(self, program: HostProgram, rank: int, report: Report) -> None:
        self._program = program
        self._rank = rank
        self._report = report
        self._told: set[tuple[FaultKind, Name | None, int | None]] = set()
        self._place: int | None = None
        self._node: Node | None = None
        self._held: dict[Name, _Held] = {}
        self._freed: set[Name] = set()
        self._time = Timelines()
        self._pending: dict[int, Transfer] = {}
        self._posts: dict[int, tuple[int, Communicate]] = {}

    def run(self) -> None:
        """Do all that the rank does, and report what is wrong."""
        given = () if self._program.random is None else self._program.random.outs
        for name in (*self._program.inputs, *given):
            self._make_written(name)
        self._run(self._program.body)
        self._place = self._node = None
        self._finish()

    def _run(self, body: Sequence[Node], inside: int | None = None) -> None:
        """`inside`: the place of the node that the body stands in, if it is not the program's."""
        nodes = nodes_here(self._program, body, self._rank)
        for place, (node, elsewhere) in enumerate(nodes):
            self._place, self._node = place if inside is None else inside, node
            self._time.step()
            if isinstance(node, OnStream):
                self._run(node.body, self._place)
            elif node is not None:
                self._do(node)
            for name in elsewhere:  # empty tensors
                self._make_written(name)

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
                self._make(buffer, _Memory())
            case Free(buffers):
                for name in buffers:
                    self._free(name)
            case View(out, src):
                self._share(out, src)
            case Chunk(out, src):
                self._make(out, self._look_up(src).memory)
            case Clear(buffer):
                self._write(buffer)
            case ForLoop() | OnStream():
                raise InvariantError("loops are unrolled to be checked")
            case Record() | WaitEvent():
                pass
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
                self._share(expr.out, expr.src)
                continue
            for name in read_names(expr):
                self._read(name)
            if node.into is not None and node.sum_over is not None:  # not in a first iteration
                self._read(node.into)
            self._define(expr, node.into)

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
            self._make(
                node.out, _Memory() if node.into is None else self._look_up(node.into).memory
            )
        source, result = self._look_up(node.src), self._look_up(node.out)
        self._check_read(node.src, source)
        self._check_write(node.out, result.memory, FaultKind.write_in_flight, "writes")
        transfer = self._time.begin(node.number)
        source.memory.reads[transfer.moment.timeline] = transfer.moment
        _record_write(result.memory, transfer.moment)
        self._posts[node.number] = (self._place or 0, node)
        self._pending[node.number] = transfer

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

    # Names.

    def _make(self, name: Name, memory: _Memory, writes: int = 0) -> None:
        if name in self._held:
            if name in self._program.buffers:
                self._tell(FaultKind.double_allocation, name, f"{name} exists already")
            self._drop(name)
        self._freed.discard(name)
        memory.names.add(name)
        self._held[name] = _Held(memory, writes)

    def _make_written(self, name: Name) -> None:
        self._make(name, _Memory(write=self._time.now(), writes=1))

    def _share(self, out: Name, src: Name) -> None:
        """`out` is a view of `src`, of what is in it now if anything is."""
        held = self._look_up(src)
        if held.memory.write is not None:
            self._read(src)
        self._make(out, held.memory, held.memory.writes)

    def _free(self, name: TensorName) -> None:
        if name in self._freed:
            self._tell(FaultKind.double_free, name, f"{name} has been freed already")
            return
        if name in self._program.inputs:
            self._tell(FaultKind.foreign_free, name, f"{name} belongs to the caller")
            return
        held = self._look_up(name)
        if held.memory.names == {name}:
            self._check_write(name, held.memory, FaultKind.free_in_flight, "frees")
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
        now = self._time.now()
        held.memory.reads[now.timeline] = now

    def _write(self, name: Name) -> None:
        memory = self._look_up(name).memory
        self._check_write(name, memory, FaultKind.write_in_flight, "writes")
        _record_write(memory, self._time.now())

    def _check_read(self, name: Name, held: _Held) -> None:
        write = held.memory.write
        if write is None:
            self._tell(FaultKind.unwritten_read, name, f"nothing has been written to {name}")
        elif not self._time.knows(write):
            why = f"{name} is read while number {write.number} may still be writing it"
            self._tell(FaultKind.read_before_wait, name, why, write.number)
        elif 0 < held.writes < held.memory.writes:
            others = ", ".join(sorted(held.memory.names - {name}))
            why = f"{name} shows the memory of {others}, which has been overwritten since"
            self._tell(FaultKind.overwritten_read, name, why)

    def _check_write(self, name: Name, memory: _Memory, kind: FaultKind, verb: str) -> None:
        uses = [(read, "reading") for read in memory.reads.values()]
        uses += [(memory.write, "writing")] if memory.write is not None else []
        for moment, doing in uses:
            if not self._time.knows(moment):
                why = f"{verb} {name} while number {moment.number} may still be {doing} it"
                self._tell(kind, name, why, moment.number)

    # The end.

    def _finish(self) -> None:
        for number in self._pending:
            self._place, node = self._posts[number]
            why = f"no wait({number}) follows {node_text(node)}"
            self._tell(FaultKind.never_awaited, node.out, why, number)
        self._place = None
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
        elif held.memory.write is None:
            why = f"nothing has been written to the result {name}"
            self._tell(FaultKind.output_unwritten, name, why)
        else:
            self._check_read(name, held)


def _record_write(memory: _Memory, moment: Moment) -> None:
    memory.write = moment
    memory.reads.clear()
    memory.writes += 1


def check_memory(program: HostProgram, rank: int, report: Report) -> None:
    """Report what is wrong with the memory and the waits of one rank."""
    VirtualDevice(program, rank, report).run()
