"""Every sharded case on gloo processes, as many as it has ranks."""

from __future__ import annotations

import pytest

from gloo_run import run_ranks
from meshfuse import TensorView
from meshfuse.multidevice import shard_tensor
from sharded_cases import CASES, check_outputs


def run_all_cases(rank: int, world_size: int) -> list[str]:
    """One process: each case on this rank's shards. Returns the names of the cases that ran."""
    done: list[str] = []
    for name, case in CASES.items():
        built = case(world_size)
        views = [view for view in built.fd.fusion.inputs() if isinstance(view, TensorView)]
        shards = [shard_tensor(t, view) for t, view in zip(built.inputs, views, strict=True)]
        check_outputs(built, world_size, rank, built.fd.execute(shards))
        done.append(name)
    return done


@pytest.mark.parametrize("ranks", [2, 3])
def test_cases_on_processes(ranks: int) -> None:
    results = run_ranks(run_all_cases, ranks, deadline=110)
    assert results == [list(CASES)] * ranks
