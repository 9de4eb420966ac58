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
class Span:
    """Work done from `start` to `end`, in nanoseconds of time.perf_counter_ns."""

    activity: Activity
    work: Work
    start: int
    end: int
    extent: Extent

    @property
    def milliseconds(self) -> float:
        return (self.end - self.start) / 1e6


Mark = Callable[[str], AbstractContextManager[object]]
"""Opens a range of this name in another profiler."""


def _mark_nothing(name: str) -> AbstractContextManager[object]:
    return nullcontext()


@final
class Trace:
    """The spans of one call, in the order in which they ended.

    Whoever does work is handed a Trace or None; tracing that is off costs the comparison with None.
    Spans may end on any thread.
    """

    __slots__ = ("_open", "mark", "spans")

    def __init__(self, mark: Mark = _mark_nothing) -> None:
        self.mark = mark
        self.spans: list[Span] = []
        self._open: dict[int, tuple[Work, Extent, int]] = {}

    @contextmanager
    def span(self, activity: Activity, work: Work) -> Generator[Extent, None, None]:
        """Measure the body, also one that raises."""
        extent = Extent()
        start = time.perf_counter_ns()
        try:
            with self.mark(work.name):
                yield extent
        finally:
            end = time.perf_counter_ns()
            self.spans.append(Span(activity, work, start, end, extent))

    def open(self, number: int, work: Work, extent: Extent) -> None:
        """Begin a run that ends elsewhere, by its number: a communication ends at its wait."""
        self._open[number] = (work, extent, time.perf_counter_ns())

    def close(self, number: int) -> None:
        """End the run of this number."""
        end = time.perf_counter_ns()
        work, extent, start = self._open.pop(number)
        self.spans.append(Span(Activity.run, work, start, end, extent))
