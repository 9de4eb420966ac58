"""What tests on several GPUs share: where their processes meet, and who runs them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gloo_run import Outcome, observe_ranks

PORT = "29571"

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
"""For what is measured of overlap: ranks that share a GPU take turns."""


def gpu_of(rank: int) -> torch.device:
    """Where a rank runs. Two may share a GPU: that shows whether they are right, and how much their
    host does, but nothing that overlaps."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def environment(rank: int) -> dict[str, str]:
    """As a launcher sets it for the process of `rank` on this host."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    gpus = torch.cuda.device_count()
    place = {"LOCAL_RANK": str(gpu_of(rank).index), "LOCAL_WORLD_SIZE": str(gpus)}
    found = {**os.environ, **address, **place}
    if gpus == 1:  # NCCL and symmetric memory refuse it otherwise
        found["NCCL_HOSTID"] = f"rank {rank}"
        found["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return found


def on_gpus(function: Callable[..., Any], *arguments: Any, deadline: float = 110) -> list[Outcome]:
    """`function(rank, 2, *arguments)` in two processes, on a GPU each or both on the only one; both
    succeed."""
    outcomes = observe_ranks(
        function, 2, *arguments, deadline=deadline, initialise=False, environ=environment
    )
    for outcome in outcomes:
        assert outcome.succeeded, f"{outcome.error}\n{outcome.output}"
    return outcomes
