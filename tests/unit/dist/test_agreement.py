"""Sequences of collectives, compared over a store by threads that stand for ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from meshfuse.base.errors import CommunicationError
from meshfuse.dist.agreement import CommunicationSequence, compare_sequences
from meshfuse.dist.board import Board, publish_identity

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false


def compare(*entries: Sequence[str] | None, seconds: float = 10.0) -> list[str | None]:
    """What each rank is told: None if all is well. A rank without entries does not come."""
    store, team = dist.HashStore(), tuple(range(len(entries)))
    processes = dist.PrefixStore("processes", store)
    for rank in team:
        publish_identity(processes, rank)

    def run(rank: int) -> str | None:
        mine = entries[rank]
        if mine is None:
            return None
        board = Board(rank, team, dist.PrefixStore("board", store), processes)
        try:
            compare_sequences(board, CommunicationSequence.of(team, mine), seconds)
        except CommunicationError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(team)) as pool:
        return list(pool.map(run, team))


def test_equal_sequences() -> None:
    assert compare(["a", "b"], ["a", "b"], ["a", "b"]) == [None] * 3


def test_the_first_entry_that_differs_is_named_on_every_rank() -> None:
    first, second = compare(["a", "b", "c"], ["a", "x", "c"])
    assert first is not None and second is not None
    assert first.startswith("ranks 0 and 1 run different programs: their collective 1 is")
    assert "  b on rank 0\n  x on rank 1" in first
    assert "  x on rank 1\n  b on rank 0" in second


def test_a_sequence_that_ends_earlier() -> None:
    first, second = compare(["a"], ["a", "b"])
    assert first is not None and "collective 1 is\n  nothing more on rank 0\n  b on rank 1" in first
    assert second is not None and "  b on rank 1\n  nothing more on rank 0" in second


def test_a_rank_that_does_not_come_is_named() -> None:
    told = compare(["a"], None, seconds=0.2)
    assert told[0] is not None and "rank 1 has not arrived" in told[0]


def test_the_digest_tells_apart_team_and_entries() -> None:
    made = [((0, 1), ["a"]), ((0, 2), ["a"]), ((0, 1), ["b"]), ((0, 1), ["a", "a"])]
    assert len({CommunicationSequence.of(*parts).digest for parts in made}) == 4
    assert CommunicationSequence.of((1, 0), ["a"]) == CommunicationSequence.of((0, 1), ["a"])


@pytest.mark.parametrize("entries", [[], ["a"] * 100])
def test_sequences_of_any_length(entries: list[str]) -> None:
    assert compare(entries, entries) == [None, None]
