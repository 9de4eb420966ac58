"""Operations that torch runs, and those with several results, in loops over chunks: which can be in
one, and that the values are those of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from host_loops import Definition, chunks, define, dense, host_program, loops
from meshfuse import DataType, FusionDefinition, TensorView
from sharded_runs import X, integers, mesh_of, run, without_kernels

Build = Callable[[FusionDefinition, list[TensorView]], list[TensorView]]

A, B = integers(4, 5, 6), integers(4, 5, 6) * 2 - 1
INDEX = torch.tensor([[3, 0, 1], [2, 2, 0]])


def declare(fd: FusionDefinition, tensor: torch.Tensor) -> TensorView:
    """With its sizes."""
    dtype = DataType.Float if tensor.is_floating_point() else DataType.Int
    return fd.define_tensor(list(tensor.shape), contiguity=True, dtype=dtype)


CASES: dict[str, tuple[list[torch.Tensor], Build, int]] = {
    "cat": ([A, B], lambda fd, x: [fd.ops.cat(x, 1)], 0),
    "pad": ([A], lambda fd, x: [fd.ops.pad(x[0], [1, 2])], 1),
    "slice": ([A], lambda fd, x: [fd.ops.slice(x[0], [0, 0, 1], [4, 5, 4])], 0),
    "cumsum": ([A], lambda fd, x: [fd.ops.cumsum(x[0], 2)], 1),
    "topk": ([A], lambda fd, x: list(fd.ops.topk(x[0], 2, 1, True, True)), 2),
    "index_select, of what is picked from": (
        [A, INDEX[0]],
        lambda fd, x: [fd.ops.index_select(x[0], x[1], 0)],
        2,
    ),
    "index_select, of indices": (
        [A, INDEX[0]],
        lambda fd, x: [fd.ops.index_select(x[0], x[1], 0)],
        0,
    ),
    "embedding": ([INDEX, A[0]], lambda fd, x: [fd.ops.embedding_fwd(x[0], x[1])], 1),
    "take_along_axis": (
        [A[:, :, :3].contiguous(), INDEX.repeat(4, 1, 1)],
        lambda fd, x: [fd.ops.take_along_axis(x[0], x[1], 1)],
        0,
    ),
    "take_along_axis, of indices": (
        [A[:, :, :3].contiguous(), INDEX.repeat(4, 1, 1)],
        lambda fd, x: [fd.ops.take_along_axis(x[0], x[1], 1)],
        1,
    ),
    "reshape": ([A], lambda fd, x: [fd.ops.reshape(x[0], [4, 30])], 0),
    "reshape behind": ([A], lambda fd, x: [fd.ops.reshape(fd.ops.relu(x[0]), [20, 6])], 1),
    "expand": (
        [A[:, :, :1].contiguous()],
        lambda fd, x: [fd.ops.neg(fd.ops.expand(x[0], [4, 5, 7]))],
        1,
    ),
    "var_mean": ([A], lambda fd, x: list(fd.ops.var_mean(x[0], [2])), 1),
}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_chunks_are_made_of_chunks(case: str, kernels: bool) -> None:
    inputs, build, axis = CASES[case]

    def definition(count: int | None) -> Definition:
        def defined(fd: FusionDefinition) -> None:
            results = build(fd, [declare(fd, x) for x in inputs])
            if count is not None:
                chunks(results[0], axis, count)
            for result in results:
                fd.add_output(result)

        return defined

    with nullcontext() if kernels else without_kernels():
        whole = define(definition(None)).execute(inputs)
        fd = define(definition(3))
        found = fd.execute(inputs)
    for ours, wanted in zip(found, whole, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=0 if case != "var_mean" else 1e-6)
    host = host_program(fd, inputs, kernels=kernels)
    assert len(loops(host)) == 1, fd.explain()
    assert "not_streamed" not in fd.explain()


# Attention.


def attention(shape: tuple[int, ...], axis: int | None, *, dropout: float = 0.0) -> Definition:
    """Forward and backward with all that they return, in chunks along a batch axis or heads."""

    def defined(fd: FusionDefinition) -> None:
        query, key, value, grad = (dense(fd, *shape) for _ in range(4))
        made = fd.ops.sdpfa_fwd(query, key, value, dropout_p=dropout, is_causal=True)
        out, logsumexp, seed, offset = made
        grads = fd.ops.sdpfa_bwd(
            grad, query, key, value, out, logsumexp, dropout, True, seed, offset, None
        )
        if axis is not None:
            chunks(logsumexp, axis, 2)
            chunks(grads[1], axis, 2)
        for tensor in (*made, *grads):
            fd.add_output(tensor)

    return defined


@pytest.mark.parametrize(("shape", "axis"), [((3, 2, 5, 8), 0), ((2, 3, 5, 8), 1)])
def test_attention_in_chunks_of_batches_and_heads(shape: tuple[int, ...], axis: int) -> None:
    """Both operations have a loop: the seed, which has no such axis, is made alike by each
    iteration of the first, and the second reads it."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for _ in range(4)]
    fd = define(attention(shape, axis))
    found = fd.execute(inputs)
    for ours, wanted in zip(found, define(attention(shape, None)).execute(inputs), strict=True):
        torch.testing.assert_close(ours, wanted)
    assert "not_streamed" not in fd.explain()
    first, second = loops(host_program(fd, inputs))
    assert [str(loop.count) for loop in (first, second)] == ["2", "2"]


