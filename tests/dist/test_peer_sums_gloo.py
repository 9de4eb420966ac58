"""Sums that all ranks want, between processes that deliver terms and fetch blocks: exact values, in
pieces, on any number of streams, again and again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gloo_run import run_ranks
from meshfuse import DistributedTensor, FusionDefinition
from meshfuse.multidevice import Overlap
from peer_programs import multiply_then_sum, tensor_parallel_mlp
from sharded_runs import integers, kinds


def is_right(
    fd: FusionDefinition, inputs: Sequence[torch.Tensor], wanted: torch.Tensor, pieces: int
) -> bool:
    """Twice on 4 streams, and once on one."""
    found: list[bool] = []
    for streams in (4, 4, 1):
        options = [f"number_of_streams({streams})"]
        [value] = fd.execute(inputs, overlap=Overlap.peers(pieces), _enable_options=options)
        assert isinstance(value, DistributedTensor)
        found.append(torch.equal(value.local, wanted))
    return all(found) and [kind for kind, _ in kinds(fd)] == ["deliver", "fetch"]


def sums(rank: int, size: int) -> list[bool]:
    """Even and uneven blocks, with a bias, an activation and a cast behind them and without."""
    found: list[bool] = []
    for rows, pieces in ((2 * size, 1), (2 * size + 1, 1), (4 * size, 2), (6 * size, 3)):
        x, w, b = integers(rows, 2 * size), integers(3, 2 * size), integers(3)
        own = [x.chunk(size, 1)[rank].contiguous(), w.chunk(size, 1)[rank].contiguous()]
        total = x @ w.T
        plain, more = (multiply_then_sum(size, rows, 2 * size, epilogue=e) for e in (False, True))
        found.append(is_right(plain, own, total, pieces))
        found.append(is_right(more, [*own, b], (total + b).relu().half(), pieces))
    return found


def test_values_on_two_processes() -> None:
    assert run_ranks(sums, 2, deadline=100) == [[True] * 8] * 2


def test_values_on_three_processes() -> None:
    assert run_ranks(sums, 3, deadline=100) == [[True] * 8] * 3


def pair(rank: int, size: int) -> list[bool]:
    found: list[bool] = []
    for pieces in (1, 2):
        rows, wide = 2 * size * pieces, 3 * size
        x, v, w, b = integers(rows, 4), integers(wide, 4), integers(4, wide), integers(4)
        own = [x, v.chunk(size)[rank], w.chunk(size, 1)[rank].contiguous(), b]
        wanted = (x @ v.T).relu() @ w.T + b
        found.append(is_right(tensor_parallel_mlp(size, rows, wide), own, wanted, pieces))
    return found


def test_megatron_s_pair_on_two_processes() -> None:
    assert run_ranks(pair, 2, deadline=100) == [[True, True]] * 2


def race(rank: int, size: int) -> tuple[bool, list[str], list[str | None]]:
    """The best form beside the plain one, whichever it is."""
    x, w = integers(8 * size, 2 * size), integers(3, 2 * size)
    own = [x.chunk(size, 1)[rank].contiguous(), w.chunk(size, 1)[rank].contiguous()]
    fd = multiply_then_sum(size, 8 * size, 2 * size)
    [value] = fd.execute(own, overlap="require")
    assert isinstance(value, DistributedTensor)
    choice = fd.fec.overlap()
    assert choice is not None
    forms = [str(row.form) for row in choice.rows]
    return torch.equal(value.local, x @ w.T), forms, [row.error for row in choice.rows]


def test_the_race_runs_them() -> None:
    forms = ["plain", "2 chunks", "4 chunks", "8 chunks", "peers", "peers, 2 pieces"]
    found = run_ranks(race, 2, deadline=100, environ=lambda _: {"MESHFUSE_CACHE_DIR": ""})
    assert found == [(True, forms, [None] * 6)] * 2
