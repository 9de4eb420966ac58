"""Packed collectives, exchanges and reductions in team order between real processes, by value."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace

import pytest
import torch

from gloo_run import run_ranks
from meshfuse.dist.collectives import GATHERED_REDUCTION_BYTES, CollectiveRequest
from meshfuse.dist.communicator import Communicator
from moved_cases import Moved, along_one_axis, exchanges, mesh_of

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def cases_of(world_size: int) -> list[Moved]:
    if world_size == 2:
        return [
            *along_one_axis(mesh_of(0, 1)),
            *exchanges(mesh_of(0, 1), mesh_of(0, 1)),
            *exchanges(mesh_of(0, 1), mesh_of(1)),
        ]
    return [
        *along_one_axis(mesh_of(2, 0, 1)),
        *exchanges(mesh_of(0, 1), mesh_of(1, 2)),
        *exchanges(mesh_of(0), mesh_of(0, 1, 2)),
        *exchanges(mesh_of(0, 1, 2), mesh_of(1)),
    ]


def in_all_types(case: Moved) -> list[Moved]:
    typed = [replace(case, dtype=dtype) for dtype in DTYPES]
    return [one for one in typed if not (one.is_bool and one.function == "sum")]


def receives(case: Moved, rank: int) -> bool:
    return case.out.mesh is not None and rank in case.out.mesh.ids


def how_many(world_size: int) -> list[int]:
    """How many results each rank is to have checked."""
    cases = [one for case in cases_of(world_size) for one in in_all_types(case)]
    return [sum(receives(case, rank) for case in cases) for rank in range(world_size)]


def move_all(rank: int, world_size: int) -> int:
    """All cases that a rank has a part in, several under way at once."""
    warnings.simplefilter("error")
    communicator = Communicator.instance()
    checked = 0
    for case in cases_of(world_size):
        if rank not in case.ranks:
            continue
        typed = in_all_types(case)
        requests = [one.request(rank) for one in typed]
        pending = [communicator.post(request) for request in requests]
        for one, request, posted in zip(typed, requests, pending, strict=True):
            posted.wait()
            if receives(one, rank):
                assert torch.equal(request.out, one.wanted(rank)), f"{one.name}, {one.dtype}"
                checked += 1
    communicator.barrier()
    assert "torch.distributed.tensor" not in sys.modules
    return checked


def test_every_form_of_parts_on_two_ranks() -> None:
    assert run_ranks(move_all, 2) == how_many(2)


def add_in_team_order(rank: int, world_size: int, team: tuple[int, ...]) -> list[int]:
    """Sums whose value depends on the order and on rounding, of a few elements and of many."""
    communicator = Communicator.instance()
    large = GATHERED_REDUCTION_BYTES // 4 + 1
    terms = torch.tensor([1e8, -1e8, 1.0])
    found: list[int] = []
    for count in (5, large):
        for dtype in (torch.float32, torch.bfloat16):
            mine = terms if dtype == torch.float32 else torch.tensor([256.0, 1.0, 2.0])
            src = torch.full((count,), float(mine[team.index(rank)]), dtype=dtype)
            request = CollectiveRequest(
                0, "all_reduce", team, src, torch.empty_like(src), "sum", "a sum", None, True
            )
            out = communicator.run(request)
            assert torch.equal(out, torch.full_like(out, float(out[0]))), "alike everywhere"
            found.append(int(out[0]))
    return found


def work_together(rank: int, world_size: int) -> tuple[int, list[int]]:
    return move_all(rank, world_size), add_in_team_order(rank, world_size, (2, 0, 1))


@pytest.fixture(scope="module")
def together() -> list[tuple[int, list[int]]]:
    """What three ranks found, in one start of processes."""
    return run_ranks(work_together, 3)


def test_every_form_of_parts_on_three_ranks(together: list[tuple[int, list[int]]]) -> None:
    assert [checked for checked, _ in together] == how_many(3)


def test_long_sums_in_team_order(together: list[tuple[int, list[int]]]) -> None:
    """(1e8 - 1e8) + 1 is 1; 256 + 1 + 2 is rounded once, to 260, an addition at a time to 258."""
    assert [found for _, found in together] == [[1, 260, 1, 260]] * 3
