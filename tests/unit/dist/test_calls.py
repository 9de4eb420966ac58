"""Calls that ranks refuse, and what their peers learn, over a store in memory."""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import pytest
import torch.distributed as dist

from meshfuse.base.errors import UserError
from meshfuse.dist.calls import CallLog
from meshfuse.dist.communicator import Communicator


def make_logs() -> tuple[CallLog, CallLog]:
    store = dist.HashStore()
    return CallLog(0, store), CallLog(1, store)


def refuse(log: CallLog, program: str) -> None:
    log.refuse(log.count(program), ValueError("an odd shape"))


def test_a_refusal_reaches_those_in_the_same_call_only() -> None:
    mine, other = make_logs()
    refuse(other, "p")
    assert mine.refusals([1]) == {}, "this rank is in no call"
    mine.enter(mine.count("p"))
    told = "did not come, as its call was refused: ValueError: an odd shape"
    assert mine.refusals([1]) == {1: told}
    mine.leave()
    mine.enter(mine.count("p"))
    assert mine.refusals([1]) == {}, "the second call is another one"
    mine.leave()
    mine.enter(mine.count("q"))
    assert mine.refusals([1]) == {}


def test_a_refusal_ends_with_the_next_call() -> None:
    mine, other = make_logs()
    mine.enter(mine.count("p"))
    refuse(other, "p")
    assert mine.refusals([1])
    other.count("p")
    assert mine.refusals([1]) == {}


def test_a_call_that_came_to_its_collectives_is_not_refused() -> None:
    mine, other = make_logs()
    mine.enter(mine.count("p"))
    call = other.count("p")
    other.enter(call)
    other.refuse(call, ValueError("an odd kernel"))
    assert mine.refusals([1]) == {}


def test_one_call_at_a_time() -> None:
    mine, _ = make_logs()
    mine.enter(None)
    with pytest.raises(UserError, match="another thread of this rank executes"):
        mine.enter(None)
    mine.leave()
    mine.enter(None)


def test_a_call_without_peers_tells_nobody() -> None:
    with pytest.raises(ValueError, match="odd"), Communicator({}).in_call("p") as call:
        assert call is None
        raise ValueError("odd")
