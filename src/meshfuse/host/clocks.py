"""What is known to be over, and when: the partial order of what one rank does.

A stream does one thing after the other. A transfer begins after all that was known on its stream
where it was posted, and is over for the stream that has waited for it. Each is a timeline with a
count of its own, and the clock of a stream says how far it knows each to have come (vector clocks:
Mattern, "Virtual time and global states of distributed systems", 1989). A mark keeps what its
stream knew; who waits for it knows that, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.host.events import CALLER

Clock = dict[int, int]
"""Timeline -> how much of it is known to be over."""


@final
@frozen_dataclass
class Moment:
    """A point of a timeline: of a node that runs on a stream, or of the transfer that it posts.

    `place`: the node's in the body, None for what was there before. `number` is the transfer's.
    """

    timeline: int
    tick: int
    stream: int
    place: int | None
    number: int | None = None


@final
@frozen_dataclass
class Transfer:
    """A communication under way, and what its end lets know."""

    moment: Moment
    clock: Clock


@final
@frozen_dataclass
class _Row:
    """Instances from `first` on. `steps`: of each loop of which several iterations are meant, how
    far apart the instances of two are, and how many there are."""

    first: int
    steps: Mapping[int, int]

    def has(self, instance: int) -> bool:
        """All iterations of inner loops lie within a step of outer ones."""
        rest = instance - self.first
        for step, count in sorted(self.steps.items(), reverse=True):
            rest -= step * max(0, min(count - 1, rest // step))
        return rest == 0


@final
@dataclass(slots=True, eq=False, repr=False)
class Marks:
    """What streams knew where an event was marked, by instance. What is known of an iteration that
    is not shown is what was known of the last one shown before it, of each loop around it."""

    _known: dict[int, Mapping[int, int]] = field(default_factory=dict[int, Mapping[int, int]])
    _rows: list[_Row] = field(default_factory=list[_Row])

    def add(self, instance: int, clock: Mapping[int, int], steps: Mapping[int, int]) -> None:
        """`steps`: of loops with iterations that are not shown, how far apart the instances of two
        are, and how many this one stands for."""
        self._known[instance] = clock
        if steps := {step: count for step, count in steps.items() if step > 0}:
            self._rows.append(_Row(instance, steps))

    def find(self, instance: int) -> Mapping[int, int] | None:
        """What was known there; None if it has not been marked."""
        if instance in self._known:
            return self._known[instance]
        return next((self._known[row.first] for row in self._rows if row.has(instance)), None)


def _timeline_of(stream: int) -> int:
    """Those of transfers are above 0, as the caller's stream has 0 and workers what is below."""
    return CALLER - stream


@final
@dataclass(slots=True, eq=False, repr=False)
class Timelines:
    """The clocks of the streams, of which one is current, and the timelines of transfers.

    A timeline is used again for a later transfer whose post knows the earlier one to be over: to
    know the later one is then to know the earlier. So clocks are as long as there are streams, and
    transfers under way at once, however long the program.
    """

    stream: int = CALLER
    _place: int | None = None
    _clocks: defaultdict[int, Clock] = field(
        default_factory=lambda: defaultdict[int, Clock](dict[int, int], {CALLER: {0: 0}})
    )
    _last: Clock = field(default_factory=dict[int, int])
    _idle: list[int] = field(default_factory=list[int])

    @property
    def _known(self) -> Clock:
        return self._clocks[self.stream]

    def step(self, place: int | None, stream: int = CALLER) -> None:
        """On to the node at this place, on this stream."""
        self.stream, self._place = stream, place
        clock, timeline = self._known, _timeline_of(stream)
        clock[timeline] = clock.get(timeline, 0) + 1

    def now(self) -> Moment:
        timeline = _timeline_of(self.stream)
        return Moment(timeline, self._known.get(timeline, 0), self.stream, self._place)

    def knows(self, moment: Moment, stream: int | None = None) -> bool:
        """Whether what happened there is over for what a stream, or the current one, does next."""
        clock = self._known if stream is None else self._clocks[stream]
        return clock.get(moment.timeline, 0) >= moment.tick

    # Marks.

    def mark(self) -> Mapping[int, int]:
        """What the current stream knows, itself included."""
        return dict(self._known)

    def learn(self, clock: Mapping[int, int]) -> None:
        """The current stream waits until what this clock says is over."""
        known = self._known
        for timeline, tick in clock.items():
            known[timeline] = max(tick, known.get(timeline, 0))

    # Transfers.

    def begin(self, number: int) -> Transfer:
        """A transfer posted now, on the current stream."""
        timeline = self._free_timeline()
        tick = self._last.get(timeline, 0) + 1
        self._last[timeline] = tick
        moment = Moment(timeline, tick, self.stream, self._place, number)
        return Transfer(moment, {**self._known, timeline: tick})

    def _free_timeline(self) -> int:
        known = self._known
        for place, timeline in enumerate(self._idle):
            if known.get(timeline, 0) >= self._last[timeline]:
                return self._idle.pop(place)
        return 1 + len(self._last)

    def end(self, transfer: Transfer) -> None:
        """The current stream waits for a transfer."""
        self.learn(transfer.clock)
        self._idle.append(transfer.moment.timeline)