def test_dropout_keeps_attention_whole() -> None:
    shape = (2, 2, 4, 8)
    fd, inputs = define(attention(shape, 0, dropout=0.5)), [torch.randn(shape) for _ in range(4)]
    fd.execute(inputs)
    assert loops(host_program(fd, inputs)) == []
    assert "what dropout drops depends on where it stands" in fd.explain()


def test_attention_of_a_rank_in_chunks_of_batches() -> None:
    """Heads on the ranks, batches in chunks."""
    shape, mesh = (4, 2, 3, 8), mesh_of(2)

    def defined(fd: FusionDefinition) -> None:
        tensors = [dense(fd, *shape) for _ in range(3)]
        out, logsumexp, _, _ = fd.ops.sdpfa_fwd(tensors[0], tensors[1], tensors[2])
        for tensor in (*tensors, out):
            tensor.set_device_mesh(mesh)
            tensor.axis(1).parallelize(X)
        chunks(out, 0, 2)
        fd.add_output(out)
        fd.add_output(logsumexp)

    torch.manual_seed(0)
    inputs = [torch.randn(shape) for _ in range(3)]
    scores = inputs[0] @ inputs[1].mT / math.sqrt(8)
    fd = define(defined)
    run(fd, inputs, [scores.softmax(-1) @ inputs[2], scores.logsumexp(-1)], rtol=1e-5, atol=1e-5)
    assert len(loops(host_program(fd, [x[:, :1] for x in inputs]))) == 1


# What stays whole.


def test_results_that_cannot_share_a_loop_are_made_whole() -> None:
    """Values along one axis, indices along another: an operation is in one loop."""

    def defined(fd: FusionDefinition) -> None:
        values, indices = fd.ops.topk(dense(fd, 4, 5, 6), 2, 1, True, True)
        chunks(values, 0, 2)
        chunks(indices, 2, 3)
        fd.add_output(values)
        fd.add_output(indices)

    fd = define(defined)
    values, indices = fd.execute([A])
    assert torch.equal(values, A.topk(2, 1).values)
    assert torch.equal(A.gather(1, indices), values)
    assert loops(host_program(fd, [A])) == []
    assert "T2 of the same operation cannot be in its loop" in fd.explain()


@pytest.mark.parametrize("kernels", [True, False])
def test_an_axis_that_a_reshape_makes_is_made_whole(kernels: bool) -> None:
    """In a kernel, too: no split is left that its scheduler would not want."""

    def defined(fd: FusionDefinition) -> None:
        y = fd.ops.reshape(fd.ops.relu(dense(fd, 4, 5, 6)), [20, 6])
        chunks(y, 0, 2)
        fd.add_output(y)

    fd = define(defined)
    with nullcontext() if kernels else without_kernels():
        assert torch.equal(fd.execute([A])[0], A.relu().reshape(20, 6))
    assert "is what a reshape makes of others" in fd.explain()


def test_random_numbers_are_made_whole() -> None:
    def defined(fd: FusionDefinition) -> None:
        y = fd.ops.uniform(0.0, 1.0, [4, 6], dtype=DataType.Float)
        chunks(y, 0, 2)
        fd.add_output(fd.ops.add(y, dense(fd, 4, 6)))

    fd = define(defined)
    fd.execute([integers(4, 6)])
    assert "chunks of what Random makes depend on where they stand" in fd.explain()
