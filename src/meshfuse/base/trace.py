"""What the compiler decided (notes), and how long its work took (traces)."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import final

from meshfuse.base.frozen import frozen_dataclass


@final
@frozen_dataclass
class Note:
    """One decision of the compiler.

    `subject` is the tensor or expression concerned, `kind` a short stable word (for example
    "all_gather", "copy", "fallback", "gathered"), `bytes` an expression in the program's sizes for
    what moves or is written on one rank ("" where nothing does).
    """

    stage: str
    subject: str
    kind: str
    reason: str
    bytes: str = ""

    def __str__(self) -> str:
        moved = f" [{self.bytes} bytes]" if self.bytes else ""
        return f"{self.stage}: {self.subject}: {self.kind}{moved}: {self.reason}"


class Activity(Enum):
    """What was done during a span."""

    compile = "compile"
    run = "run"


@final
@frozen_dataclass
class Work:
    """What spans are about: a kernel, operations through torch, or a communication.

    `scheduler` is the kind of the segment, `group` its number in the order of running.
    """

    name: str
    scheduler: str
    group: int


@final
@dataclass(slots=True)
class Extent:
    """What the one who does the work adds to its span: mutable, until the span ends.

    Bytes are those of the tensors read and written, each counted once.
    """

    device: str = ""
    input_bytes: int = 0
    output_bytes: int = 0


@final
@frozen_dataclass
class Meeting:
    """Of a communication's span: when its post was over, and when its wait began.

    `arrived`: when the transport was done, None if that is not known or came after the wait began.
    """

    number: int
    posted: int
    awaited: int
    arrived: int | None


@final
@frozen_dataclass
class Span:
    """Work done from `start` to `end`, as the trace's clock says: by default in nanoseconds.

    `stream`: the worker stream that it was put on, None on the caller's.
    """

    activity: Activity
    work: Work
    start: int
    end: int
    extent: Extent
    meeting: Meeting | None = None
    stream: int | None = None

    @property
    def milliseconds(self) -> float:
        return (self.end - self.start) / 1e6


Mark = Callable[[str], AbstractContextManager[object]]
"""Opens a range of this name in another profiler."""

Clock = Callable[[], int]
"""What time it is: nanoseconds, or a number that whoever made the clock can turn into them."""


def _mark_nothing(name: str) -> AbstractContextManager[object]:
    return nullcontext()


@final
@dataclass(slots=True, eq=False, repr=False)
class _UnderWay:
    """A communication that has been posted."""

    work: Work
    extent: Extent
    start: int
    stream: int | None
    posted: int | None = None
    arrived: int | None = None
    awaited: int | None = None


@final
class Trace:
    """The spans of one call, in the order in which they ended.

    Whoever does work is handed a Trace or None; tracing that is off costs the comparison with None.
    Spans may end on any thread. Whoever runs the call says which `stream` is current.
    """

    __slots__ = ("_clock", "_under_way", "mark", "spans", "stream")

    def __init__(self, mark: Mark = _mark_nothing, clock: Clock = time.perf_counter_ns) -> None:
        self.mark = mark
        self.spans: list[Span] = []
        self.stream: int | None = None
        self._clock = clock
        self._under_way: dict[int, _UnderWay] = {}

    @contextmanager
    def span(self, activity: Activity, work: Work) -> Generator[Extent, None, None]:
        """Measure the body, also one that raises."""
        extent, stream = Extent(), self.stream
        start = self._clock()
        try:
            with self.mark(work.name):
                yield extent
        finally:
            end = self._clock()
            self.spans.append(Span(activity, work, start, end, extent, stream=stream))

    def open(self, number: int, work: Work, extent: Extent) -> None:
        """Begin a run that ends elsewhere, by its number: a communication ends at its wait."""
        self._under_way[number] = _UnderWay(work, extent, self._clock(), self.stream)

    def posted(self, number: int) -> None:
        """The post is over: what goes on now, goes on beside other work."""
        self._under_way[number].posted = self._clock()

    def arrived(self, number: int) -> None:
        """The transport is done. Comes from any thread, and may come too late to count."""
        found = self._under_way.get(number)
        if found is not None and found.awaited is None:
            found.arrived = self._clock()

    def awaits(self, number: int) -> None:
        """The wait begins."""
        self._under_way[number].awaited = self._clock()

    def close(self, number: int) -> None:
        """End the run of this number."""
        end = self._clock()
        found = self._under_way.pop(number)
        posted = found.start if found.posted is None else found.posted
        awaited = end if found.awaited is None else found.awaited
        meeting = Meeting(number, posted, awaited, found.arrived)
        work, extent, stream = found.work, found.extent, found.stream
        self.spans.append(Span(Activity.run, work, found.start, end, extent, meeting, stream))
