"""A plan as one process runs it when nobody watches: its actions in program order, and no driver.

What a driver would be told of, and would look up, is bound here at the first call: collectives to
their groups, transfers to the memory that peers share, streams and events. On GPUs a call then
costs little more than torch's own operations in it.
"""

# torch's context that switches grad off takes longer than all else that is done here for a call.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import final

import torch

from meshfuse.base.errors import CommunicationError
from meshfuse.dist.calls import Call
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.direct import DirectCollective, DirectTransfer
from meshfuse.host.actions import Bound, Slots
from meshfuse.host.cuda_streams import BoundStreams
from meshfuse.host.events import (
    CALLER,
    AwaitMark,
    AwaitWork,
    Event,
    GiveBackSlot,
    Mark,
    PostCollective,
    PostTransfer,
    ReserveSlot,
    SwitchStream,
    put_reserved,
)
from meshfuse.host.plan import Executable, Plan
from meshfuse.host.repeatable import reason_against_graphs
from meshfuse.host.replays import Replays
from meshfuse.runtime.autocast import is_autocasting, without_autocast

Act = Callable[[Slots], object]
"""An action that does all that it stands for."""

Draw = Callable[[Slots], None]
"""Draws what a call needs at random."""


def direct_plan(executable: Executable, plan: Plan, communicator: Communicator) -> DirectPlan:
    """The plan bound to the communicator, and to what its groups stand on now."""
    for direct in plan.direct:
        if direct.communicator is communicator:
            return direct
    direct = DirectPlan(executable, plan, communicator)
    plan.direct[:] = [direct]
    return direct


