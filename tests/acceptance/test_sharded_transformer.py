"""A transformer layer, tensor- and sequence-parallel: values and gradients as autograd has them.

What moves is what is needed: a sum over the ranks for each half of the layer, or in its place a
gather before and a scattered sum after.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import lru_cache

import pytest
import torch

from sharded_runs import Posted, X, mesh_of, posted, run, without_kernels
from transformer_layer import (
    Sizes,
    Truth,
    by_torch,
    define_backward,
    define_forward,
    random_weights,
)

SIZES = Sizes(batch=1, tokens=128, heads=8, features=256)
TOKENS = 4 * SIZES.tokens * SIZES.features
"""Bytes of [b, s, e]."""
ERROR = 1e-4
"""Of float32 from float64; gradients of weights are sums over 128 tokens, of size 10."""

SHARED = {"qkv.weight", "qkv.bias", "out.weight", "up.weight", "up.bias", "down.weight"}
"""Of these each rank has its part, and the gradient of its part."""

RUNS = [(1, False), (2, True), (4, False)]


UNEVEN = Sizes(batch=2, tokens=7, heads=6, features=24)


@lru_cache(maxsize=2)
def truth(sizes: Sizes) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, Truth]:
    generator = torch.Generator().manual_seed(1)
    shape = (sizes.batch, sizes.tokens, sizes.features)
    x, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    weights = random_weights(sizes)
    return weights, x, grad, by_torch(sizes, weights, x, grad)


def no_dropout() -> list[torch.Tensor]:
    """Seed and offset."""
    return [torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.int64)]


def moved_forward(d: int, sequence_parallel: bool) -> list[Posted]:
    if d == 1:
        return []
    if not sequence_parallel:
        return [("all_reduce", X, TOKENS)] * 2
    return [("all_gather", X, TOKENS // d), ("reduce_scatter", X, TOKENS)] * 2


def moved_backward(d: int, sequence_parallel: bool) -> Counter[Posted]:
    """Two gathers for each half: of the gradient, and of what the half was computed from.

    Each is read as it is and transposed, and moves once. Where tokens are in blocks, gradients of
    norms and of biases that all ranks have are sums over them.
    """
    if d == 1:
        return Counter()
    if not sequence_parallel:
        return Counter({("all_reduce", X, TOKENS): 2})
    return Counter(
        {
            ("all_gather", X, TOKENS // d): 4,
            ("reduce_scatter", X, TOKENS): 2,
            ("all_reduce", X, 4 * SIZES.features): 6,
        }
    )


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize(("d", "kernels"), RUNS)
def test_forward(d: int, kernels: bool, sequence_parallel: bool) -> None:
    weights, x, _, want = truth(SIZES)
    values = [want.y, want.middle, want.attended, want.logsumexp, *no_dropout()]
    fd = define_forward(SIZES, mesh_of(d), sequence_parallel)
    with nullcontext() if kernels else without_kernels():
        outputs = run(fd, [*weights.values(), x], values, rtol=ERROR, atol=ERROR)[0]
    assert posted(fd) == moved_forward(d, sequence_parallel)
    if d > 1:
        axis = 1 if sequence_parallel else -1
        assert [o.axis_sharded_on(X) for o in outputs] == [axis, axis, 1, 1, -1, -1]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize(("d", "kernels"), RUNS)
def test_backward(d: int, kernels: bool, sequence_parallel: bool) -> None:
    weights, x, grad, want = truth(SIZES)
    fd = define_backward(SIZES, mesh_of(d), sequence_parallel)
    saved = [want.middle, want.attended, want.logsumexp, *no_dropout()]
    inputs = [*weights.values(), x, *saved, grad]
    with nullcontext() if kernels else without_kernels():
        outputs = run(fd, inputs, want.gradients, rtol=ERROR, atol=10 * ERROR)[0]
    assert Counter(posted(fd)) == moved_backward(d, sequence_parallel)
    assert outputs[0].numel() == x.numel() // (d if sequence_parallel else 1)
    for (name, weight), gradient in zip(weights.items(), outputs[1:], strict=True):
        assert gradient.numel() == weight.numel() // (d if name in SHARED else 1), name


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_heads_and_tokens_that_ranks_do_not_divide(sequence_parallel: bool) -> None:
    """Six heads and seven tokens on four ranks: whatever moves, the values are right."""
    weights, x, grad, want = truth(UNEVEN)
    values = [want.y, want.middle, want.attended, want.logsumexp, *no_dropout()]
    saved = [want.middle, want.attended, want.logsumexp, *no_dropout()]
    with without_kernels():
        fd = define_forward(UNEVEN, mesh_of(4), sequence_parallel)
        run(fd, [*weights.values(), x], values, rtol=ERROR, atol=ERROR)
        fd = define_backward(UNEVEN, mesh_of(4), sequence_parallel)
        inputs = [*weights.values(), x, *saved, grad]
        run(fd, inputs, want.gradients, rtol=ERROR, atol=10 * ERROR)
