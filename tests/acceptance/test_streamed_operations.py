"""Operations that torch runs, and those with several results, in loops over chunks: which can be in
one, and that the values are those of the whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from host_loops import Definition, chunks, define, dense, host_program, loops
from meshfuse import DataType, FusionDefinition, TensorView
from sharded_runs import integers, without_kernels

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