@final
class DirectPlan:
    """A plan bound to a communicator. Safe to use from several threads: one that comes while
    another issues to the same streams has a binding of its own."""

    __slots__ = (
        "__weakref__",
        "_actions",
        "_bind_again",
        "_entry",
        "_evaluates",
        "_makes",
        "_meetings",
        "_outputs",
        "_replays",
        "_streams",
        "_turn",
        "communicator",
    )

    def __init__(self, executable: Executable, plan: Plan, communicator: Communicator) -> None:
        self.communicator: Communicator | None = communicator
        """None once the groups are closed that it is bound to."""
        self._entry = None
        if plan.agreements:
            self._entry = communicator.entry(plan.agreements, plan.fetches)
        has_streams = plan.order is not None and executable.device.type == "cuda"
        self._streams = BoundStreams(executable.device) if has_streams else None
        self._turn = Lock()
        self._evaluates = executable.evaluates
        self._outputs = executable.outputs
        self._bind_again = lambda: DirectPlan(executable, plan, communicator)
        made = _made_before(executable, plan, communicator) if has_streams else None
        bound = [found for found in plan.bound if made is None or found.makes not in made]
        while self._streams is None and bound and bound[-1].is_letting_go:
            bound.pop()  # what a call has goes with it
        binding = _Binding(communicator, self._streams, bound)
        self._actions = tuple(binding.bind_all())
        self._meetings = binding.meetings
        self._makes: tuple[Act, ...] = ()
        self._replays: Replays | None = None
        if made is not None:
            self._makes = tuple(found.action for found in plan.bound if found.makes in made)
            self._replays = Replays(
                executable.device,
                lambda streams: binding.recording(streams).bind_all(),
                binding.transfers.values(),
                len(executable.program.inputs),
                made,
            )
        if self._entry is not None:
            self._entry.bind(self)

    @property
    def replays(self) -> Replays | None:
        """The calls that were replayed, if any may be."""
        return self._replays

    def forget(self) -> None:
        """The groups are closed: whoever runs the plan again binds it anew."""
        self._actions, self.communicator, self._entry = (_refuse,), None, None
        self._replays = None

    def run(
        self, slots: Slots, call: Call | None, drawing: Draw | None = None
    ) -> list[torch.Tensor]:
        """A call with these inputs in the first slots: the visible outputs; as run_plan under a
        driver, without a trace.

        `call` is what the communicator counts it as. `drawing` puts what is drawn at random into
        its slots. Raises as CallEntry.enter, Communicator.post and Pending.wait do.
        """
        if self._evaluates and is_autocasting():
            with without_autocast():
                return self.run(slots, call, drawing)
        has_grad = self._evaluates and torch.is_grad_enabled()
        log = to_come = None
        try:
            if has_grad:  # inputs have no grad, and only torch's operations would care
                torch._C._set_grad_enabled(False)
            if self._entry is not None:
                log = self._entry.enter(call, slots)  # as yet, no tensors but the inputs
            if drawing is not None:  # before anything is posted
                drawing(slots)
            if self._streams is not None:
                return self._run_on(self._streams, slots)
            to_come = iter(self._actions)  # as in `_run`, which would be a frame more
            for act in to_come:
                act(slots)
            to_come = None
            return [slots[place] for place in self._outputs]
        except BaseException as error:
            if to_come is not None:
                self._fail(error, to_come)
            raise
        finally:
            if log is not None:
                log.leave()
            if has_grad:
                torch._C._set_grad_enabled(True)

    def _run_on(self, streams: BoundStreams, slots: Slots) -> list[torch.Tensor]:
        if not self._turn.acquire(blocking=False):
            again = self._bind_again()
            assert again._streams is not None
            return again._run_on(again._streams, slots)
        try:
            with streams:
                try:
                    for make in self._makes:
                        make(slots)
                except BaseException as error:  # no memory, say
                    self._give_up(error)
                    raise
                replays = self._replays
                if replays is not None and self._has_replayed(replays, slots, streams):
                    return [slots[place] for place in self._outputs]
                return self._run(slots)
        finally:
            self._turn.release()

    def _has_replayed(self, replays: Replays, slots: Slots, streams: BoundStreams) -> bool:
        try:
            return replays.has_run(slots, streams.caller)
        except BaseException as error:
            self._give_up(error)
            raise

    def _run(self, slots: Slots) -> list[torch.Tensor]:
        to_come = iter(self._actions)
        try:
            for act in to_come:
                act(slots)
        except BaseException as error:
            self._fail(error, to_come)
            raise
        return [slots[place] for place in self._outputs]

    def _fail(self, error: BaseException, to_come: Iterator[Act]) -> None:
        """An action has failed, or an interrupt came before the first; `to_come` are those that
        were not begun. Peers count on the rank until its last wait."""
        done = len(self._actions) - sum(1 for _ in to_come)
        if max(done, 1) <= self._meetings:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        if self.communicator is not None:
            self.communicator.give_up(f"{type(error).__name__}: {error}")


def replays_of(executable: Executable) -> list[Replays]:
    """Of its plans, the calls that were replayed."""
    direct = (found for plan in executable.plans() for found in plan.direct)
    return [found.replays for found in direct if found.replays is not None]


def _made_before(
    executable: Executable, plan: Plan, communicator: Communicator
) -> tuple[int, ...] | None:
    """The outputs of a plan whose calls may be replayed, which have memory before anything is done;
    None for other plans."""
    asked = [found.asks for found in plan.bound]
    if not communicator.has_replays or not any(isinstance(a, PostTransfer) for a in asked):
        return None
    if any(isinstance(a, PostCollective) for a in asked):
        return None
    if reason_against_graphs(executable.program) is not None:
        return None
    made = {found.makes for found in plan.bound if found.stream == CALLER}
    return executable.outputs if made.issuperset(executable.outputs) else None


