"""Collectives between real processes: values, team order, failures that name who is missing."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from threading import Timer

import pytest
import torch
import torch.distributed as dist

from gloo_run import observe_ranks, run_ranks
from meshfuse.base.errors import CommunicationError
from meshfuse.dist.collectives import GATHERED_REDUCTION_BYTES, CollectiveRequest
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.simulated import perform

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, other ones on each rank: every sum of them is exact in every dtype."""
    return ((torch.arange(count) * 7 + rank * 3) % 5 % (2 if dtype == torch.bool else 5)).to(dtype)


def make_request(
    collective: str,
    function: str | None,
    dtype: torch.dtype,
    team: tuple[int, ...],
    rank: int,
    count: int,
) -> CollectiveRequest:
    ranks = len(team)
    src = values(rank, count * ranks if collective == "reduce_scatter" else count, dtype)
    out = torch.empty(count * ranks if collective == "all_gather" else count, dtype=dtype)
    return CollectiveRequest(3, collective, team, src, out, function, "T5 = linear(T0, T1)")


def expect(request: CollectiveRequest, rank: int, count: int) -> torch.Tensor:
    """What the simulation, tested by itself, gives to this rank."""
    team, dtype = request.team, request.src.dtype
    requests = {
        r: make_request(request.collective, request.function, dtype, team, r, count) for r in team
    }
    perform(requests)
    return requests[rank].out


def check_all(rank: int, world_size: int, team: tuple[int, ...], counts: tuple[int, ...]) -> int:
    warnings.simplefilter("error")
    communicator = Communicator.instance()
    checked = 0
    for dtype in DTYPES:
        for collective, function in (
            ("all_gather", None),
            ("all_reduce", "sum"),
            ("all_reduce", "max"),
            ("reduce_scatter", "sum"),
            ("reduce_scatter", "max"),
        ):
            if function == "sum" and dtype == torch.bool:
                continue
            for count in counts:
                request = make_request(collective, function, dtype, team, rank, count)
                out = communicator.run(request)
                torch.testing.assert_close(out, expect(request, rank, count), rtol=0, atol=0)
                checked += 1
    communicator.barrier()
    return checked


def test_blocks_follow_the_order_of_the_team_not_of_the_ranks() -> None:
    assert run_ranks(check_all, 3, (2, 0, 1), (4,)) == [33] * 3


def use_permuted_and_overlapping(rank: int, world_size: int) -> list[float]:
    """Two collectives under way at once, into memory of permuted strides."""
    communicator = Communicator.instance()
    team = (0, 1)
    src = torch.full((3, 2), float(rank)).t()
    out = torch.empty(2, 2, 3).permute(1, 0, 2)  # memory order: axis 1 slowest
    first = communicator.post(CollectiveRequest(0, "all_gather", team, src, out, None, "a"))
    total = torch.empty(4)
    request = CollectiveRequest(
        1, "all_reduce", team, torch.full((4,), 1.0 + rank), total, "sum", "b"
    )
    second = communicator.post(request)
    second.wait()
    first.wait()
    assert "torch.distributed.tensor" not in sys.modules
    return [*total.tolist(), *out[:, 0].flatten().tolist(), *out[:, 1].flatten().tolist()]


def lose_no_nan(rank: int, world_size: int) -> list[bool]:
    src = torch.ones(3)
    src[rank] = float("nan")
    request = CollectiveRequest(0, "all_reduce", (0, 1), src, torch.empty(3), "max", "amax")
    return Communicator.instance().run(request).isnan().tolist()


def work_together(rank: int, world_size: int) -> tuple[list[float], list[bool], int]:
    return (
        use_permuted_and_overlapping(rank, world_size),  # first: torch.testing loads DTensor
        lose_no_nan(rank, world_size),
        check_all(rank, world_size, (0, 1), (0, 6, GATHERED_REDUCTION_BYTES)),
    )


Together = list[tuple[list[float], list[bool], int]]


@pytest.fixture(scope="module")
def together() -> Together:
    """What two ranks found, in one start of processes."""
    return run_ranks(work_together, 2)


def test_every_collective_in_every_dtype(together: Together) -> None:
    assert [checked for _, _, checked in together] == [99, 99]


def test_two_under_way_and_permuted_strides(together: Together) -> None:
    assert [found for found, _, _ in together] == [[3.0] * 4 + [0.0] * 6 + [1.0] * 6] * 2


def test_max_gives_nan_where_any_rank_has_it(together: Together) -> None:
    assert [found for _, found, _ in together] == [[True, True, False]] * 2


