"""Many threads call one definition at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from meshfuse import FusionCache, FusionDefinition

THREADS = 32
CALLS = 20


def normalised() -> FusionDefinition:
    """Two kernels around a linear: rows less their mean, projected, rectified."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        w = fd.define_tensor([3, -1], contiguity=True)
        centred = fd.ops.sub(x, fd.ops.mean(x, [1], True))
        fd.add_output(fd.ops.relu(fd.ops.linear(centred, w)))
        fd.add_output(fd.ops.sum(centred, [0]))
    return fd


def expected(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    centred = x - x.mean(1, keepdim=True)
    return [torch.nn.functional.linear(centred, w).relu(), centred.sum(0)]


@pytest.mark.parametrize(
    "rows", [lambda thread: 5, lambda thread: 2 + thread], ids=["same sizes", "other sizes"]
)
def test_all_get_their_results_and_one_compiles(rows: Callable[[int], int]) -> None:
    FusionCache.instance().reset()
    fd, barrier = normalised(), Barrier(THREADS)

    def call(thread: int) -> None:
        generator = torch.Generator().manual_seed(thread)
        x = torch.randn(rows(thread), 8, generator=generator)
        w = torch.randn(3, 8, generator=generator)
        barrier.wait()
        for _ in range(CALLS):
            results = fd.execute([x, w])
            for found, want in zip(results, expected(x, w), strict=True):
                torch.testing.assert_close(found, want)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(call, range(THREADS)))
    assert FusionCache.instance().statistics().compilations == 1
