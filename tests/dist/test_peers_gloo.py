"""Fetches and deliveries between processes: values, and what is said where ranks differ."""

from __future__ import annotations

import pytest
import torch

from gloo_run import run_ranks
from meshfuse import FusionDefinition
from meshfuse.base.errors import CommunicationError
from meshfuse.host.check import check_host_program
from meshfuse.multidevice import Overlap
from peer_programs import gather_then_multiply, multiply_then_scatter, pipelined_mlp, scatter_pieces
from sharded_runs import integers, kinds

ROWS, WIDE = 7, 36
"""Rows in blocks that are not equal, of 2 ranks and of 3."""


def block(tensor: torch.Tensor, rank: int, world_size: int, axis: int = 0) -> torch.Tensor:
    """What a rank holds: blocks of equal size but for the last."""
    size = -(-tensor.shape[axis] // world_size)
    start = min(rank * size, tensor.shape[axis])
    return tensor.narrow(axis, start, min(size, tensor.shape[axis] - start)).contiguous()


def run_twice(
    fd: FusionDefinition, inputs: list[torch.Tensor], wanted: torch.Tensor, kind: str
) -> None:
    for _ in range(2):
        assert torch.equal(fd.execute(inputs)[0], wanted)
    assert kind in [found for found, _ in kinds(fd)]
    assert check_host_program(fd.fec.host_program()) == ()


def pipelines(rank: int, world_size: int) -> str:
    d = world_size
    x, w = integers(ROWS, 4), integers(4, 5)
    for rotated in (True, False):
        fd = gather_then_multiply(d, ROWS, rotated=rotated)
        run_twice(fd, [block(x, rank, d), w], (x @ w).relu(), "fetch")
    x = integers(4 * d, 4)
    fd = gather_then_multiply(d, 4 * d, pieces=2)
    run_twice(fd, [block(x, rank, d), w], (x @ w).relu(), "fetch")
    few = integers(1, 4)
    fd = gather_then_multiply(d, 1)  # the other ranks have nothing
    run_twice(fd, [block(few, rank, d), w], (few @ w).relu(), "fetch")
    x, w = integers(13, 4 * d), integers(4 * d, 3)
    fd = multiply_then_scatter(d, 13, 4 * d)
    parts = [block(x, rank, d, axis=1), block(w, rank, d)]
    run_twice(fd, parts, block(x @ w, rank, d), "deliver")
    x, v, w = integers(ROWS, 4), integers(4, WIDE), integers(WIDE, 4)
    fd = pipelined_mlp(d, ROWS, WIDE)
    parts = [block(x, rank, d), block(v, rank, d, axis=1), block(w, rank, d)]
    run_twice(fd, parts, block((x @ v).relu() @ w, rank, d), "deliver")
    return "done"


def pieces_of_blocks(rank: int, world_size: int) -> list[bool]:
    """Of one size and not, with a bias, an activation and a cast behind them and without; twice on
    4 streams and once on one."""
    d, found = world_size, list[bool]()
    for rows, pieces in ((4 * d, 2), (3 * d, 2), (6 * d, 3)):
        x, w, b = integers(rows, 2 * d), integers(3, 2 * d), integers(3)
        own = [block(x, rank, d, axis=1), block(w, rank, d, axis=1)]
        for epilogue in (False, True):
            wanted = (x @ w.T + b).relu().half() if epilogue else x @ w.T
            fd = scatter_pieces(d, rows, 2 * d, epilogue=epilogue)
            for streams in (4, 4, 1):
                [value] = fd.execute(
                    [*own, b] if epilogue else own,
                    overlap=Overlap.peers(pieces),
                    _enable_options=[f"number_of_streams({streams})"],
                )
                found.append(torch.equal(value, block(wanted, rank, d)))
            found.append([kind for kind, _ in kinds(fd)] == ["deliver"])
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_pieces_are_delivered_between_processes(ranks: int) -> None:
    assert run_ranks(pieces_of_blocks, ranks, deadline=100) == [[True] * 24] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_pipelines_between_processes(ranks: int) -> None:
    assert run_ranks(pipelines, ranks) == ["done"] * ranks


def differ_in_order(rank: int, world_size: int) -> str:
    """Rank 1 begins with its own block, rank 0 with block 0."""
    fd = gather_then_multiply(world_size, 8, rotated=rank == 1)
    try:
        fd.execute([integers(4, 4), integers(4, 5)])
    except CommunicationError as error:
        return str(error)
    return "nothing"


def test_ranks_that_begin_with_different_blocks_are_told() -> None:
    for message in run_ranks(differ_in_order, 2):
        assert "run different programs: their collective 0 is" in message
        assert "owner=" in message