def fail_to_come(rank: int, world_size: int, how: str, seconds: float) -> str:
    """Rank 1 does not come to the second collective; the others say what they were told."""
    os.environ["MESHFUSE_TIMEOUT"] = str(seconds)
    communicator = Communicator.instance()
    team = tuple(range(world_size))
    token, sum_of_tokens = torch.ones(50_000), torch.empty(50_000)
    request = CollectiveRequest(4, "all_reduce", team, token, sum_of_tokens, "sum", "T7 = linear()")
    if how != "before anything":
        communicator.run(request)
    if rank == 1:
        if how in ("exits", "before anything"):
            os._exit(1)
        if how == "gives up":
            communicator.give_up("kernel_3 failed on rank 1")
        time.sleep(3)
        return "late"
    with pytest.raises(CommunicationError) as caught:
        communicator.run(request)
    with pytest.raises(CommunicationError, match="the group failed before"):
        if how == "before anything":
            raise CommunicationError("the group failed before") from caught.value
        communicator.run(request)
    return str(caught.value)


OPERATION = "all_reduce number 4 over ranks {} (sum, 200000 bytes, for T7 = linear())"


@pytest.mark.parametrize("how", ["exits", "before anything"])
def test_survivor_names_the_rank_that_died(how: str) -> None:
    survivor, dead = observe_ranks(fail_to_come, 2, how, 40.0)
    assert dead.code == 1
    assert survivor.succeeded, survivor.error
    assert OPERATION.format((0, 1)) in survivor.value
    assert "rank 1 has ended (process " in survivor.value
    assert survivor.seconds < 10


def test_all_survivors_of_three_name_the_rank_that_died() -> None:
    first, dead, last = observe_ranks(fail_to_come, 3, "exits", 40.0)
    assert dead.code == 1
    for survivor in (first, last):
        assert survivor.succeeded, survivor.error
        assert OPERATION.format((0, 1, 2)) in survivor.value
        assert "rank 1 has ended" in survivor.value
        assert survivor.seconds < 10


def test_deadline_names_the_rank_that_is_late() -> None:
    survivor, late = observe_ranks(fail_to_come, 2, "sleeps", 2.0)
    assert survivor.succeeded, survivor.error
    assert OPERATION.format((0, 1)) in survivor.value
    assert "waited 2 s, its deadline: rank 1 does not wait for it" in survivor.value
    assert late.value == "late"


def test_reason_of_a_rank_that_gives_up_reaches_the_others() -> None:
    survivor, other = observe_ranks(fail_to_come, 2, "gives up", 60.0, deadline=30.0)
    assert survivor.succeeded, survivor.error
    assert other.code == 0, "neither process waits at its exit for a collective that is lost"
    assert "rank 1 gave up: kernel_3 failed on rank 1" in survivor.value


def interrupt(rank: int, world_size: int) -> str:
    """Ctrl-C arrives while rank 0 waits for rank 1."""
    communicator = Communicator.instance()
    request = CollectiveRequest(
        0, "all_gather", (0, 1), torch.ones(1), torch.empty(2), None, "T1 = set(T0)"
    )
    communicator.run(request)
    if rank == 1:
        time.sleep(3)
        communicator.run(request)  # rank 0 had sent its part
        with pytest.raises(CommunicationError) as caught:
            communicator.run(request)
        return str(caught.value)
    Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        communicator.run(request)
    assert time.monotonic() - started < 2.5
    time.sleep(4)
    return "interrupted"


def test_interrupt_ends_a_wait_and_the_peer_learns_it() -> None:
    first, second = observe_ranks(interrupt, 2)
    assert first.succeeded, first.error
    assert second.succeeded, second.error
    assert "rank 0 gave up: interrupted in all_gather number 0" in second.value


def remake_process_group(rank: int, world_size: int, folder: str) -> list[float]:
    """The default process group is destroyed and made again: groups of the old one are not used."""
    seen: list[float] = []
    for generation in range(2):
        out = torch.empty(2)
        request = CollectiveRequest(
            0, "all_gather", (0, 1), torch.tensor([float(rank + generation)]), out, None, "x"
        )
        seen += Communicator.instance().run(request).tolist()
        dist.barrier()
        dist.destroy_process_group()
        assert Communicator.instance().size() == 1
        if generation == 0:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/again",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=30),
            )
    return seen


def test_process_group_destroyed_and_made_again(tmp_path: Path) -> None:
    assert run_ranks(remake_process_group, 2, str(tmp_path)) == [[0.0, 1.0, 1.0, 2.0]] * 2


def join_by_environment(rank: int, world_size: int) -> list[float]:
    communicator = Communicator.instance()
    assert not dist.is_initialized()
    place = [communicator.rank(), communicator.size(), communicator.local_rank()]
    communicator.barrier()
    assert dist.is_initialized()
    return [*place, communicator.local_size()]


def test_launcher_environment_sets_up_the_process_group() -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])

    def environ(rank: int) -> dict[str, str]:
        return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}

    outcomes = observe_ranks(join_by_environment, 2, initialise=False, environ=environ)
    assert [o.error or o.value for o in outcomes] == [[0, 2, 0, 2], [1, 2, 1, 2]]
