"""HostIrExecutor: a whole host program, run by this process as the rank that it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from threading import Lock
from typing import final

import torch
from torch.autograd import profiler

from meshfuse.base.trace import Activity, Trace, Work
from meshfuse.codegen.source import KernelSource
from meshfuse.dist.calls import Call
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.pending import Pending
from meshfuse.dist.random_states import draw_alike
from meshfuse.host.actions import Slots
from meshfuse.host.cooperative import CooperativeRun, post
from meshfuse.host.cuda_streams import BoundStreams
from meshfuse.host.direct import Draw, direct_plan
from meshfuse.host.events import AwaitWork, Event, GiveBack, Post, Reserve
from meshfuse.host.load import load
from meshfuse.host.nodes import HostProgram, KernelName
from meshfuse.host.plan import Drawing, Executable, Plan
from meshfuse.host.run import RankProgram, run_nothing, run_plan
from meshfuse.host.stream_order import StreamOrder
from meshfuse.runtime.arguments import Argument
from meshfuse.runtime.autocast import without_autocast
from meshfuse.runtime.compile import KernelCompiler
from meshfuse.runtime.executors import ALONE_IDS, ExecutorIds
from meshfuse.runtime.random import RandomState

WHOLE_PROGRAM = Work("program", "host_ir", 0)
"""What compiling a program and loading it are spans of, besides those of its parts."""


@final
class HostIrExecutor:
    """Runs a host program, on any rank: in a process the one that its communicator says.

    Made of the program, the text of its kernels and who compiles that (None: there are no kernels),
    with who scheduled each kernel. `ids` has the program's; its executors' differ in the group.
    Safe to use from several threads.
    """

    __slots__ = (
        "_compiler",
        "_device",
        "_executables",
        "_lock",
        "_schedulers",
        "_sources",
        "ids",
        "program",
    )

    def __init__(
        self,
        program: HostProgram,
        sources: Mapping[KernelName, KernelSource],
        compiler: KernelCompiler | None,
        device: torch.device,
        schedulers: Mapping[KernelName, str] | None = None,
        ids: ExecutorIds = ALONE_IDS,
    ) -> None:
        self.program = program
        self.ids = ids
        self._schedulers = schedulers
        self._sources = sources
        self._compiler = compiler
        self._device = device
        self._executables: dict[int, Executable] = {}
        self._lock = Lock()

    def compile(self, rank: int, trace: Trace | None = None) -> Executable:
        """The program loaded for a rank: its kernels compiled, its nodes bound. Done once."""
        found = self._executables.get(rank)
        if found is not None:
            return found
        with self._lock:
            if rank not in self._executables:
                self._executables[rank] = self._load(rank, trace)
            return self._executables[rank]

    def _load(self, rank: int, trace: Trace | None) -> Executable:
        with nullcontext() if trace is None else trace.span(Activity.compile, WHOLE_PROGRAM):
            return load(
                self.program,
                self._sources,
                self._compiler,
                rank,
                self._device,
                self._schedulers,
                self.ids,
                trace,
            )

    def is_compiled(self, rank: int) -> bool:
        return rank in self._executables

    def run(
        self,
        inputs: Sequence[Argument],
        communicator: Communicator,
        trace: Trace | None = None,
        given: Mapping[str, int] | None = None,
        call: Call | None = None,
    ) -> list[torch.Tensor]:
        """The visible outputs for this rank's inputs, which fit what the program expects.

        `given`: global sizes that the caller knows, by symbol. `call`: see run_executable.
        `trace` gets a span for each executor. While torch's profiler is on, kernels and collectives
        are ranges of it, under their names. Raises what `interpret` does, and CommunicationError
        naming operation and missing rank.
        """
        if profiler._is_profiler_enabled:
            trace = _with_marks(trace)
        executable = self.compile(communicator.rank(), trace)
        return run_executable(executable, inputs, communicator, trace, given, call)


def run_executable(
    executable: Executable,
    inputs: Sequence[Argument],
    communicator: Communicator,
    trace: Trace | None = None,
    given: Mapping[str, int] | None = None,
    call: Call | None = None,
) -> list[torch.Tensor]:
    """As HostIrExecutor.run, of what it has compiled for the communicator's rank.

    `call` is what the communicator counts it as. Calls that meet other ranks come one by one: see
    CallEntry.enter.
    """
    if executable.is_outside:
        if executable.drawing is not None:
            _draw(executable.drawing, communicator)
        return _drive(run_nothing(executable.program), communicator, 0)
    plan, slots = executable.start(inputs, given)
    return run_planned(executable, plan, slots, communicator, trace, call)


def run_planned(
    executable: Executable,
    plan: Plan,
    slots: Slots,
    communicator: Communicator,
    trace: Trace | None = None,
    call: Call | None = None,
) -> list[torch.Tensor]:
    """As run_executable, of what `Executable.start` gave. The inputs are in the first slots."""
    if profiler._is_profiler_enabled:
        trace = _with_marks(trace)
    drawing = executable.drawing
    draw = None if drawing is None else partial(_draw_into, drawing, communicator)
    if trace is None and not plan.takes_turns:
        return direct_plan(executable, plan, communicator).run(slots, call, draw)
    with torch.no_grad(), without_autocast(), ExitStack() as ends:
        if plan.agreements:
            inputs = slots[: len(executable.program.inputs)]
            log = communicator.entry(plan.agreements, plan.fetches).enter(call, inputs)
            ends.callback(log.leave)
        return _run_observed(executable, plan, slots, communicator, trace, draw)


def _run_observed(
    executable: Executable,
    plan: Plan,
    slots: Slots,
    communicator: Communicator,
    trace: Trace | None,
    draw: Draw | None,
) -> list[torch.Tensor]:
    """With a trace, or in turns: what comes next is known only when it has come to that."""
    if draw is not None:  # before anything is posted
        draw(slots)
    if plan.order is not None and plan.takes_turns:
        return _run_in_turns(executable, plan, plan.order, slots, communicator, trace)
    program = run_plan(executable, plan, slots, trace)
    if plan.order is None or executable.device.type != "cuda":
        return _drive(program, communicator, plan.meetings, trace)
    with BoundStreams(executable.device) as streams:
        return _drive(program, communicator, plan.meetings, trace, streams.follow)


def _run_in_turns(
    executable: Executable,
    plan: Plan,
    order: StreamOrder,
    slots: Slots,
    communicator: Communicator,
    trace: Trace | None,
) -> list[torch.Tensor]:
    call = CooperativeRun(plan, order, slots, communicator, trace)
    try:
        return call.run(executable)
    except BaseException as error:
        if call.to_come:
            communicator.give_up(f"{type(error).__name__}: {error}")
        raise


def _draw(drawing: Drawing, communicator: Communicator) -> RandomState:
    return draw_alike(communicator, drawing.team, drawing.device, drawing.draws)


def _draw_into(drawing: Drawing, communicator: Communicator, slots: Slots) -> None:
    drawing.bind(slots, _draw(drawing, communicator))


def _with_marks(trace: Trace | None) -> Trace:
    """While torch's profiler is on: a trace whose work are ranges of it."""
    trace = trace or Trace()
    trace.mark = profiler.record_function
    return trace


def _stay(event: Event) -> None:
    """All streams are one."""


def _drive(
    program: RankProgram,
    communicator: Communicator,
    meetings: int,
    trace: Trace | None = None,
    follow: Callable[[Event], None] = _stay,
) -> list[torch.Tensor]:
    """Post and wait as the program asks; `trace` is told when transfers are done, `follow` what the
    program says of streams.

    `meetings` is how many waits there will be, and ends of memory that peers read: a failure before
    the last of them is told to the peers, which count on this rank.
    """
    pending: dict[int, Pending] = {}
    to_come = meetings
    try:
        while True:
            try:
                event = next(program)
            except StopIteration as end:
                return end.value
            match event:
                case Post(request):
                    pending[request.number] = post(communicator, request, trace)
                case AwaitWork(number):
                    pending.pop(number).wait()
                    to_come -= 1
                case Reserve(chunk):
                    event.fill(communicator.reserve(chunk))
                case GiveBack(team, memory):
                    communicator.give_back(team, memory)
                    to_come -= 1
                case _:
                    follow(event)
    except BaseException as error:
        if to_come:
            communicator.give_up(f"{type(error).__name__}: {error}")
        raise
