"""What is known to be over, and when: the partial order of what one rank does.

The stream does one thing after the other. A transfer begins after all that was known where it was
posted, and is over for who has waited for it. Each is a timeline with a count of its own, and a
clock says how far each is known to have come (vector clocks: Mattern, "Virtual time and global
states of distributed systems", 1989).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from meshfuse.base.frozen import frozen_dataclass

Clock = dict[int, int]
"""Timeline -> how much of it is known to be over."""

STREAM = 0
"""The timeline of all that is no transfer."""


@final
@frozen_dataclass
class Moment:
    """A point of a timeline, and the communication that it belongs to; None on the stream."""

    timeline: int
    tick: int
    number: int | None = None


@final
@frozen_dataclass
class Transfer:
    """A communication under way, and what its end lets know."""

    moment: Moment
    clock: Clock


@final
@dataclass(slots=True)
class Timelines:
    """The clock of the stream, and the timelines of transfers.

    A timeline is used again for a later transfer whose post knows the earlier one to be over: to
    know the later one is then to know the earlier. So clocks are as long as there are transfers
    under way at once, however long the program.
    """

    _known: Clock = field(default_factory=lambda: {STREAM: 0})
    _last: Clock = field(default_factory=dict[int, int])
    _idle: list[int] = field(default_factory=list[int])

    def step(self) -> None:
        """The stream goes on to its next node."""
        self._known[STREAM] += 1

    def now(self) -> Moment:
        return Moment(STREAM, self._known[STREAM])

    def knows(self, moment: Moment) -> bool:
        """Whether what happened there is over for what the stream does now."""
        return self._known.get(moment.timeline, 0) >= moment.tick

    def begin(self, number: int) -> Transfer:
        """A transfer posted now."""
        timeline = self._timeline()
        tick = self._last.get(timeline, 0) + 1
        self._last[timeline] = tick
        return Transfer(Moment(timeline, tick, number), {**self._known, timeline: tick})

    def _timeline(self) -> int:
        if self._idle and self._known.get(self._idle[-1], 0) >= self._last[self._idle[-1]]:
            return self._idle.pop()
        return 1 + len(self._last)

    def end(self, transfer: Transfer) -> None:
        """The stream waits for a transfer."""
        for timeline, tick in transfer.clock.items():
            self._known[timeline] = max(tick, self._known.get(timeline, 0))
        self._idle.append(transfer.moment.timeline)
