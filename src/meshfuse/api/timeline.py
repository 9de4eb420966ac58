"""`fd.timeline()`: what one rank does when, for reading and for trace viewers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, final

from meshfuse.api.mesh_plan import bytes_text
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.host.timeline import COMPUTING, HOLDING_UP, Item, Kind, Lane, time_of

SHOWN_ITEMS: Final = 10
"""Rows of a report's table."""
_MICRO = 1e6
_LANES: Final = tuple(Lane)


@final
@frozen_dataclass
class Timeline:
    """What `rank` does when, on its compute lane and beside it; `str` is a report.

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
        """Of kernels and operations; waits and posts are none."""
        return time_of(self.items, COMPUTING)

    @property
    def gemm_seconds(self) -> float:
        """What matmul and linear have of `compute_seconds`."""
        return time_of(self.items, (Kind.gemm,))

    @property
    def communication_seconds(self) -> float:
        """How long the communication lane is busy."""
        return time_of(self.items, (Kind.communication,))

    @property
    def held_up_seconds(self) -> float:
        """How long the compute lane posts, and waits."""
        return time_of(self.items, HOLDING_UP)

    @property
    def bound_seconds(self) -> float:
        """What perfect overlap would take."""
        return max(self.compute_seconds, self.communication_seconds)

    @property
    def hidden_fraction(self) -> float | None:
        """The part of `communication_seconds` during which the rank computes; None without any."""
        if not self.communication_seconds:
            return None
        return min(1.0, _overlap(self.items) / self.communication_seconds)

    def events(self) -> list[dict[str, Any]]:
        """In Chrome's trace event format: a process for the rank, a thread for each lane.

        Times are in microseconds. Those of several ranks may stand in one list.
        """
        return [*_names(self.rank), *(_event(item, self.rank) for item in self.items)]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that chrome://tracing and Perfetto read."""
        trace = {"traceEvents": self.events(), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(trace, indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return "\n".join(_report(self))

    def __repr__(self) -> str:
        return str(self)


def _overlap(items: Iterable[Item]) -> float:
    """How long both lanes do work. On a lane one item ends before the next begins."""
    found = list(items)
    computing = [item for item in found if item.label.kind in COMPUTING]
    moving = [item for item in found if item.lane is Lane.communication]
    total, at = 0.0, 0
    for transfer in moving:
        while at < len(computing) and computing[at].end <= transfer.start:
            at += 1
        for work in computing[at:]:
            if work.start >= transfer.end:
                break
            total += min(work.end, transfer.end) - max(work.start, transfer.start)
    return total


# Trace events.


def _names(rank: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    for number, lane in enumerate(_LANES):
        place: dict[str, Any] = {"ph": "M", "pid": rank, "tid": number}
        yield {**place, "name": "thread_name", "args": {"name": lane.value}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": number}}


def _event(item: Item, rank: int) -> dict[str, Any]:
    details = {"for": item.label.cause, "bytes": item.bytes, "flops": item.flops}
    return {
        "ph": "X",
        "pid": rank,
        "tid": _LANES.index(item.lane),
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
