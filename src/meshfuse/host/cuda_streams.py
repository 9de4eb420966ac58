"""Worker streams on CUDA: torch's streams and events. All is issued in program order by the calling
thread, and nothing holds up the host."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from types import TracebackType
from typing import Any, ClassVar, final

import torch

from meshfuse.base.errors import InvariantError
from meshfuse.dist.cuda_driver import Streams, is_capturing, set_stream
from meshfuse.host.events import CALLER, AwaitMark, Event, Mark, SwitchStream


@final
class StreamPool:
    """The worker streams of a device. Safe to use from several threads: calls share them."""

    __slots__ = ("_device", "_first", "_lock", "_streams")

    _pools: ClassVar[dict[torch.device, StreamPool]] = {}
    _pools_lock: ClassVar[Lock] = Lock()

    def __init__(self, device: torch.device, first: int = 0) -> None:
        """`first`: the priority of stream 0; each has a lower one than the stream before it, as
        long as there are lower ones. All have that of an ordinary one, the caller's, if it is 0: of
        what is ready together the GPU begins with what was issued first."""
        self._device = device
        self._first = first
        self._lock = Lock()
        self._streams: list[torch.cuda.Stream] = []

    @classmethod
    def of(cls, device: torch.device) -> StreamPool:
        """The pool of this process for a device."""
        with cls._pools_lock:
            if device not in cls._pools:
                cls._pools[device] = StreamPool(device)
            return cls._pools[device]

    def stream(self, number: int) -> torch.cuda.Stream:
        """Worker stream `number`, made when first asked for."""
        with self._lock:
            while len(self._streams) <= number:
                priority = min(self._first + len(self._streams), 0)
                self._streams.append(torch.cuda.Stream(self._device, priority=priority))
            return self._streams[number]


Act = Callable[[Any], object]
"""What is done for an event of a plan, whatever the slots hold."""


@final
class BoundStreams:
    """The worker streams and events of a plan, looked up once, for one call at a time; used as a
    context, behind which the caller's stream is current again.

    An event may be on its way yet when the next call records it anew: who waits for one waits for
    what it marked when the wait was issued. If a call ends with an error, the caller's stream waits
    for all that was issued: tensors that it let go of may be in use there.
    """

    __slots__ = ("_caller", "_callers", "_events", "_guard", "_number", "_pool", "_used")

    def __init__(self, device: torch.device, pool: StreamPool | None = None) -> None:
        """`pool`: has the worker streams; those that all calls share if there is none."""
        self._pool = pool or StreamPool.of(device)
        self._guard = torch.cuda.device(device)
        self._callers = Streams(device)
        self._caller: Any = None  # that of the call under way
        self._events: dict[Mark, torch.cuda.Event] = {}
        self._used: dict[int, torch.cuda.Stream] = {}
        self._number = CALLER

    def __enter__(self) -> BoundStreams:
        self._guard.__enter__()
        self._caller = self._callers.current()
        self._number = CALLER
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                set_stream(self._caller)
                self.join()
        finally:
            self._caller = None
            self._guard.__exit__(kind, error, trace)

    @property
    def caller(self) -> torch.cuda.Stream:
        """The caller's stream of the call under way."""
        return self._caller

    def join(self) -> None:
        """The caller's stream waits for the workers.

        In a capture for those only that are part of it: the others have got nothing in this call.
        """
        is_captured = is_capturing(self._caller)
        for stream in self._used.values():
            if is_capturing(stream) == is_captured:
                self._caller.wait_stream(stream)

    def bind(self, told: Event | None, number: int) -> Act:
        """What is done for an event of the plan, on the stream of this number."""
        match told:
            case SwitchStream(stream) if stream == CALLER:
                return lambda slots: set_stream(self._caller)
            case SwitchStream(stream):
                worker = self._worker(stream)
                return lambda slots: set_stream(worker)
            case Mark():
                return self._bound_to(self._event(told).record, number)
            case AwaitMark(mark):
                return self._bound_to(self._event(mark).wait, number)
            case _:
                raise InvariantError(f"{told} concerns no stream")

    def follow(self, told: Event) -> None:
        """Do what a program says of streams, as it says it."""
        self.bind(told, self._number)(None)
        if isinstance(told, SwitchStream):
            self._number = told.stream

    def _bound_to(self, act: Callable[[Any], object], number: int) -> Act:
        if number == CALLER:
            return lambda slots: act(self._caller)
        worker = self._worker(number)
        return lambda slots: act(worker)

    def _worker(self, number: int) -> torch.cuda.Stream:
        if number not in self._used:
            self._used[number] = self._pool.stream(number)
        return self._used[number]

    def _event(self, mark: Mark) -> torch.cuda.Event:
        if mark not in self._events:
            self._events[mark] = torch.cuda.Event()
        return self._events[mark]
