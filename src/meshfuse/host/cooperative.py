"""Worker streams on CPUs: queues that the calling thread serves, one action at a time.

Transfers go on by themselves, in the backend's threads. While one stream waits for its transfer the
thread goes on with another; only if none can go on does it block, in the oldest wait. Among the
actions that can be done, the first in program order is.

Ranks must post in one order, whatever has arrived where: posts are made in program order, and so
are those waits in which a collective posts again. More threads would do no more: what streams hide
on CPUs is waiting, and torch's operations have all cores already.
"""

from __future__ import annotations

from bisect import insort
from functools import partial
from typing import Final, final

import torch

from meshfuse.base.trace import Trace
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.pending import Pending
from meshfuse.host.actions import Slots
from meshfuse.host.events import CALLER, AwaitMark, AwaitWork, Event, Mark, Post, SwitchStream
from meshfuse.host.plan import Executable, Plan
from meshfuse.host.run import run_traced
from meshfuse.host.stream_order import StreamOrder

_CALLER_QUEUE: Final = 0


def post(communicator: Communicator, request: CollectiveRequest, trace: Trace | None) -> Pending:
    """Start a collective; `trace` is told when its transfer is done."""
    pending = communicator.post(request)
    if trace is not None:
        pending.when_arrived(partial(trace.arrived, request.number))
    return pending


@final
class CooperativeRun:
    """One call. `to_come`: how many waits there are still; peers count on the rank until the last.

    What an iteration makes has slots of its stream: they begin as the caller's, which do not change
    while iterations are under way.
    """

    __slots__ = (
        "_communicator",
        "_heads",
        "_next_post",
        "_order",
        "_pending",
        "_plan",
        "_posting_waits",
        "_progress",
        "_reached",
        "_slots",
        "_streams",
        "_trace",
        "to_come",
    )

    def __init__(
        self,
        plan: Plan,
        order: StreamOrder,
        slots: Slots,
        communicator: Communicator,
        trace: Trace | None,
    ) -> None:
        self.to_come = plan.communications
        self._plan = plan
        self._order = order
        self._communicator = communicator
        self._trace = trace
        self._slots: list[Slots] = [slots, *([] for _ in order.queues[1:])]
        self._streams: list[int | None] = [None] * len(order.queues)
        self._progress = [0] * len(order.queues)
        self._heads = sorted((queue[0], k) for k, queue in enumerate(order.queues) if queue)
        self._reached: set[Mark] = set()
        self._pending: dict[int, Pending] = {}
        self._posting_waits: set[int] = set()
        self._next_post = 0

    def run(self, executable: Executable) -> list[torch.Tensor]:
        """Do all actions of the plan, and return the visible outputs.

        Raises what the actions raise, and CommunicationError as a wait does.
        """
        heads, queues = self._heads, self._order.queues
        while heads:
            chosen = next((k for k, (place, _) in enumerate(heads) if self._can_do(place)), 0)
            place, queue = heads[chosen]
            self._do(place, queue)
            del heads[chosen]
            self._progress[queue] += 1
            if self._progress[queue] < len(queues[queue]):
                insort(heads, (queues[queue][self._progress[queue]], queue))
        return [self._slots[_CALLER_QUEUE][place] for place in executable.outputs]

    # What can be done. The first in program order always can, if it is no wait for a transfer.

    def _can_do(self, place: int) -> bool:
        match self._order.tells[place]:
            case AwaitMark(mark):
                return mark in self._reached
            case AwaitWork(number):
                posting = self._pending[number].posting
                return posting.has_arrived and not (posting.posts_again and self._must_wait(place))
            case SwitchStream(stream) if stream != CALLER:
                return self._caller_is_past(place)
            case None:
                posts = self._order.posts
                is_next = self._next_post < len(posts) and posts[self._next_post] == place
                return not self._plan_posts(place) or (is_next and not self._must_wait(place))
            case _:
                return True

    def _plan_posts(self, place: int) -> bool:
        traced = self._plan.traced[place]
        return traced is not None and traced.posts

    def _must_wait(self, place: int) -> bool:
        """Whether something is to be posted first that comes before in program order."""
        posts = self._order.posts
        if self._next_post < len(posts) and posts[self._next_post] < place:
            return True
        return any(earlier < place for earlier in self._posting_waits)

    def _caller_is_past(self, place: int) -> bool:
        """Whether the caller's slots are as they are at this place."""
        queue, done = self._order.queues[_CALLER_QUEUE], self._progress[_CALLER_QUEUE]
        return done == len(queue) or queue[done] > place

    # Doing it.

    def _do(self, place: int, queue: int) -> None:
        action, slots = self._plan.actions[place], self._slots[queue]
        if self._trace is None:
            event = action(slots)
            if event is not None:
                self._follow(event, place, queue)
        else:
            self._trace.stream = self._streams[queue]
            for event in run_traced(self._plan.traced[place], action, slots, self._trace):
                self._follow(event, place, queue)

    def _follow(self, event: Event, place: int, queue: int) -> None:
        match event:
            case Post(request):
                pending = post(self._communicator, request, self._trace)
                self._pending[request.number] = pending
                self._next_post += 1
                if pending.posting.posts_again:
                    self._posting_waits.add(self._order.waits[request.number])
            case AwaitWork(number):
                self._pending.pop(number).wait()
                self._posting_waits.discard(place)
                self.to_come -= 1
            case SwitchStream(stream):
                caller = self._slots[_CALLER_QUEUE]
                self._slots[queue] = [] if stream == CALLER else list(caller)
                self._streams[queue] = None if stream == CALLER else stream
            case Mark():
                self._reached.add(event)
            case AwaitMark():
                pass
