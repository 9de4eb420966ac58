"""`fd.timeline()`: what one rank does when, for reading and for trace viewers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, final

from meshfuse.api.mesh_plan import bytes_text
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.host.timeline import (
    COMPUTING,
    HOLDING_UP,
    Item,
    Kind,
    Lane,
    common,
    intervals_of,
    length,
)

SHOWN_ITEMS: Final = 10
"""Rows of a report's table."""
_MICRO = 1e6
_COMPUTE, _COMMUNICATION, _FIRST_WORKER = range(3)
"""Numbers of threads in trace events."""


@final
@frozen_dataclass
class Timeline:
    """What `rank` does when, on its streams and beside them; `str` is a report.

    `source` says by what it was predicted or measured. `notes` say what was taken for want of a
    number.
    """

    rank: int
    is_measured: bool
    source: str
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """From the first item to the end of the last."""
        return max((item.end for item in self.items), default=0.0)

    @property
    def compute_seconds(self) -> float:
        """How long any stream does kernels and operations; waits and posts are none."""
        return self._length(*COMPUTING)

    @property
    def gemm_seconds(self) -> float:
        """What matmul and linear have of `compute_seconds`."""
        return self._length(Kind.gemm)

    @property
    def communication_seconds(self) -> float:
        """How long the communication lane is busy."""
        return self._length(Kind.communication)

    @property
    def held_up_seconds(self) -> float:
        """How long streams post and wait while none computes."""
        held_up, computing = (intervals_of(self.items, k) for k in (HOLDING_UP, COMPUTING))
        return length(held_up) - length(common(held_up, computing))

    @property
    def worker_streams(self) -> tuple[int, ...]:
        """The numbers of the worker streams that have items; none where all is the caller's."""
        return tuple(sorted({item.stream for item in self.items if item.stream is not None}))

    @property
    def bound_seconds(self) -> float:
        """What perfect overlap would take."""
        return max(self.compute_seconds, self.communication_seconds)

    @property
    def hidden_fraction(self) -> float | None:
        """The part of `communication_seconds` during which the rank computes; None without any."""
        if not self.communication_seconds:
            return None
        moving, computing = (
            intervals_of(self.items, kinds) for kinds in ((Kind.communication,), COMPUTING)
        )
        return length(common(moving, computing)) / length(moving)

    def _length(self, *kinds: Kind) -> float:
        return length(intervals_of(self.items, kinds))

    def events(self) -> list[dict[str, Any]]:
        """In Chrome's trace event format: a process for the rank, a thread for each stream and one
        for communications.

        Times are in microseconds. Those of several ranks may stand in one list.
        """
        names = _names(self.rank, self.worker_streams)
        return [*names, *(_event(item, self.rank) for item in self.items)]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that chrome://tracing and Perfetto read."""
        trace = {"traceEvents": self.events(), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(trace, indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return "\n".join(_report(self))

    def __repr__(self) -> str:
        return str(self)


# Trace events.


def _names(rank: int, workers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What threads are called, in the order in which they are shown: streams are side by side."""
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    threads = {
        _COMPUTE: "compute",
        **{_FIRST_WORKER + stream: f"compute, stream {stream}" for stream in workers},
        _COMMUNICATION: "communication",
    }
    for place, (thread, name) in enumerate(threads.items()):
        event: dict[str, Any] = {"ph": "M", "pid": rank, "tid": thread}
        yield {**event, "name": "thread_name", "args": {"name": name}}
        yield {**event, "name": "thread_sort_index", "args": {"sort_index": place}}


def _thread(item: Item) -> int:
    if item.lane is Lane.communication:
        return _COMMUNICATION
    return _COMPUTE if item.stream is None else _FIRST_WORKER + item.stream


def _event(item: Item, rank: int) -> dict[str, Any]:
    details = {"for": item.label.cause, "bytes": item.bytes, "flops": item.flops}
    return {
        "ph": "X",
        "pid": rank,
        "tid": _thread(item),
        "name": item.label.name,
        "cat": item.label.kind.value,
        "ts": item.start * _MICRO,
        "dur": item.seconds * _MICRO,
        "args": {key: value for key, value in details.items() if value},
    }


# The report.


def _report(timeline: Timeline) -> Iterator[str]:
    verb = "measured" if timeline.is_measured else "predicted"
    yield f"timeline of rank {timeline.rank}, {verb}: {timeline.source}"
    yield from timeline.notes
    yield ""
    gemm, hidden = duration_text(timeline.gemm_seconds), timeline.hidden_fraction
    yield f"T_compute   {duration_text(timeline.compute_seconds)}, of which T_gemm {gemm}"
    share = "" if hidden is None else f", {hidden:.0%} of it hidden behind compute"
    yield f"T_comm      {duration_text(timeline.communication_seconds)}{share}"
    if timeline.worker_streams:
        yield f"streams     {len(timeline.worker_streams)} beside the caller's"
    held_up = duration_text(timeline.held_up_seconds)
    yield f"held up     {held_up} by posts and waits"
    yield f"bound       {duration_text(timeline.bound_seconds)} = max(T_compute, T_comm)"
    ratio = timeline.bound_seconds / timeline.seconds if timeline.seconds else 1.0
    yield f"{verb:<11} {duration_text(timeline.seconds)}, of which the bound is {ratio:.0%}"
    yield ""
    yield from _biggest(timeline.items)


def _biggest(items: Sequence[Item]) -> Iterator[str]:
    """Items that are the same each time together, those that take longest first."""
    rows: dict[tuple[str, str], list[Item]] = {}
    for item in items:
        rows.setdefault((item.label.name, item.label.cause), []).append(item)
    ordered = sorted(rows.values(), key=lambda row: -sum(item.seconds for item in row))
    shown = ordered[:SHOWN_ITEMS]
    table = [("time", "count", "kind", "what", "bytes", "for"), *map(_row, shown)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (
            cell.rjust(width) if place in (0, 1, 4) else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
    others = list(chain.from_iterable(ordered[SHOWN_ITEMS:]))
    if others:
        yield f"and {len(others)} more, {duration_text(sum(item.seconds for item in others))}"


def _row(items: Sequence[Item]) -> tuple[str, ...]:
    label = items[0].label
    return (
        duration_text(sum(item.seconds for item in items)),
        str(len(items)),
        label.kind.value,
        label.name,
        bytes_text(sum(item.bytes for item in items)),
        label.cause,
    )


def duration_text(seconds: float) -> str:
    """`1.5 s`, `20 ms`, `3.25 us`: three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * _MICRO:.3g} us"


def nominal_notes(nominal: Mapping[str, int]) -> tuple[str, ...]:
    """Sizes that nothing gave."""
    return tuple(f"{name} = {size}, taken for want of a size" for name, size in nominal.items())
