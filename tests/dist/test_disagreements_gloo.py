"""Ranks that do not do the same: each is told what is wrong, long before its deadline.

Each scenario returns the errors that a rank met. All run in one start of two processes, each in a
process group of its own: of ranks that share memory, and again of ranks that tell one another all
by gloo.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Timer
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gloo_run import observe_ranks
from meshfuse import DistributedTensor, FusionDefinition
from meshfuse.dist import communicator, deadlines
from meshfuse.dist.agreement import Agreement
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.communicator import Communicator
from meshfuse.multidevice import DeviceMesh
from sharded_cases import block, replicate

TEAM = (0, 1)
SECONDS = 60.0
"""The deadline of every wait that nothing else is said of: no scenario takes that long."""


def gathered(scale: float, rows: int = -1) -> FusionDefinition:
    """Blocks of rows, scaled and gathered."""
    mesh = DeviceMesh(TEAM)
    with FusionDefinition() as fd:
        x = fd.define_tensor([rows, 3], contiguity=True)
        y = fd.ops.set(fd.ops.mul(x, scale))
        fd.add_output(y)
        block(mesh, x, 0)
        replicate(mesh, y)
    return fd


def turned(rows: int = -1) -> FusionDefinition:
    """Blocks of rows become blocks of columns: packed, an exchange."""
    mesh = DeviceMesh(TEAM)
    with FusionDefinition() as fd:
        x = fd.define_tensor([rows, 3], contiguity=True)
        y = fd.ops.set(x)
        fd.add_output(y)
        block(mesh, x, 0)
        block(mesh, y, 1)
    return fd


def error_of(call: Callable[[], object]) -> str:
    """Type and text of what a call raises; "" if it does not."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  # what is raised is the test's to judge
        return f"{type(error).__name__}: {error}"
    return ""


def run(fd: FusionDefinition, rows: int) -> str:
    """The error of a call with `rows` on this rank."""
    return error_of(lambda: fd.execute([torch.ones(rows, 3)]))


@contextmanager
def deadline_of(seconds: float) -> Iterator[None]:
    with patch.object(Communicator.instance(), "timeout", seconds):
        yield


def other_sizes_at_first(rank: int) -> list[str]:
    """Nothing is broken by that, and sizes that agree may follow."""
    fd = turned()
    return [run(fd, 2 + rank), run(fd, 4), run(fd, 6 + rank), run(fd, 2)]


def sizes_change_on_one_rank(rank: int) -> list[str]:
    """Rank 0 posts what it posted before, and rank 1 compares."""
    fd = gathered(2.0)
    assert [run(fd, 4) for _ in range(3)] == [""] * 3
    return [run(fd, 4 + 3 * rank)]


def sizes_change_on_one_rank_in_an_exchange(rank: int) -> list[str]:
    fd = turned()
    assert [run(fd, 4) for _ in range(3)] == [""] * 3
    return [run(fd, 7 - 3 * rank)]


def known_programs_in_another_order(rank: int) -> list[str]:
    """Both ran both, in turn; then rank 1 leaves one out."""
    first, second = gathered(2.0), turned()
    for _ in range(3):
        assert (run(first, 4), run(second, 2)) == ("", "")
    return [run(second, 2) if rank else run(first, 4)]


def one_gathers_a_result(rank: int) -> list[str]:
    """Where the other one goes on."""
    fd, shard = turned(), torch.ones(2, 3)
    [y] = fd.execute([shard])
    assert isinstance(y, DistributedTensor)
    assert y.full_tensor().shape == (4, 3)
    assert run(fd, 2) == ""
    return [run(fd, 2) if rank else error_of(y.full_tensor)]


def a_shape_that_one_rank_refuses(rank: int) -> list[str]:
    fd = gathered(2.0, rows=8)
    assert run(fd, 4) == ""
    return [run(fd, 4 + rank)]


def a_shape_that_one_rank_refuses_at_first(rank: int) -> list[str]:
    """Rank 0 waits for the group to be formed."""
    return [run(gathered(2.0, rows=8), 4 + rank)]


def a_shape_that_all_refuse(rank: int) -> list[str]:
    """Nobody waits, and the right one may follow."""
    fd = gathered(2.0, rows=8)
    return [run(fd, 5), run(fd, 4), run(fd, 6), run(fd, 4)]


def no_list_on_one_rank(rank: int) -> list[str]:
    fd, shard = gathered(2.0, rows=8), torch.ones(4, 3)
    assert run(fd, 4) == ""
    return [error_of(lambda: fd.execute(shard if rank else [shard]))]


def one_call_fewer(rank: int) -> list[str]:
    """Rank 1 goes on with something else."""
    fd = turned()
    assert run(fd, 2) == ""
    if rank == 0:
        with deadline_of(1.0):
            return [run(fd, 2)]
    return [""]


def one_comes_too_late(rank: int) -> list[str]:
    """It gets what the other had sent, and is told afterwards."""
    fd = turned()
    assert run(fd, 2) == ""
    if rank == 1:
        time.sleep(1.5)
    with deadline_of(0.6):
        return [run(fd, 2), run(fd, 2)]


