"""Chunks of one piece of each rank's block, between processes: exact values, with streams and
without, by hand and as a form of overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from chunk_programs import KINDS, parts, product, shards, whole_inputs
from gloo_run import run_ranks
from meshfuse import DistributedTensor, FusionDefinition
from meshfuse.facts.overlap_form import PLAIN
from meshfuse.multidevice import Overlap

SIZES = ((8, 4), (5, 2), (5, 4))
"""Rows of a rank and chunks; a last chunk of fewer rows, and of none."""


def is_right(
    fd: FusionDefinition,
    kind: str,
    rows: int,
    rank: int,
    size: int,
    overlap: Overlap | Literal["require"],
    streams: int = 4,
) -> bool:
    x, w = whole_inputs(kind, size, rows)
    [value] = fd.execute(
        shards(kind, size, rows, rank),
        overlap=overlap,
        _enable_options=[f"number_of_streams({streams})"],
    )
    assert isinstance(value, DistributedTensor)
    return torch.equal(value.local, parts(kind, x @ w, size)[rank])


def run_all(rank: int, size: int) -> Sequence[bool]:
    """Each case by hand on 1 and 4 streams, twice, and as a form."""
    found: list[bool] = []
    for kind in KINDS:
        for rows, count in SIZES:
            by_hand = product(kind, size, rows, count)
            for streams in (1, 4, 4):
                found.append(is_right(by_hand, kind, rows, rank, size, PLAIN, streams))
            form = Overlap.chunks(count)
            found.append(is_right(product(kind, size, rows), kind, rows, rank, size, form))
    return found


def test_values_on_two_processes() -> None:
    assert run_ranks(run_all, 2, deadline=100) == [[True] * 4 * len(SIZES) * len(KINDS)] * 2


def test_values_on_three_processes() -> None:
    assert run_ranks(run_all, 3, deadline=100) == [[True] * 4 * len(SIZES) * len(KINDS)] * 3


def run_best(rank: int, size: int) -> tuple[bool, str]:
    fd = product("gather", size, 16)
    right = is_right(fd, "gather", 16, rank, size, "require")
    choice = fd.fec.overlap()
    assert choice is not None
    return right, ", ".join(str(row.form) for row in choice.rows)


def test_the_race_runs_them() -> None:
    forms = "plain, 2 chunks, 4 chunks, 8 chunks, peers, peers, 2 pieces"
    environ = {"MESHFUSE_CACHE_DIR": ""}
    assert run_ranks(run_best, 2, deadline=100, environ=lambda _: environ) == [(True, forms)] * 2
