"""A plan as one process runs it when nobody watches: its actions in program order, and no driver.

What a driver would be told of, and would look up, is bound here at the first call: collectives to
their groups, transfers to the memory that peers share, streams and events. On GPUs a call then
costs little more than torch's own operations in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import final

import torch

from meshfuse.dist.communicator import Communicator
from meshfuse.dist.direct import DirectCollective, DirectTransfer
from meshfuse.host.cuda_streams import BoundStreams
from meshfuse.host.events import (
    AwaitMark,
    AwaitWork,
    Mark,
    PostCollective,
    PostTransfer,
    ReserveSlot,
    SwitchStream,
)
from meshfuse.host.plan import Bound, Executable, Plan, Slots

Act = Callable[[Slots], object]
"""An action that does all that it stands for."""


def run_directly(
    executable: Executable,
    plan: Plan,
    slots: Slots,
    communicator: Communicator,
    standing: object = None,
) -> list[torch.Tensor]:
    """The visible outputs; as run_plan under a driver, without a trace.

    `standing`: what the groups of the communicator stand on, another one if they were made anew.
    To be called under no_grad where operations run through torch.
    """
    for direct in plan.direct:
        if direct.is_of(communicator, standing):
            return direct.run(slots)
    direct = DirectPlan(executable, plan, communicator, standing)
    plan.direct[:] = [direct]
    return direct.run(slots)


@final
class DirectPlan:
    """A plan bound to a communicator, and to what that stands on. A call from a second thread, on
    streams that the first still issues to, has a binding of its own."""

    __slots__ = (
        "_actions",
        "_bind_again",
        "_communicator",
        "_meetings",
        "_outputs",
        "_standing",
        "_streams",
        "_turn",
    )

    def __init__(
        self, executable: Executable, plan: Plan, communicator: Communicator, standing: object
    ) -> None:
        self._communicator = communicator
        self._standing = standing
        has_streams = plan.order is not None and executable.device.type == "cuda"
        self._streams = BoundStreams(executable.device) if has_streams else None
        self._turn = Lock()
        self._outputs = executable.outputs
        self._bind_again = lambda: DirectPlan(executable, plan, communicator, standing)
        binding = _Binding(communicator, self._streams, plan.bound)
        self._actions = tuple(binding.bind_all())
        self._meetings = binding.meetings

    def is_of(self, communicator: Communicator, standing: object) -> bool:
        """Whether what was looked up is what there is now."""
        return self._standing is standing and self._communicator is communicator

    def run(self, slots: Slots) -> list[torch.Tensor]:
        streams = self._streams
        if streams is None:
            return self._run(slots)
        if not self._turn.acquire(blocking=False):
            return self._bind_again().run(slots)
        try:
            with streams:
                return self._run(slots)
        finally:
            self._turn.release()

    def _run(self, slots: Slots) -> list[torch.Tensor]:
        to_come = iter(self._actions)
        try:
            for act in to_come:
                act(slots)
        except BaseException as error:
            done = len(self._actions) - sum(1 for _ in to_come)
            if done <= self._meetings:  # peers count on the rank until its last wait
                self._communicator.give_up(f"{type(error).__name__}: {error}")
            raise
        return [slots[place] for place in self._outputs]


@final
class _Binding:
    """Binds the actions of a plan. `meetings`: how many there are up to the last that meets
    others."""

    def __init__(
        self, communicator: Communicator, streams: BoundStreams | None, bound: Sequence[Bound]
    ) -> None:
        self.meetings = 0
        self._communicator = communicator
        self._streams = streams
        self._bound = bound
        self._posted: dict[int, DirectCollective | DirectTransfer] = {}
        self._posted_on: dict[int, int] = {}
        self._awaited_on = {
            found.tells.number: found.stream
            for found in bound
            if isinstance(found.tells, AwaitWork)
        }

    def bind_all(self) -> Iterator[Act]:
        following = [*(found.tells for found in self._bound), None][1:]
        for number, (found, told) in enumerate(zip(self._bound, following, strict=True), start=1):
            if found.posts or isinstance(found.tells, AwaitWork):
                self.meetings = number
            passes_by = isinstance(found.tells, SwitchStream) and isinstance(told, SwitchStream)
            yield _do_nothing if passes_by else self._bind(found)

    def _bind(self, found: Bound) -> Act:
        communicator = self._communicator
        asked = found.asks or found.tells
        match asked:
            case PostCollective(sized, src, out):
                collective = self._posted[sized.number] = DirectCollective(communicator, sized)
                self._posted_on[sized.number] = found.stream
                return lambda slots: collective.post(slots[src], slots[out])
            case PostTransfer():
                return self._bind_transfer(asked, found.stream)
            case ReserveSlot(chunk, slot):

                def reserve(slots: Slots) -> None:
                    slots[slot] = communicator.reserve(chunk)

                return reserve
            case AwaitWork(number):
                return self._bind_wait(number, found.stream)
            case SwitchStream() | Mark() | AwaitMark() if self._streams is not None:
                return self._streams.bind(asked, found.stream)
            case _:
                return found.action

    def _bind_transfer(self, asked: PostTransfer, stream: int) -> Act:
        number, src, out, into = asked.transfer.number, asked.src, asked.out, asked.into
        transfer = self._posted[number] = DirectTransfer(self._communicator, asked.transfer)
        self._posted_on[number] = stream

        def post(slots: Slots) -> None:
            slots[out] = transfer.post(slots[src], None if into is None else slots[into])

        if self._streams is None or self._awaited_on[number] == stream:
            return post
        mark = self._streams.bind(_arrival(number), stream)

        def post_and_mark(slots: Slots) -> None:
            post(slots)
            mark(slots)

        return post_and_mark

    def _bind_wait(self, number: int, stream: int) -> Act:
        posted = self._posted[number]
        posted_on = self._posted_on[number]
        if isinstance(posted, DirectCollective) or self._streams is None or posted_on == stream:
            return lambda slots: posted.wait()
        await_mark = self._streams.bind(AwaitMark(_arrival(number)), stream)

        def wait(slots: Slots) -> None:
            posted.wait()
            await_mark(slots)

        return wait


def _do_nothing(slots: Slots) -> None:
    """Of a stream that is left at once."""


def _arrival(number: int) -> Mark:
    """What marks the end of a transfer on the stream that has got it: no event of the program has
    this number."""
    return Mark(-1, number)