def one_raises_between(rank: int) -> list[str]:
    """The second collective of rank 1 is never posted, of a program that packs."""
    mesh = DeviceMesh(TEAM)
    with FusionDefinition() as fd:
        x = fd.define_tensor([5, 3], contiguity=True)
        columns, whole = fd.ops.set(x), fd.ops.set(x)
        fd.add_output(columns)
        fd.add_output(whole)
        block(mesh, x, 0)
        block(mesh, columns, 1)
        replicate(mesh, whole)
    rows = 3 - rank
    assert run(fd, rows) == ""
    if rank == 0:
        return [run(fd, rows)]
    real, posted = Communicator.post, [0]

    def fail(self: Communicator, request: CollectiveRequest) -> object:
        posted[0] += 1
        if posted[0] > 1:
            raise MemoryError("no room to pack")
        return real(self, request)

    with patch.object(Communicator, "post", fail):
        return [run(fd, rows)]


def interrupted_in_an_agreement(rank: int) -> list[str]:
    """Ctrl-C while rank 0 waits for rank 1 to compare what they do."""
    fd = gathered(2.0)
    assert run(fd, 4) == ""
    if rank == 1:
        time.sleep(1)
        return [run(fd, 5)]
    Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        fd.execute([torch.ones(5, 3)])
    return ["KeyboardInterrupt"]


def two_threads_at_once(rank: int) -> list[str]:
    """On rank 0 a second thread calls while the first one waits for rank 1."""
    fd, other = gathered(2.0), turned()
    assert (run(fd, 4), run(other, 2)) == ("", "")
    if rank == 1:
        time.sleep(1)
        return [run(fd, 4), run(other, 2)]
    waits, real = Event(), Communicator.agree

    def note(self: Communicator, agreement: Agreement, seconds: float | None) -> None:
        waits.set()
        real(self, agreement, seconds)

    with ThreadPoolExecutor(1) as pool, patch.object(Communicator, "agree", note):
        first = pool.submit(run, fd, 4)
        waits.wait(20)
        refused = run(other, 2)
        return [first.result(), refused]


SCENARIOS: dict[str, Callable[[int], list[str]]] = {
    scenario.__name__: scenario
    for scenario in (
        other_sizes_at_first,
        sizes_change_on_one_rank,
        sizes_change_on_one_rank_in_an_exchange,
        known_programs_in_another_order,
        one_gathers_a_result,
        a_shape_that_one_rank_refuses,
        a_shape_that_one_rank_refuses_at_first,
        a_shape_that_all_refuse,
        no_list_on_one_rank,
        one_call_fewer,
        one_comes_too_late,
        one_raises_between,
        interrupted_in_an_agreement,
        two_threads_at_once,
    )
}
Told = dict[str, tuple[list[str], float]]
"""By scenario: the errors of a rank, and the seconds that it took."""


def run_scenarios(rank: int, world_size: int, folder: str, shares_memory: bool) -> Told:
    if not shares_memory:
        with patch.object(communicator, "join_mailbox", lambda *places: None):
            return run_scenarios(rank, world_size, folder, True)
    told: Told = {}
    for name, scenario in SCENARIOS.items():
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{name}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        with deadline_of(SECONDS), patch.object(deadlines, "LAST_DATA_SECONDS", 0.1):
            started = time.monotonic()
            told[name] = scenario(rank), time.monotonic() - started
        dist.barrier()
        dist.destroy_process_group()
    return told


def tell(tmp_path_factory: pytest.TempPathFactory, shares_memory: bool) -> list[Told]:
    folder = str(tmp_path_factory.mktemp("stores"))
    outcomes = observe_ranks(
        run_scenarios, 2, folder, shares_memory, deadline=110, initialise=False
    )
    assert all(outcome.succeeded for outcome in outcomes), [(o.error, o.output) for o in outcomes]
    return [outcome.value for outcome in outcomes]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return tell(tmp_path_factory, shares_memory=True)


