"""Ranks agree on memory that users keep, as it is on GPUs: here it is memory of the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from gloo_run import run_ranks
from meshfuse.base.errors import UserError
from meshfuse.dist.agreement import CommunicationSequence
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.groups import CONTROL
from meshfuse.dist.kept_memory import KeptMemory

SIZE = 64


def enter(world_size: int, value: torch.Tensor) -> None:
    """A call whose input peers may read."""
    agreement = CommunicationSequence.of(tuple(range(world_size)), ["a test"]).at({})
    entry = Communicator.instance().entry([agreement], has_readers=True)
    entry.enter(None, [value], seconds=20.0).leave()


def keep(memory: torch.Tensor) -> None:
    """Memory that the user keeps from now on."""
    attachment = Communicator.instance()._attach("a test")
    kept = KeptMemory((0, 1), 0, cast(Any, None), memory.data_ptr(), memory.nbytes)
    attachment.kept_memory.add(kept)


def meetings(world_size: int, call: Callable[[], None]) -> int:
    """In how many collectives the ranks compare what they have."""
    control = Communicator.instance().group(tuple(range(world_size)), CONTROL, "a test")
    before = control.posted
    call()
    return control.posted - before


def memory_on_two_ranks(rank: int, world_size: int) -> list[int]:
    """Of three: the third cannot know that it is asked."""
    elsewhere, memory = torch.ones(3), torch.zeros(SIZE)
    enter(world_size, elsewhere)
    if rank < 2:
        keep(memory)
    return [meetings(world_size, lambda: enter(world_size, elsewhere)) for _ in range(3)]


def test_ranks_without_such_memory_are_not_waited_for() -> None:
    assert run_ranks(memory_on_two_ranks, 3) == [[0, 0, 0]] * 3


def memory_in_other_orders(rank: int, world_size: int) -> list[str]:
    """Where all compare, as none has passed it before."""
    memory, errors = torch.zeros(SIZE), list[str]()
    enter(world_size, memory.clone())
    keep(memory)
    whole = memory.view(8, 8)
    for value in (whole.T if rank else whole, whole[:, :4] if rank else whole[:4], whole[rank:]):
        try:
            enter(world_size, value)
        except UserError as error:
            errors.append(str(error))
    assert meetings(world_size, lambda: enter(world_size, whole)) == 1
    assert meetings(world_size, lambda: enter(world_size, whole)) == 0
    return errors


def test_inputs_lie_alike_if_none_is_copied_to_be_read() -> None:
    for errors in run_ranks(memory_in_other_orders, 2):
        assert len(errors) == 3
        assert all("pass inputs in different symmetric memory" in text for text in errors)
