"""What streams need not mark or await, against all that is before what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from meshfuse.host.events import CALLER, AwaitMark, AwaitWork, Event, Mark, SwitchStream
from meshfuse.host.stream_order import without_known_marks

EARLIER, LATER = -1, -2
"""What the caller's stream has before the program, and what comes there behind it."""


@dataclass(frozen=True)
class Told:
    """An action of which only what it tells matters. `place`: in the program as it was."""

    place: int
    stream: int
    tells: Event | None = None
    posts: bool = False
    is_idle: bool = False


def orders(actions: Iterable[Told]) -> dict[int, frozenset[int]]:
    """For each action that the device has something to do for, all those before it."""
    on_stream: dict[int, frozenset[int]] = {CALLER: frozenset({EARLIER})}
    marked: dict[Mark, frozenset[int]] = {}
    found: dict[int, frozenset[int]] = {}
    for action in [*actions, Told(LATER, CALLER)]:
        before = on_stream.get(action.stream, frozenset())
        match action.tells:
            case Mark() as mark:
                marked[mark] = before
            case AwaitMark(mark):
                before |= marked[mark] if mark.instance >= 0 else frozenset()
            case _ if not action.is_idle:
                found[action.place] = before
                before |= {action.place}
            case _:
                pass
        on_stream[action.stream] = before
    return found


@st.composite
def programs(draw: st.DrawFn) -> list[Told]:
    """Marks are awaited behind where they are made, or have a negative instance."""
    streams, marks = st.sampled_from([CALLER, 0, 1, 2]), [Mark(9, -1)]
    actions: list[Told] = []
    for place in range(draw(st.integers(0, 24))):
        action = Told(place, draw(streams))
        kind = draw(st.sampled_from(("work", "work", "mark", "await", "await", "idle", "arrival")))
        if kind == "mark":
            again = draw(st.booleans())  # an event may be recorded anew
            made = draw(st.sampled_from(marks[1:])) if again and marks[1:] else Mark(0, place)
            marks.append(made)
            action = replace(action, tells=made)
        elif kind == "await":
            action = replace(action, tells=AwaitMark(draw(st.sampled_from(marks))))
        elif kind == "arrival":
            action = replace(action, tells=AwaitWork(place))
        elif kind == "idle":
            told = draw(st.sampled_from([None, SwitchStream(action.stream)]))
            action = replace(action, tells=told, is_idle=True)
        actions.append(action)
    return actions


def on_the_callers(actions: Sequence[Told]) -> list[Told]:
    return [replace(a, stream=CALLER) if a.stream == 0 else a for a in actions]


@given(programs())
def test_work_is_behind_what_it_was_behind(actions: list[Told]) -> None:
    assert orders(without_known_marks(actions)) == orders(actions)


@given(programs())
def test_so_it_is_where_two_streams_become_one(actions: list[Told]) -> None:
    found = without_known_marks(on_the_callers(without_known_marks(actions)))
    assert orders(found) == orders(on_the_callers(actions))


@given(programs())
def test_what_is_left_cannot_be_left_out(actions: list[Told]) -> None:
    """What comes behind a wait that is kept is behind more than without it; and each mark is
    awaited."""
    found = without_known_marks(actions)
    for place, action in enumerate(found):
        if isinstance(action.tells, AwaitMark):
            work = Told(len(actions), action.stream)
            without, behind = (orders([*found[:end], work]) for end in (place, place + 1))
            assert without[work.place] < behind[work.place]
    awaited = {a.tells.mark for a in found if isinstance(a.tells, AwaitMark)}
    assert {a.tells for a in found if isinstance(a.tells, Mark)} <= awaited
