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


def environment(rank: int) -> dict[str, str]:
    """As a launcher sets it for the process of `rank` on this host."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    return {**os.environ, **address, "LOCAL_RANK": str(rank)}


def on_two_gpus(
    function: Callable[..., Any], *arguments: Any, deadline: float = 110
) -> list[Outcome]:
    """`function(rank, 2, *arguments)` in a process for each of two GPUs, which all succeed."""
    outcomes = observe_ranks(
        function, 2, *arguments, deadline=deadline, initialise=False, environ=environment
    )
    for outcome in outcomes:
        assert outcome.succeeded, f"{outcome.error}\n{outcome.output}"
    return outcomes
