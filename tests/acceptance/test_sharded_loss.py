"""Vocabulary-parallel cross entropy, forward and backward: logits stay where they are.

The head's weight is in blocks of the vocabulary, and so are the logits [t, v] that it makes. Of
these three numbers for each token are reduced; nothing as large as the logits moves.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

from meshfuse import DataType, FusionDefinition
from sharded_runs import X, Y, mesh_of, place, posted, run, without_kernels

TOKENS, FEATURES = 12, 3


def define(mesh_shape: tuple[int, ...], vocabulary: int) -> FusionDefinition:
    """Inputs: tokens' features [t, e], targets [t], the head [v, e], the loss's gradient [].

    Outputs: the mean loss, the gradients of the features and of the head. With two mesh axes the
    tokens are in blocks over the first.
    """
    mesh = mesh_of(*mesh_shape)
    with FusionDefinition() as fd:
        ops, row = fd.ops, [False, True]
        x = fd.define_tensor([TOKENS, FEATURES], contiguity=True)
        target = fd.define_tensor([TOKENS], dtype=DataType.Int, contiguity=True)
        head = fd.define_tensor([vocabulary, FEATURES], contiguity=True)
        grad = fd.define_tensor([], contiguity=True)
        place(mesh, {0: Y} if len(mesh_shape) > 1 else {}, x, target)
        place(mesh, {0: X}, head)
        place(mesh, {}, grad)
        logits = ops.linear(x, head)
        shifted = logits - ops.max(logits, [1], keepdim=True)
        exponentials = ops.exp(shifted)
        total = ops.sum(exponentials, [1], keepdim=True)
        picked = ops.take_along_axis(shifted, ops.broadcast(target, row), 1)
        losses = ops.squeeze(ops.log(total) - picked, [1])
        fd.add_output(ops.mean(losses, [0]))
        hit = ops.eq(ops.broadcast(target, row), ops.iota(vocabulary))
        slope = exponentials / total - ops.cast(hit, DataType.Float)
        slope = slope * (grad / float(TOKENS))
        fd.add_output(ops.matmul(slope, head))
        fd.add_output(ops.matmul(ops.permute(slope, [1, 0]), x))
    return fd


def inputs_and_wanted(vocabulary: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(vocabulary)
    x, head = (torch.randn(rows, FEATURES, generator=generator) for rows in (TOKENS, vocabulary))
    target = torch.randint(0, vocabulary, (TOKENS,), generator=generator)
    target[0], target[-1] = 0, vocabulary - 1
    grad = torch.tensor(3.0)
    leaves = [t.double().requires_grad_() for t in (x, head)]
    loss = functional.cross_entropy(leaves[0] @ leaves[1].T, target)
    gradients = torch.autograd.grad(loss, leaves, grad.double())
    wanted = [value.detach().float() for value in (loss, *gradients)]
    return [x, target, head, grad], wanted


@pytest.mark.parametrize("vocabulary", [1024, 1027], ids=["even", "uneven"])
@pytest.mark.parametrize("d", [1, 2, 4])
def test_loss_and_gradients(d: int, vocabulary: int) -> None:
    fd = define((d,), vocabulary)
    inputs, wanted = inputs_and_wanted(vocabulary)
    with nullcontext() if (d, vocabulary) == (2, 1027) else without_kernels():
        outputs = run(fd, inputs, wanted, rtol=1e-5, atol=1e-5)[0]
    numbers, features = ("all_reduce", X, 4 * TOKENS), ("all_reduce", X, 4 * TOKENS * FEATURES)
    assert Counter(posted(fd)) == Counter([*[numbers] * 3, features] if d > 1 else [])
    if d > 1:
        assert [output.axis_sharded_on(X) for output in outputs] == [-1, -1, 0]


@pytest.mark.parametrize("vocabulary", [24, 13, 2], ids=str)
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 3)])
def test_tokens_in_blocks_too(mesh: tuple[int, int], vocabulary: int) -> None:
    """Sums over all tokens run along the other axis of the mesh."""
    fd = define(mesh, vocabulary)
    inputs, wanted = inputs_and_wanted(vocabulary)
    with without_kernels():
        run(fd, inputs, wanted, rtol=1e-5, atol=1e-5)
    tokens = TOKENS // mesh[0]
    numbers, features = ("all_reduce", X, 4 * tokens), ("all_reduce", X, 4 * tokens * FEATURES)
    weight = ("all_reduce", Y, 4 * -(-vocabulary // mesh[1]) * FEATURES)
    assert Counter(posted(fd)) == Counter([*[numbers] * 3, features, ("all_reduce", Y, 4), weight])
