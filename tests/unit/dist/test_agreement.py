"""Sequences of collectives and their sizes, compared by threads that stand for ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
import torch.distributed as dist

from meshfuse.base.errors import UserError
from meshfuse.dist.agreement import Agreement, CommunicationSequence, find_difference
from meshfuse.dist.board import Board

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false


class Table:
    """Where threads gather numbers."""

    def __init__(self, ranks: int) -> None:
        self.said: list[list[int]] = [[] for _ in range(ranks)]
        self.barrier = Barrier(ranks)
        self.exchanges = 0

    def gather(self, rank: int, numbers: Sequence[int]) -> list[list[int]]:
        self.said[rank] = list(numbers)
        self.barrier.wait(5)
        found = list(self.said)
        self.exchanges += rank == 0
        self.barrier.wait(5)
        return found


def compare(*entries: Sequence[str]) -> list[str | None]:
    """What each rank is told: None if all is well."""
    team = range(len(entries))
    told, _ = find_differences(*(CommunicationSequence.of(team, mine).at({}) for mine in entries))
    return told


def find_differences(*agreements: Agreement) -> tuple[list[str | None], int]:
    """What each rank is told, of programs or of sizes; and how often they exchange numbers."""
    store, team = dist.HashStore(), agreements[0].team
    table = Table(len(team))

    def run(place: int) -> str | None:
        board = Board(team[place], team, dist.PrefixStore("board", store), store)
        try:
            return find_difference(agreements[place], board, partial(table.gather, place))
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(team)) as pool:
        return list(pool.map(run, range(len(team)))), table.exchanges


def test_equal_sequences() -> None:
    assert compare(["a", "b"], ["a", "b"], ["a", "b"]) == [None] * 3


def test_the_first_entry_that_differs_is_named_on_every_rank() -> None:
    first, second = compare(["a", "b", "c"], ["a", "x", "c"])
    assert first is not None and second is not None
    assert first.startswith("ranks 0 and 1 run different programs: their collective 1 is")
    assert "  b on rank 0\n  x on rank 1" in first
    assert "  x on rank 1\n  b on rank 0" in second


def test_those_who_agree_are_told_of_the_one_who_does_not() -> None:
    for told in compare(["a"], ["a"], ["x"]):
        assert told is not None and "  x on rank 2" in told


def test_a_sequence_that_ends_earlier() -> None:
    first, second = compare(["a"], ["a", "b"])
    assert first is not None and "collective 1 is\n  nothing more on rank 0\n  b on rank 1" in first
    assert second is not None and "  b on rank 1\n  nothing more on rank 0" in second


def test_the_digest_tells_apart_team_entries_and_sizes() -> None:
    made = [((0, 1), ["a"]), ((0, 2), ["a"]), ((0, 1), ["b"]), ((0, 1), ["a", "a"])]
    digests = {CommunicationSequence.of(*parts).digest for parts in made}
    digests |= {CommunicationSequence.of((0, 1), ["a"], {name: ""}).digest for name in ("i", "k")}
    assert len(digests) == 6
    assert CommunicationSequence.of((1, 0), ["a"]) == CommunicationSequence.of((0, 1), ["a"])


@pytest.mark.parametrize("entries", [[], ["a"] * 100])
def test_sequences_of_any_length(entries: list[str]) -> None:
    assert compare(entries, entries) == [None, None]


def test_sizes_are_compared_by_name_and_other_ranks_are_told() -> None:
    symbols = {"i1": "i1, axis 0 of T3", "i0": "i0"}
    sequence = CommunicationSequence.of((2, 5), ["all_gather"], symbols)
    mine = sequence.at({"i0": 4, "i1": 6, "i2": 9})
    assert (mine.sizes, mine.team) == ((4, 6), (2, 5))
    assert mine.key != sequence.at({"i0": 4, "i1": 8}).key
    assert find_differences(mine, mine) == ([None, None], 1)
    found, exchanges = find_differences(mine, sequence.at({"i0": 4, "i1": 8}))
    text = "ranks 2 and 5 disagree on the global size i1, axis 0 of T3: 6 and 8, before all_ga"
    assert all(told is not None and text in told for told in found)
    assert exchanges == 2
