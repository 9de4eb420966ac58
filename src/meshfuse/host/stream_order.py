"""How the actions of a plan lie on streams: which follow one another, and what is known where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, final

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.host.events import CALLER, AwaitMark, AwaitWork, Event, Mark


class StreamAction(Protocol):
    """What is seen here of an action: see plan.Bound."""

    @property
    def tells(self) -> Event | None: ...

    @property
    def stream(self) -> int: ...

    @property
    def posts(self) -> bool: ...

    @property
    def is_idle(self) -> bool: ...


_Action = TypeVar("_Action", bound=StreamAction)


@final
@frozen_dataclass
class StreamOrder:
    """Places of actions in a plan. `queues`: those of each stream in order, the caller's first.

    `tells`: what each action always tells the driver. `posts`: the places of posts, in order;
    `waits`: where each number is awaited.
    """

    queues: tuple[tuple[int, ...], ...]
    tells: tuple[Event | None, ...]
    posts: tuple[int, ...]
    waits: Mapping[int, int]

    @staticmethod
    def of(actions: Sequence[StreamAction]) -> StreamOrder | None:
        """None if all are on the caller's stream."""
        queues: dict[int, list[int]] = {CALLER: []}
        for place, action in enumerate(actions):
            queues.setdefault(action.stream, []).append(place)
        if len(queues) == 1:
            return None
        tells = tuple(action.tells for action in actions)
        return StreamOrder(
            tuple(tuple(queue) for queue in queues.values()),
            tells,
            tuple(place for place, action in enumerate(actions) if action.posts),
            {told.number: k for k, told in enumerate(tells) if isinstance(told, AwaitWork)},
        )


def without_known_marks(actions: Iterable[_Action]) -> list[_Action]:
    """The actions, in program order, without those that wait for what their stream knows already:
    from program order, or from what it has waited for. And without marks that nobody waits for.

    A negative instance is nothing to wait for. Raises InvariantError for a mark that is not made
    before.
    """
    kept: list[_Action] = []
    known: dict[int, dict[int, int]] = {}
    issued: dict[int, int] = {CALLER: 0}  # whatever the caller has on its stream already
    marks: dict[Mark, Mapping[int, int]] = {}
    for place, action in enumerate(actions, start=1):
        told, clock = action.tells, known.setdefault(action.stream, {})
        match told:
            case AwaitMark(mark):
                if mark.instance < 0:
                    continue
                if mark not in marks:
                    raise InvariantError(f"stream {action.stream} waits for {mark}: there is none")
                news = {
                    stream: until
                    for stream, until in marks[mark].items()
                    if stream != action.stream and clock.get(stream, -1) < until
                }
                if not news:
                    continue
                clock.update(news)
            case Mark():
                marks[told] = {**clock, action.stream: issued.get(action.stream, -1)}
            case _ if not action.is_idle:
                issued[action.stream] = place
            case _:
                pass
        kept.append(action)
    awaited = {action.tells.mark for action in kept if isinstance(action.tells, AwaitMark)}
    return [a for a in kept if not isinstance(a.tells, Mark) or a.tells in awaited]
