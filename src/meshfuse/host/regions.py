"""Which part of a memory a name shows, and what was done to each part, and when.

Chunks of one buffer are boxes in it. A view that is no chunk shows what it shows in an order of its
own, in which chunks of it are boxes again: a region is a chain of such frames.

Where it cannot be seen that two regions are apart they count as one: a race that is missed costs
more than a wrong alarm, which names both sides. That is said of regions which differ in kind. Two
chunks that are cut alike are compared by numbers, for which sizes that a call gives are assumed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final, final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.host.clocks import Moment

Box = tuple[tuple[int, int, int], ...]
"""Axis, first index, end; by axis. Axes that are not named are whole."""


@final
@frozen_dataclass
class Frame:
    """A box of what `view` shows of the frame before; None for the memory itself. Views that are
    equal show the same."""

    view: Hashable
    box: Box = ()


Region = tuple[Frame, ...]

WHOLE: Final[Region] = (Frame(None),)


def chunk_of(region: Region, axis: int, start: int, length: int) -> Region:
    """`length` indices of an axis from `start` on, as far as the region goes there."""
    *outer, frame = region
    sides = {place: (low, high) for place, low, high in frame.box}
    first = start
    if axis in sides:
        low, high = sides[axis]
        first, length = low + start, min(length, high - low - start)
    sides[axis] = (first, first + max(length, 0))
    box = tuple((place, *side) for place, side in sorted(sides.items()))
    return (*outer, Frame(frame.view, box))


def view_of(region: Region, view: Hashable) -> Region:
    """What a view shows of a region."""
    return (*region, Frame(view))


def overlap(region: Region, other: Region) -> bool:
    """Whether the two may have an element in common."""
    if is_empty(region) or is_empty(other):
        return False
    for mine, theirs in zip(region, other, strict=False):
        if mine.view != theirs.view:
            return True
        if _are_apart(mine.box, theirs.box):
            return False
        if mine.box != theirs.box:
            return True
    return True


def is_empty(region: Region) -> bool:
    """A chunk behind the end of an axis is."""
    return any(low >= high for frame in region for _, low, high in frame.box)


def covers(region: Region, other: Region) -> bool:
    """Whether all of `other` is surely in `region`."""
    if region == other:
        return True
    *outer, last = region
    if len(other) < len(region) or other[: len(outer)] != tuple(outer):
        return False
    inner = other[len(outer)]
    return last.view == inner.view and _contains(last.box, inner.box)


def _are_apart(box: Box, other: Box) -> bool:
    sides = {axis: (low, high) for axis, low, high in box}
    return any(
        axis in sides and (high <= sides[axis][0] or sides[axis][1] <= low)
        for axis, low, high in other
    )


def _contains(box: Box, inner: Box) -> bool:
    sides = {axis: (low, high) for axis, low, high in inner}
    return all(
        axis in sides and low <= sides[axis][0] and sides[axis][1] <= high
        for axis, low, high in box
    )


@final
@dataclass(slots=True)
class Uses:
    """Of one region: the last write, which of its memory's writes that was, and of each timeline
    the last read since."""

    write: Moment | None = None
    number: int = 0
    reads: dict[int, Moment] = field(default_factory=dict[int, Moment])

    def __iter__(self) -> Iterator[tuple[Moment, str]]:
        """What must be over before the region is written, and what that does."""
        yield from ((read, "reading") for read in self.reads.values())
        if self.write is not None:
            yield self.write, "writing"


@final
@dataclass(slots=True, eq=False, repr=False)
class Memory:
    """What one or more names share, made at a moment of the stream whose memory it is.

    `is_sampled`: iterations that are not looked at may have written other parts of it.
    """

    made: Moment
    names: set[str] = field(default_factory=set[str])
    writes: int = 0
    is_sampled: bool = False
    _uses: dict[Region, Uses] = field(default_factory=dict[Region, Uses])

    def uses(self, region: Region = WHOLE) -> Iterator[Uses]:
        """Those of all regions that may overlap with this one."""
        for other, uses in self._uses.items():
            if other is region or overlap(region, other):
                yield uses

    def read(self, region: Region, moment: Moment) -> None:
        self._uses.setdefault(region, Uses()).reads[moment.timeline] = moment

    def write(self, region: Region, moment: Moment) -> None:
        """What was done before to all of what is written now is in order with whatever is in order
        with this, so it is forgotten."""
        self.writes += 1
        for other in [other for other in self._uses if covers(region, other)]:
            del self._uses[other]
        self._uses[region] = Uses(moment, self.writes)

    def is_written(self, region: Region) -> bool:
        """Whether anything there may have been, or nothing need be."""
        if self.is_sampled and self.writes > 0:
            return True
        return any(uses.write for uses in self.uses(region)) or is_empty(region)

    def last_write(self, region: Region) -> int:
        """The number of the last write there; 0 if there was none."""
        return max((uses.number for uses in self.uses(region)), default=0)
