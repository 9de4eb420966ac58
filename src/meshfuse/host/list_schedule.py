"""When actions on several streams happen, where streams share one device and one link.

A list scheduler. The device does one computation at a time: when it is free, of those that can
begin the first in order of issue. So does a CPU that serves streams as queues, and so do worker
streams of which earlier ones go first. The link carries one transfer at a time, beside the device;
collectives in order of issue, transfers between two ranks when they are ready. All else takes no
time: posts, marks, and waits for what is over. A transfer between two ranks may begin while the
link carries another: it takes the link when it has begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import final

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.host.events import CALLER, AwaitMark, Mark
from meshfuse.host.timeline import Item, Label, Lane, wait_for


@final
@frozen_dataclass
class Computation:
    """`bytes` and `flops` are for the record."""

    label: Label
    seconds: float
    bytes: int
    flops: int


@final
@frozen_dataclass
class Posting:
    """A transfer that begins behind what its stream did before. `number` is its own, also in loops.

    `seconds` on the link, behind `begin` that need none. `in_order`: it does not begin before those
    that are issued before it. One that takes no time needs no link.
    """

    number: int
    label: Label
    seconds: float
    bytes: int
    in_order: bool = True
    begin: float = 0.0


@final
@frozen_dataclass
class Arrival:
    """What follows on the stream begins behind the transfer of this number."""

    number: int


Action = Computation | Posting | Arrival | Mark | AwaitMark


@final
@frozen_dataclass
class Issued:
    """An action on a stream; `place` is its number in order of issue."""

    place: int
    stream: int
    action: Action


@final
@frozen_dataclass
class _Ready:
    """A posted transfer, which could take the link at `since`."""

    place: int
    stream: int
    since: float
    posting: Posting


def schedule(actions: Iterable[tuple[int, Action]]) -> tuple[Item, ...]:
    """The items of actions, given with their streams in order of issue; in the order in which they
    begin.

    A wait is an item for as long as it holds up its stream. Raises InvariantError where streams
    wait for one another in a circle, or for what nobody does.
    """
    issued = [Issued(place, stream, action) for place, (stream, action) in enumerate(actions)]
    return tuple(sorted(_Schedule(issued).run(), key=lambda item: item.start))


@final
class _Schedule:
    """How far each stream has come, and until when device and link are taken."""

    __slots__ = (
        "_arrivals",
        "_computed",
        "_in_order",
        "_items",
        "_labels",
        "_marks",
        "_queues",
        "_reached",
        "_ready",
        "_transferred",
    )

    def __init__(self, issued: Iterable[Issued]) -> None:
        self._queues: dict[int, deque[Issued]] = {}
        self._in_order: deque[int] = deque()
        for each in issued:
            self._queues.setdefault(each.stream, deque()).append(each)
            if isinstance(each.action, Posting) and each.action.in_order and each.action.seconds:
                self._in_order.append(each.action.number)
        self._reached = dict.fromkeys(self._queues, 0.0)
        self._marks: dict[Mark, float] = {}
        self._arrivals: dict[int, float] = {}
        self._labels: dict[int, Label] = {}
        self._ready: list[_Ready] = []
        self._computed = 0.0
        self._transferred = 0.0
        self._items: list[Item] = []

    def run(self) -> list[Item]:
        """Whatever begins earlier is settled first, so that all that can begin then is known.
        A transfer goes before a computation: it may be over at once."""
        self._do_what_takes_no_time()
        while True:
            computation, transfer = self._next_computation(), self._next_transfer()
            if transfer is not None and (computation is None or transfer[0] <= computation[0]):
                self._carry(*transfer)
            elif computation is not None:
                self._compute(*computation)
            else:
                break
            self._do_what_takes_no_time()
        if any(self._queues.values()):
            heads = [queue[0].action for queue in self._queues.values() if queue]
            raise InvariantError(f"streams wait for what never happens: {heads}")
        return self._items

    # What takes time.

    def _next_computation(self) -> tuple[float, Issued] | None:
        heads = [q[0] for q in self._queues.values() if q and isinstance(q[0].action, Computation)]
        if not heads:
            return None
        start = max(self._computed, min(self._reached[head.stream] for head in heads))
        able = (head for head in heads if self._reached[head.stream] <= start)
        return start, min(able, key=lambda head: head.place)

    def _compute(self, start: float, issued: Issued) -> None:
        work, stream = issued.action, issued.stream
        assert isinstance(work, Computation)
        item = Item(
            work.label, Lane.compute, start, work.seconds, work.bytes, work.flops, _number(stream)
        )
        self._items.append(item)
        self._queues[stream].popleft()
        self._computed = self._reached[stream] = item.end

    def _next_transfer(self) -> tuple[float, _Ready] | None:
        able = [each for each in self._ready if self._may_go(each.posting)]
        if not able:
            return None
        start = max(self._transferred, min(each.since for each in able))
        first = min((each for each in able if each.since <= start), key=lambda each: each.place)
        return start, first

    def _may_go(self, posting: Posting) -> bool:
        return not posting.in_order or self._in_order[0] == posting.number

    def _carry(self, start: float, ready: _Ready) -> None:
        posting = ready.posting
        begun = max(self._transferred, start - posting.begin)  # on one lane one after the other
        item = Item(
            posting.label,
            Lane.communication,
            begun,
            start - begun + posting.seconds,
            posting.bytes,
            stream=_number(ready.stream),
        )
        self._items.append(item)
        self._ready.remove(ready)
        if posting.in_order:
            self._in_order.popleft()
        self._transferred = self._arrivals[posting.number] = item.end

    # What does not.

    def _do_what_takes_no_time(self) -> None:
        while sum(map(self._pass_on, self._queues)):
            pass

    def _pass_on(self, stream: int) -> int:
        """Do what the stream can do at once; how much that was."""
        queue = self._queues[stream]
        before = len(queue)
        while queue and self._is_done(queue[0]):
            queue.popleft()
        return before - len(queue)

    def _is_done(self, issued: Issued) -> bool:
        """Do an action that takes no time, if it can be done yet."""
        stream, now = issued.stream, self._reached[issued.stream]
        match issued.action:
            case Computation():
                return False
            case Posting(number, label) as posting:
                self._labels[number] = label
                if posting.seconds:
                    since = now + posting.begin
                    self._ready.append(_Ready(issued.place, stream, since, posting))
                else:
                    self._arrivals[number] = now
            case Arrival(number):
                if number not in self._arrivals:
                    return False
                self._wait(stream, self._labels[number], self._arrivals[number])
            case Mark() as mark:
                self._marks[mark] = now
            case AwaitMark(mark):
                if mark.instance >= 0:
                    if mark not in self._marks:
                        return False
                    self._reached[stream] = max(now, self._marks[mark])
        return True

    def _wait(self, stream: int, label: Label, until: float) -> None:
        now = self._reached[stream]
        if until > now:
            waiting = Item(wait_for(label), Lane.compute, now, until - now, stream=_number(stream))
            self._items.append(waiting)
            self._reached[stream] = until


def _number(stream: int) -> int | None:
    return None if stream == CALLER else stream
