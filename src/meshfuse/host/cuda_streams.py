"""Worker streams on CUDA: torch's streams and events. All is issued in program order by the calling
thread, and nothing holds up the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from types import TracebackType
from typing import ClassVar, Final, final

import torch

from meshfuse.host.events import CALLER, AwaitMark, Event, Mark, SwitchStream

_PRIORITIES: Final = 3
"""Of torch's streams, besides the ordinary one; lower numbers go first."""


@final
class StreamPool:
    """The worker streams of a device, and events that no call uses. Safe to use from several
    threads: calls share the streams, an event belongs to one."""

    __slots__ = ("_device", "_events", "_lock", "_streams")

    _pools: ClassVar[dict[torch.device, StreamPool]] = {}
    _pools_lock: ClassVar[Lock] = Lock()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = Lock()
        self._streams: list[torch.cuda.Stream] = []
        self._events: deque[torch.cuda.Event] = deque()

    @classmethod
    def of(cls, device: torch.device) -> StreamPool:
        """The pool of this process for a device."""
        with cls._pools_lock:
            if device not in cls._pools:
                cls._pools[device] = StreamPool(device)
            return cls._pools[device]

    def stream(self, number: int) -> torch.cuda.Stream:
        """Worker stream `number`, made when first asked for.

        Of iterations that are ready together the first has the multiprocessors first: what it has
        made is then sent while the next one computes. Sharing them, both would end late.
        """
        with self._lock:
            while len(self._streams) <= number:
                priority = min(len(self._streams) - _PRIORITIES, 0)
                self._streams.append(torch.cuda.Stream(self._device, priority))
            return self._streams[number]

    def take_event(self) -> torch.cuda.Event:
        """An event that is the taker's until given back."""
        with self._lock:
            return self._events.pop() if self._events else torch.cuda.Event()

    def give_back(self, events: list[torch.cuda.Event]) -> None:
        """The device may still be on its way to them: who waits for one waits for what it marked
        when the wait was issued."""
        with self._lock:
            self._events.extend(events)


Following = Callable[["WorkerStreams"], None]
"""What is done for an event of a plan, on the streams of a call."""


def bind_events(tells: Sequence[Event | None]) -> tuple[Following | None, ...]:
    """What is done for what each action of a plan always tells; None for what concerns no streams,
    and actions that do something themselves."""
    return tuple(_bind_event(told) for told in tells)


def _bind_event(told: Event | None) -> Following | None:
    match told:
        case SwitchStream(stream):
            return lambda streams: streams.switch(stream)
        case Mark():
            return lambda streams: streams.mark(told)
        case AwaitMark(mark):
            return lambda streams: streams.await_mark(mark)
        case _:
            return None


@final
class WorkerStreams:
    """The streams of one call; used as a context, behind which the caller's is current again.

    If the call ends with an error, the caller's stream waits for all that was issued: tensors that
    it let go of may be in use there.
    """

    __slots__ = ("_caller", "_current", "_device", "_guard", "_marks", "_pool", "_used")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._guard = torch.cuda.device(device)
        self._pool = StreamPool.of(device)
        self._marks: dict[tuple[int, int], torch.cuda.Event] = {}
        self._used: dict[int, torch.cuda.Stream] = {}

    def __enter__(self) -> WorkerStreams:
        self._guard.__enter__()
        self._caller = self._current = torch.cuda.current_stream(self._device)
        self._used[CALLER] = self._caller
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            torch.cuda.set_stream(self._caller)
            if error is not None:
                for stream in self._used.values():
                    if stream is not self._caller:
                        self._caller.wait_stream(stream)
            self._pool.give_back(list(self._marks.values()))
        finally:
            self._guard.__exit__(kind, error, trace)

    def follow(self, event: Event) -> None:
        """Do what a program asks for that concerns streams."""
        following = _bind_event(event)
        if following is not None:
            following(self)

    def switch(self, number: int) -> None:
        """What follows runs on this stream."""
        stream = self._used.get(number)
        if stream is None:
            stream = self._used[number] = self._pool.stream(number)
        self._current = stream
        torch.cuda.set_stream(stream)

    def mark(self, mark: Mark) -> None:
        event = self._marks[mark.event, mark.instance] = self._pool.take_event()
        event.record(self._current)

    def await_mark(self, mark: Mark) -> None:
        self._current.wait_event(self._marks[mark.event, mark.instance])