@final
class _Binding:
    """Binds the actions of a plan. `meetings`: how many there are up to the last that meets
    others. `recorded`: transfers that another one has bound, by number; they are put on streams
    that record."""

    def __init__(
        self,
        communicator: Communicator,
        streams: BoundStreams | None,
        bound: Sequence[Bound],
        recorded: Mapping[int, DirectTransfer] | None = None,
    ) -> None:
        self.meetings = 0
        self._recorded = recorded
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

    def recording(self, streams: BoundStreams) -> _Binding:
        """The same for streams that record."""
        return _Binding(self._communicator, streams, self._bound, self.transfers)

    @property
    def transfers(self) -> dict[int, DirectTransfer]:
        """Those that are bound, by number."""
        posted = self._posted.items()
        return {number: found for number, found in posted if isinstance(found, DirectTransfer)}

    def bind_all(self) -> Iterator[Act]:
        """Actions that do all that is to be done. A collective that is awaited at once is one."""
        following = [*self._bound, None][1:]
        current, number = CALLER, 0
        performed: Event | None = None  # the latest wait that comes with its collective
        for found, after in zip(self._bound, following, strict=True):
            told = None if after is None else after.tells
            if isinstance(found.tells, SwitchStream):
                if isinstance(told, SwitchStream) or found.tells.stream == current:
                    continue
                current = found.tells.stream
            if found.tells is not None and found.tells == performed:
                continue
            number += 1
            if found.posts or isinstance(found.tells or found.asks, AwaitWork | GiveBackSlot):
                self.meetings = number
            is_awaited = isinstance(found.asks, PostCollective) and _awaits(told, found.asks)
            if is_awaited:
                performed = told
            yield self._bind(found, is_awaited=is_awaited)

    def _bind(self, found: Bound, *, is_awaited: bool) -> Act:
        """What does all of it; with the wait of a collective that is awaited at once."""
        communicator = self._communicator
        asked = found.asks or found.tells
        match asked:
            case PostCollective(sized):
                collective = self._posted[sized.number] = DirectCollective(communicator, sized)
                self._posted_on[sized.number] = found.stream
                return _performing(collective, asked) if is_awaited else _posting(collective, asked)
            case PostTransfer():
                return self._bind_transfer(asked, found.stream)
            case ReserveSlot(chunk, slot, piece):

                def reserve(slots: Slots) -> None:
                    put_reserved(slots, slot, communicator.reserve(chunk), piece)

                return reserve
            case GiveBackSlot():

                def give_back(slots: Slots) -> None:
                    given = asked.act(slots)
                    communicator.give_back(given.team, given.memory)

                return give_back
            case AwaitWork(number):
                return self._bind_wait(number, found.stream)
            case SwitchStream() | Mark() | AwaitMark() if self._streams is not None:
                return self._streams.bind(asked, found.stream)
            case _:
                return found.action

    def _bind_transfer(self, asked: PostTransfer, stream: int) -> Act:
        number, src, out, into = asked.transfer.number, asked.src, asked.out, asked.into
        if self._recorded is None:
            transfer = DirectTransfer(self._communicator, asked.transfer)
            put = transfer.post
        else:
            transfer = self._recorded[number]
            put = transfer.record
        self._posted[number] = transfer
        self._posted_on[number] = stream

        def post(slots: Slots) -> None:
            slots[out] = put(slots[src], None if into is None else slots[into])

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


def _posting(collective: DirectCollective, asked: PostCollective) -> Act:
    """What posts a collective, which is awaited later."""
    src, out, in_place = asked.src, asked.out, asked.in_place

    def post(slots: Slots) -> None:
        if in_place:
            slots[out] = slots[src]
        collective.post(slots[src], slots[out])

    return post


def _performing(collective: DirectCollective, asked: PostCollective) -> Act:
    """What posts a collective and awaits it at once: as DirectCollective.perform, but where `quick`
    will do two frames less."""
    src, out, in_place = asked.src, asked.out, asked.in_place

    def perform(slots: Slots) -> None:
        source = slots[src]
        if in_place:
            slots[out] = source
        result, start = slots[out], collective.quick
        if start is None or not (source.is_contiguous() and result.is_contiguous()):
            collective.perform(source, result)
            return
        work = start(result, source)
        if work is not None:
            collective.follow(work)

    return perform


def _refuse(slots: Slots) -> None:
    raise CommunicationError(
        "execute: the process group that this call began on is being destroyed"
    )


def _awaits(told: Event | None, posted: PostCollective) -> bool:
    """Whether it is the wait for what was posted."""
    return isinstance(told, AwaitWork) and told.number == posted.collective.number


def _arrival(number: int) -> Mark:
    """What marks the end of a transfer on the stream that has got it: no event of the program has
    this number."""
    return Mark(-1, number)