@pytest.fixture(scope="module")
def told_by_gloo(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return tell(tmp_path_factory, shares_memory=False)


DISAGREE = "ranks 0 and 1 disagree on the global size i0, axis 0 of T0: "
WANTED: dict[str, tuple[list[str], list[str]]] = {
    "other_sizes_at_first": (
        [f"UserError: {DISAGREE}4 and 6", "", f"UserError: {DISAGREE}12 and 14", ""],
        [f"UserError: {DISAGREE}4 and 6", "", f"UserError: {DISAGREE}12 and 14", ""],
    ),
    "sizes_change_on_one_rank": (
        ["all_gather number 0 .* rank 1 gave up: .*rank 0 does not come, but waits for all_gather"],
        ["an agreement on .* rank 0 does not come, but waits for all_gather .*different global si"],
    ),
    "sizes_change_on_one_rank_in_an_exchange": (
        ["an agreement on .* rank 1 does not come, but waits for exchange number 0"],
        ["exchange number 0 .* rank 0 gave up: .* rank 1 does not come, but waits for exchange"],
    ),
    "known_programs_in_another_order": (
        ["all_gather number 0 .* rank 1 gave up: .*rank 0 does not come"],
        ["an agreement on .*exchange.* rank 0 does not come, .* run different programs"],
    ),
    "one_gathers_a_result": (
        ["an agreement on full_tensor of .* rank 1 does not come, but waits for exchange number 0"],
        ["exchange number 0 .* rank 0 gave up: .*full_tensor of"],
    ),
    "a_shape_that_one_rank_refuses": (
        ["all_gather .* rank 1 did not come, as its call was refused: UserError: Expected input 0"],
        ["UserError: Expected input 0, .*, to be of size 4 on axis 0"],
    ),
    "a_shape_that_one_rank_refuses_at_first": (
        ["forming the group of ranks .* rank 1 did not come, as its call was refused: UserError: "],
        ["UserError: Expected input 0, .*, to be of size 4 on axis 0"],
    ),
    "a_shape_that_all_refuse": (
        ["UserError: Expected input 0", "", "UserError: Expected input 0", ""],
        ["UserError: Expected input 0", "", "UserError: Expected input 0", ""],
    ),
    "no_list_on_one_rank": (
        ["all_gather .* rank 1 did not come, as its call was refused: UserTypeError: inputs are"],
        ["UserTypeError: inputs are tensor.*; accepted is a list of tensors and numbers"],
    ),
    "one_call_fewer": (
        ["exchange number 0 .*: rank 0 waited 1 s, its deadline: rank 1 does not wait for it"],
        [""],
    ),
    "one_comes_too_late": (
        ["exchange number 0 .*: rank 0 waited 0.6 s, its deadline: rank 1", "the group failed be"],
        ["", "exchange number 0 .* rank 0 gave up: .*waited 0.6 s"],
    ),
    "one_raises_between": (
        ["number 1 .* rank 1 gave up: MemoryError: no room to pack"],
        ["MemoryError: no room to pack"],
    ),
    "interrupted_in_an_agreement": (
        ["KeyboardInterrupt"],
        ["rank 0 gave up: interrupted in all_gather"],
    ),
    "two_threads_at_once": (
        ["", "UserError: execute: another thread of this rank executes a definition"],
        ["", "rank 0 did not come, as its call was refused: UserError: execute: another thread"],
    ),
}


BY_GLOO = {
    **WANTED,
    # Nobody takes back what gloo has sent: rank 1 is told in the collective behind the agreement.
    "interrupted_in_an_agreement": (
        ["KeyboardInterrupt"],
        ["all_gather number 0 .* rank 0 gave up: interrupted before T2 = communicate"],
    ),
}


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_both_ranks_are_told(told: list[Told], name: str) -> None:
    check_told(told, name, WANTED[name])


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_both_ranks_are_told_by_gloo(told_by_gloo: list[Told], name: str) -> None:
    check_told(told_by_gloo, name, BY_GLOO[name])


def check_told(told: list[Told], name: str, wanted_by_rank: tuple[list[str], list[str]]) -> None:
    for rank, wanted in enumerate(wanted_by_rank):
        errors, seconds = told[rank][name]
        assert len(errors) == len(wanted)
        for error, pattern in zip(errors, wanted, strict=True):
            if pattern:
                assert re.search(pattern, error, re.DOTALL), error
            else:
                assert error == ""
        assert seconds < SECONDS / 2


def end_in_the_middle(rank: int, world_size: int) -> str:
    """Of three ranks the last ends between two collectives, of a program that packs them."""
    mesh = DeviceMesh(range(world_size))
    with FusionDefinition() as fd:
        x = fd.define_tensor([7, 5], contiguity=True)
        columns = fd.ops.set(x)
        y = fd.ops.neg(columns)
        whole = fd.ops.set(y)
        fd.add_output(whole)
        block(mesh, x, 0)
        block(mesh, columns, 1)
        block(mesh, y, 1)
        replicate(mesh, whole)
    shard = torch.ones(7, 5).split(3)[rank]
    [result] = fd.execute([shard])
    assert result.tolist() == [[-1.0] * 5] * 7
    real, posted = Communicator.post, [0]

    def post(self: Communicator, request: CollectiveRequest) -> object:
        posted[0] += 1
        if rank == 2 and posted[0] > 1:
            os._exit(3)
        return real(self, request)

    with patch.object(Communicator, "post", post):
        return error_of(lambda: fd.execute([shard]))


def test_survivors_of_three_name_the_rank_that_ends_between_packed_collectives() -> None:
    *survivors, dead = observe_ranks(end_in_the_middle, 3)
    assert dead.code == 3
    for survivor in survivors:
        assert survivor.succeeded, survivor.error
        assert re.search(r"all_gather number 1 .* rank 2 has ended \(process", survivor.value)
        assert survivor.seconds < SECONDS / 2
