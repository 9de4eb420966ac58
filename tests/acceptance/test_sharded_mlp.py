"""Linears whose features are over the ranks: an MLP as Llama has it, and a bias that is added once.

On a mesh of data and tensor parallelism, forward and backward, by value on every rank.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from meshfuse import DataType, FusionDefinition, TensorView
from sharded_runs import (
    Posted,
    X,
    Y,
    integers,
    mesh_of,
    place,
    place_strided,
    posted,
    run,
    without_kernels,
)


@dataclass(frozen=True)
class LlamaMlp:
    """down(silu(gate(x)) * up(x)) of x [b, s, e]; gate and up are one weight, and one linear.

    Batches in blocks over the first axis of the mesh, inner features over the second. The joined
    weight is [2f, e], of each half a block on each rank; or, with `stacked`, it is [2, f, e].
    """

    mesh: tuple[int, int]
    batch: int
    inner: int
    stacked: bool = False
    tokens: int = 3
    features: int = 8

    def __str__(self) -> str:
        rows, columns = self.mesh
        form = "stacked" if self.stacked else "strided"
        return f"{rows}x{columns}-b{self.batch}-f{self.inner}-{form}"

    def define(self) -> FusionDefinition:
        """Inputs: x, both weights, the gradient of the result.

        Outputs: the result, then the gradients of x and of the weights.
        """
        b, s, e, f = self.batch, self.tokens, self.features, self.inner
        mesh = mesh_of(*self.mesh)
        with FusionDefinition() as fd:
            x = fd.define_tensor([b, s, e], contiguity=True)
            gate_up = fd.define_tensor([2, f, e] if self.stacked else [2 * f, e], contiguity=True)
            down = fd.define_tensor([e, f], contiguity=True)
            grad = fd.define_tensor([b, s, e], contiguity=True)
            place(mesh, {0: Y}, x, grad)
            if self.stacked:
                place(mesh, {1: X}, gate_up)
            else:
                place_strided(mesh, 2, X, gate_up)
            place(mesh, {1: X}, down)
            gate, up = self.halves(fd, fd.ops.linear(x, gate_up))
            inner = fd.ops.silu(gate) * up
            fd.add_output(fd.ops.linear(inner, down))
            halves = self.backward(fd, gate, up, fd.ops.matmul(grad, down))
            for output in self.joined_gradients(fd, halves, x, gate_up):
                fd.add_output(output)
            fd.add_output(fd.ops.sum(fd.ops.matmul(fd.ops.permute(grad, [0, 2, 1]), inner), [0]))
        return fd

    def halves(self, fd: FusionDefinition, joined: TensorView) -> list[TensorView]:
        """Gate and up [b, s, f], of [b, s, 2f] or [2, b, s, f]."""
        if not self.stacked:
            joined = fd.ops.reshape(joined, [self.batch, self.tokens, 2, self.inner])
            joined = fd.ops.permute(joined, [2, 0, 1, 3])
        shape = [self.batch, self.tokens, self.inner]
        pieces = [fd.ops.slice(joined, [k, 0, 0, 0], [k + 1, *shape]) for k in range(2)]
        return [fd.ops.squeeze(piece, [0]) for piece in pieces]

    def backward(
        self, fd: FusionDefinition, gate: TensorView, up: TensorView, grad: TensorView
    ) -> TensorView:
        """The gradients of gate and up [2, b, s, f], of that of what they make."""
        sigmoid = fd.ops.sigmoid(gate)
        slope = sigmoid * (gate * (1.0 - sigmoid) + 1.0)
        pair = (grad * up * slope, grad * gate * sigmoid)
        return fd.ops.cat([fd.ops.broadcast(x, [True, False, False, False]) for x in pair], 0)

    def joined_gradients(
        self, fd: FusionDefinition, halves: TensorView, x: TensorView, gate_up: TensorView
    ) -> list[TensorView]:
        """Of x and the joined weight."""
        if self.stacked:
            rows = fd.ops.matmul(halves, fd.ops.broadcast(gate_up, [False, True, False, False]))
            products = fd.ops.matmul(fd.ops.permute(halves, [0, 1, 3, 2]), x)
            return [fd.ops.sum(rows, [0]), fd.ops.sum(products, [1])]
        grad = fd.ops.permute(halves, [1, 2, 0, 3])
        grad = fd.ops.reshape(grad, [self.batch, self.tokens, 2 * self.inner])
        products = fd.ops.matmul(fd.ops.permute(grad, [0, 2, 1]), x)
        return [fd.ops.matmul(grad, gate_up), fd.ops.sum(products, [0])]

    def inputs(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.inner)
        e, f = self.features, self.inner
        tokens = (self.batch, self.tokens, e)
        shapes = (tokens, (2, f, e) if self.stacked else (2 * f, e), (e, f), tokens)
        return [torch.randn(shape, generator=generator) for shape in shapes]

    def wanted(self) -> list[torch.Tensor]:
        leaves = [x.double().requires_grad_() for x in self.inputs()[:3]]
        x, gate_up, down = leaves
        gate, up = functional.linear(x, gate_up.reshape(-1, self.features)).chunk(2, -1)
        y = functional.linear(functional.silu(gate) * up, down)
        gradients = torch.autograd.grad(y, leaves, self.inputs()[3].double())
        return [value.detach().float() for value in (y, *gradients)]

    def moved(self) -> Counter[Posted]:
        """Sums over the features for the result and the gradient of x; over the batch for weights.

        Bytes are those of the largest parts.
        """
        sizes = (self.batch, self.inner)
        batches, parts = (-(-size // n) for size, n in zip(sizes, self.mesh, strict=True))
        tokens = ("all_reduce", X, 4 * batches * self.tokens * self.features)
        weights = [("all_reduce", Y, 4 * n * parts * self.features) for n in (2, 1)]
        return Counter([tokens, tokens, *weights])


def check(model: LlamaMlp) -> FusionDefinition:
    fd = model.define()
    run(fd, model.inputs(), model.wanted(), rtol=1e-5, atol=1e-4)
    return fd


MODELS = [
    LlamaMlp((2, 2), batch=4, inner=12),
    LlamaMlp((2, 3), batch=4, inner=12),
    LlamaMlp((2, 2), batch=3, inner=10),
    LlamaMlp((2, 3), batch=4, inner=12, stacked=True),
    LlamaMlp((2, 2), batch=3, inner=11, stacked=True),
    LlamaMlp((2, 3), batch=5, inner=10, stacked=True),
    LlamaMlp((3, 2), batch=2, inner=7, stacked=True),
]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_llama_mlp(model: LlamaMlp) -> None:
    with nullcontext() if model in (MODELS[1], MODELS[5]) else without_kernels():
        fd = check(model)
    assert Counter(posted(fd)) == model.moved()


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 4)])
def test_halves_that_ranks_do_not_divide(mesh: tuple[int, int]) -> None:
    """Ranks hold pieces of [2f, e] that do not end where the halves do: right by value, too."""
    with without_kernels():
        check(LlamaMlp(mesh, batch=3, inner=7))


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.BFloat16], ids=str)
@pytest.mark.parametrize("scatter", [False, True], ids=["whole", "scattered"])
@pytest.mark.parametrize(("d", "features"), [(1, 8), (2, 8), (4, 8), (2, 7), (4, 9), (4, 2)])
def test_the_bias_of_a_row_parallel_linear_is_added_once(
    d: int, features: int, scatter: bool, dtype: DataType
) -> None:
    """Exactly, on whole numbers that bfloat16 has: |sums| <= 9 * 16 + 64 < 256."""
    tokens, out = 6, 5
    mesh = mesh_of(d)
    with FusionDefinition() as fd:
        x = fd.define_tensor([tokens, features], dtype=dtype, contiguity=True)
        weight = fd.define_tensor([out, features], dtype=dtype, contiguity=True)
        bias = fd.define_tensor([out], dtype=dtype, contiguity=True)
        y = fd.ops.linear(x, weight, bias)
        fd.add_output(y)
        place(mesh, {1: X}, x, weight)
        place(mesh, {}, bias)
        place(mesh, {0: X} if scatter else {}, y)
    kind = torch.float32 if dtype is DataType.Float else torch.bfloat16
    inputs = [integers(tokens, features, dtype=kind), integers(out, features, dtype=kind)]
    inputs.append(integers(out, low=32, high=65, dtype=kind))
    value = functional.linear(*(t.double() for t in inputs)).to(kind)
    with nullcontext() if (d, features) == (4, 9) else without_kernels():
        run(fd, inputs, [value])
    size = tokens * out * kind.itemsize
    wanted = ("reduce_scatter" if scatter else "all_reduce", X, size)
    assert posted(fd) == ([wanted] if d > 1 else [])
