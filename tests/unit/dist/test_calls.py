"""Calls that ranks refuse, and what their peers learn, over a store in memory."""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from meshfuse.base.errors import UserError
from meshfuse.dist.calls import Call, CallLog
from meshfuse.dist.communicator import CallEntry, Communicator
from meshfuse.dist.history import CallHistory


def make_logs() -> tuple[CallLog, CallLog]:
    store = dist.HashStore()
    return CallLog(0, store), CallLog(1, store)


def enter(log: CallLog, call: Call | None) -> None:
    """The call comes to its collectives, on which ranks need not agree."""
    attachment: Any = SimpleNamespace(calls=log)
    CallEntry(Communicator({}), attachment, (), has_readers=False).enter(call)


def refuse(log: CallLog, program: str) -> None:
    log.refuse(log.count(program), ValueError("an odd shape"))


def test_a_refusal_reaches_those_in_the_same_call_only() -> None:
    mine, other = make_logs()
    refuse(other, "p")
    assert mine.refusals([1]) == {}, "this rank is in no call"
    enter(mine, mine.count("p"))
    told = "did not come, as its call was refused: ValueError: an odd shape"
    assert mine.refusals([1]) == {1: told}
    mine.leave()
    enter(mine, mine.count("p"))
    assert mine.refusals([1]) == {}, "the second call is another one"
    mine.leave()
    enter(mine, mine.count("q"))
    assert mine.refusals([1]) == {}


def test_a_refusal_ends_with_the_next_call() -> None:
    mine, other = make_logs()
    enter(mine, mine.count("p"))
    refuse(other, "p")
    assert mine.refusals([1])
    other.count("p")
    assert mine.refusals([1]) == {}


def test_a_call_that_came_to_its_collectives_is_not_refused() -> None:
    mine, other = make_logs()
    enter(mine, mine.count("p"))
    call = other.count("p")
    enter(other, call)
    other.refuse(call, ValueError("an odd kernel"))
    assert mine.refusals([1]) == {}


def test_one_call_at_a_time() -> None:
    mine, _ = make_logs()
    enter(mine, None)
    with pytest.raises(UserError, match="another thread of this rank executes"):
        enter(mine, None)
    mine.leave()
    enter(mine, None)


class Interrupted:
    """Does what another object does, and is interrupted then, once."""

    def __init__(self, done_by: Any, method: str) -> None:
        self._done_by, self._method = done_by, method

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._done_by, name)
        if name != self._method:
            return found

        def run(*arguments: Any) -> Any:
            self._method = ""
            found(*arguments)
            raise KeyboardInterrupt

        return run


@pytest.mark.parametrize("place", ["turn", "history"])
def test_an_interrupt_before_collectives_is_told_and_nothing_is_left_held(place: str) -> None:
    mine, other = make_logs()
    history: Any = CallHistory()
    for _ in range(3):
        history.note("key")
    if place == "turn":
        turn: Any = Interrupted(other.turn, "setdefault")
        other.turn = turn
    else:
        history = Interrupted(history, "has_followed")
    agreement: Any = SimpleNamespace(key="key", team=(0, 1))
    attachment: Any = SimpleNamespace(calls=other)
    entry = CallEntry(Communicator({}), attachment, [(history, agreement)], has_readers=False)
    call = other.count("p")
    with pytest.raises(KeyboardInterrupt) as caught:
        entry.enter(call)
    other.refuse(call, caught.value)
    enter(mine, mine.count("p"))
    assert mine.refusals([1])
    again = other.count("p")
    assert entry.enter(again) is other
    assert other.current is again


def test_a_call_without_peers_tells_nobody() -> None:
    with pytest.raises(ValueError, match="odd"), Communicator({}).in_call("p") as call:
        assert call is None
        raise ValueError("odd")
