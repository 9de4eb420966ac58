"""Host programs as ranks of one host run them that read one another's memory: ranks are threads,
with the arena in ordinary memory."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from memory_links import MemoryLink, MemoryWindow, World
from meshfuse import FusionDefinition
from meshfuse.base.options import NO_OPTIONS, with_options
from meshfuse.dist.arena import Arena, Course, Use
from meshfuse.dist.kept_memory import KeptMemories
from meshfuse.dist.symmetric import SymmetricTransport
from meshfuse.host import load as loading
from meshfuse.host import memory_steps
from meshfuse.host.events import GiveBack, Post, Reserve
from meshfuse.host.executors import HostIrExecutor
from meshfuse.host.nodes import HostProgram
from meshfuse.host.plan import Executable
from meshfuse.host.run import run_plan
from meshfuse.multidevice import Overlap
from meshfuse.pipeline import compile
from meshfuse.runtime.arguments import signature_of
from meshfuse.runtime.compile import KernelCompiler

CPU = torch.device("cpu")

_Run = Callable[[int, SymmetricTransport, Sequence[torch.Tensor]], list[torch.Tensor]]
"""A call of the rank at a place."""


@dataclass
class _Recorded:
    """A call: where the numbers of its flags come from, and whose flags they are."""

    course: Course
    sources: list[int]
    flags: list[Any]


def transport_over(arena: Arena) -> SymmetricTransport:
    """A transport on memory of this process."""
    transport = object.__new__(SymmetricTransport)
    transport._arena, transport._link = arena, cast(Any, arena.link)
    transport._sources, transport.kept = {}, KeptMemories()
    return transport


def _position(arena: Arena) -> tuple[int, int, list[Use | None]]:
    return arena._count, arena._last, list(arena._uses)


@dataclass
class Ranks:
    """Programs loaded for all ranks as for GPUs. `copies`: how many elements each rank has copied
    to publish them, in order."""

    host: HostProgram
    world: World
    executables: list[Executable]
    copies: list[list[int]] = field(default_factory=list[list[int]])

    def call(self, inputs: Sequence[Sequence[torch.Tensor]], calls: int = 1) -> list[Any]:
        """What each rank has got, of some calls in a row; its inputs are those of a call."""
        return self._on_each(inputs, calls, self._run)

    def compare(self, inputs: Sequence[Sequence[torch.Tensor]], calls: int = 1) -> list[Any]:
        """As `call`. What was recorded of each call but the first, in the state in which it began,
        has the same flags, with the same numbers, and leaves the same state."""
        courses: list[dict[object, _Recorded]] = [{} for _ in inputs]

        def run(
            place: int, transport: SymmetricTransport, inputs: Sequence[torch.Tensor]
        ) -> list[torch.Tensor]:
            arena, link = transport._arena, transport._arena.link
            assert isinstance(link, MemoryLink)
            if arena._window is None:  # ranks open it together, which nothing recorded can
                return self._run(place, transport, inputs)
            begun = arena.state()
            if begun not in courses[place]:
                courses[place][begun] = self._record(place, transport, inputs)
            recorded, before = courses[place][begun], _position(arena)
            numbers = recorded.course.repeat(recorded.sources)
            after = arena._count, arena.state()
            arena._count, arena._last, arena._uses = before
            link.done.clear()
            outputs = self._run(place, transport, inputs)
            assert [number for _, _, number in link.done] == numbers
            assert [entry[:2] for entry in link.done] == recorded.flags
            assert (arena._count, arena.state()) == after
            return outputs

        found = self._on_each(inputs, calls, run)
        assert all(len(of_rank) < calls - 1 for of_rank in courses)
        return found

    def _record(
        self, place: int, transport: SymmetricTransport, inputs: Sequence[torch.Tensor]
    ) -> _Recorded:
        """A call of which nothing is done: its memory is no other rank's."""
        arena, link = transport._arena, transport._arena.link
        assert isinstance(link, MemoryLink)
        window = arena._window
        assert isinstance(window, MemoryWindow)
        arena._window = MemoryWindow([torch.zeros_like(part) for part in window.parts])
        link.log, course = [], Course(arena)
        self._run(place, transport, inputs)
        log, link.log = link.log, None
        course.end()
        arena._window = window
        sources = [course.source(number) for _, _, number in log]
        return _Recorded(course, sources, [entry[:2] for entry in log])

    def _on_each(
        self, inputs: Sequence[Sequence[torch.Tensor]], calls: int, run: _Run
    ) -> list[Any]:
        found: list[Any] = [None] * self.world.ranks
        self.copies = [[] for _ in found]

        def work(arena: Arena) -> None:
            place, transport = arena.place, transport_over(arena)
            with torch.no_grad():
                found[place] = [run(place, transport, inputs[place]) for _ in range(calls)]
            assert not transport._sources
            assert not any(use is not None and use.pins for use in arena._uses)

        self.world.run(work)
        return found

    def _run(
        self, place: int, transport: SymmetricTransport, inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        executable = self.executables[place]
        plan, slots = executable.start(list(inputs))
        program = run_plan(executable, plan, slots)
        while True:
            try:
                event = next(program)
            except StopIteration as end:
                return [output.clone() for output in end.value]
            match event:
                case Reserve(chunk):
                    memory = transport.allocate(
                        chunk.shape,
                        chunk.strides,
                        chunk.dtype,
                        chunk.most_bytes,
                        lasts=chunk.lasts,
                    )
                    event.fill(memory.fill_(-999))
                case GiveBack(_, memory):
                    for chunk in memory:
                        transport.give_back(chunk)
                case Post(request):
                    assert request.transfer is not None
                    transport.bind(request.collective, request.transfer)(request.out, request.src)
                case _:
                    pass  # all streams are this thread, in program order


def ranks_of(
    fd: FusionDefinition,
    d: int,
    form: Overlap,
    shards: Sequence[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    *options: str,
    compiler: KernelCompiler | None = None,
) -> Ranks:
    """Of a definition whose communications are all between `d` peers; `shards` are rank 0's.
    Without a compiler there are no kernels."""
    program, chosen = fd.fusion.recording.program, with_options(NO_OPTIONS, options)
    signature = signature_of(shards)
    has_kernels = compiler is not None
    found = compile(program, signature, kernels=has_kernels, form=form, options=chosen)
    executor = HostIrExecutor(found.host, found.sources, compiler, CPU)
    for module in (loading, memory_steps):
        monkeypatch.setattr(module, "has_peer_memory", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ranks = Ranks(found.host, World(d), [executor.compile(rank) for rank in range(d)])
    write = SymmetricTransport._write

    def counted(transport: SymmetricTransport, use: Use, src: torch.Tensor) -> None:
        ranks.copies[transport._arena.place].append(src.numel())
        write(transport, use, src)

    monkeypatch.setattr(SymmetricTransport, "_write", counted)
    return ranks
