"""Numbers that processes tell one another through memory that they share; and when one fails to."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from random import Random
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gloo_run import observe_ranks, run_ranks
from meshfuse.base.errors import CommunicationError
from meshfuse.dist import mailbox
from meshfuse.dist.agreement import CommunicationSequence
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.groups import CONTROL, Group
from meshfuse.dist.mailbox import MOST_NUMBERS

TEAM = (0, 1, 2)
PURPOSE = "a test"


def control(ranks: int) -> Group:
    return Communicator.instance().group(tuple(range(ranks)), CONTROL, PURPOSE)


def say(rank: int, turn: int) -> list[int]:
    """What a rank says in a turn: no two say the same. Rarely more than a mailbox takes."""
    count = MOST_NUMBERS + 1 if turn % 97 == 0 else 1 + turn % 5
    return [(-1) ** k * (turn << 24 | rank << 16 | k) for k in range(count)]


def tell(rank: int, world_size: int, turns: int) -> tuple[int, int]:
    """How many answers were wrong, of how many collectives."""
    communicator, team, chance = Communicator.instance(), tuple(range(world_size)), Random(rank)
    group = control(world_size)
    assert group.mailbox is not None
    before, wrong = group.posted, 0
    for turn in range(turns):
        if chance.random() < 0.05:
            time.sleep(chance.random() / 200)
        found = communicator.gather(team, say(rank, turn), PURPOSE)
        wrong += found != [say(other, turn) for other in team]
    return wrong, group.posted - before


@pytest.mark.parametrize(("ranks", "turns"), [(2, 4000), (3, 1000), (4, 500)])
def test_nothing_is_mixed_up_whoever_is_late(ranks: int, turns: int) -> None:
    assert run_ranks(tell, ranks, turns, deadline=100) == [(0, turns)] * ranks


def gather(rank: int, seconds: float | None = None, count: int = 1) -> str:
    """What a rank is told, as text, or its error."""
    try:
        return str(Communicator.instance().gather(TEAM, [rank] * count, PURPOSE, seconds))
    except CommunicationError as error:
        return str(error)


def the_last_is_late(rank: int) -> list[str]:
    """Long after the others have begun to sleep, and to look for who has ended."""
    if rank == 2:
        time.sleep(0.7)
    return [gather(rank), gather(rank)]


def the_last_is_too_late(rank: int) -> list[str]:
    """The others wait together, and it is told so when it comes."""
    if rank == 2:
        time.sleep(2.5)
    return [gather(rank, 1.0), gather(rank)]


def the_last_gives_up(rank: int) -> list[str]:
    if rank == 2:
        time.sleep(0.4)
        Communicator.instance().give_up("kernel_3 failed on rank 2")
    return [gather(rank)]


def the_last_says_more(rank: int) -> list[str]:
    return [gather(rank, count=2 if rank == 2 else 1)]


def the_last_waits_elsewhere(rank: int) -> list[str]:
    """For a collective that the others do not post: they have something to agree on first."""
    communicator = Communicator.instance()
    token, tokens = torch.ones(1), torch.empty(3)
    request = CollectiveRequest(5, "all_gather", TEAM, token, tokens, None, "T1 = set(T0)")
    try:
        if rank == 2:
            communicator.run(request)
        else:
            communicator.group(TEAM, "cpu", PURPOSE)
            communicator.agree(CommunicationSequence.of(TEAM, [PURPOSE]).at({}))
    except CommunicationError as error:
        return [str(error)]
    return ["completed"]


def the_second_cannot_share(rank: int) -> list[str]:
    """All do without, and nobody is told."""
    opens = (lambda *_: None) if rank == 1 else mailbox._open_file
    with patch.object(mailbox, "_open_file", opens):
        told = gather(rank)
    assert control(3).mailbox is None
    return [told, gather(rank)]


SAID = "[[0], [1], [2]]"
ALL = f"^{re.escape(SAID)}$"
LATE = "(cannot .* gave up: .*)?waited 1 s, its deadline: rank 2 does not wait for it"
OTHERS = r"rank 2 (says )?2( numbers, and rank [01] 1)?: they run different programs"
FAILED_BEFORE = "^a test: the group failed before, and stays so"


def meeting(rank: int) -> str:
    """How an error begins."""
    return (
        rf"^all_gather number -3 over ranks \(0, 1, 2\) \(\d+ bytes, for .*a test\): rank {rank} "
    )


WANTED: dict[Callable[[int], list[str]], list[list[str]]] = {
    the_last_is_late: [[ALL, ALL]] * 3,
    the_last_is_too_late: [
        [meeting(0) + LATE, FAILED_BEFORE],
        [meeting(1) + LATE, FAILED_BEFORE],
        [meeting(2) + "cannot complete it: rank [01] gave up: .* waited 1 s", FAILED_BEFORE],
    ],
    the_last_gives_up: [
        [meeting(0) + ".*rank 2 gave up: kernel_3 failed on rank 2"],
        [meeting(1) + ".*rank 2 gave up: kernel_3 failed on rank 2"],
        [FAILED_BEFORE + ".*: kernel_3 failed on rank 2"],
    ],
    the_last_says_more: [[OTHERS]] * 3,
    the_last_waits_elsewhere: [
        [meeting(0) + "cannot complete it: .*rank 2 does not come, but waits for all_ga"],
        [meeting(1) + "cannot complete it: .*rank 2 does not come, but waits for all_ga"],
        ["^all_gather number 5 .* rank [01] gave up: all_gather number -3 "],
    ],
    the_second_cannot_share: [[ALL, ALL]] * 3,
}
Told = dict[str, tuple[list[str], float]]
"""By scenario: what a rank was told, and the seconds that it took."""


def run_scenarios(rank: int, world_size: int, folder: str) -> Told:
    told: Told = {}
    for scenario in WANTED:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{scenario.__name__}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        if scenario is not the_second_cannot_share:
            assert gather(rank) == SAID
        started = time.monotonic()
        told[scenario.__name__] = scenario(rank), time.monotonic() - started
        dist.barrier()
        dist.destroy_process_group()
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    folder = str(tmp_path_factory.mktemp("stores"))
    outcomes = observe_ranks(run_scenarios, len(TEAM), folder, deadline=110, initialise=False)
    assert all(outcome.succeeded for outcome in outcomes), [(o.error, o.output) for o in outcomes]
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("scenario", list(WANTED))
def test_all_ranks_are_told(told: list[Told], scenario: Callable[[int], list[str]]) -> None:
    for rank, wanted in enumerate(WANTED[scenario]):
        texts, seconds = told[rank][scenario.__name__]
        assert len(texts) == len(wanted)
        for text, pattern in zip(texts, wanted, strict=True):
            assert re.search(pattern, text, re.DOTALL), text
        assert seconds < 10


def end(rank: int, world_size: int) -> str:
    """The last one ends while the others wait for it."""
    gather(rank)
    assert control(3).mailbox is not None
    if rank == 2:
        time.sleep(0.4)
        os._exit(3)
    return gather(rank)


def test_survivors_name_the_rank_that_ends() -> None:
    *survivors, dead = observe_ranks(end, len(TEAM))
    assert dead.code == 3
    for rank, survivor in enumerate(survivors):
        assert survivor.succeeded, survivor.error
        assert re.search(meeting(rank) + r".*rank 2 has ended \(process", survivor.value)
        assert survivor.seconds < 10
