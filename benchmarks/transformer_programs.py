"""A transformer block, tensor- and sequence-parallel, forward and backward, as meshfuse programs.

Pre-norm, causal attention, MLP; bfloat16, norms and what is between products in float32. Tokens are
the rows of x [s * b, e], sequence-major, in blocks over the ranks; heads and inner features are
over the ranks, too. The backward takes from the forward what autograd would keep in torch, and
gathers normalized tokens anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from linears import place

from meshfuse import DataType, FusionDefinition, ParallelType, TensorView
from meshfuse.multidevice import DeviceMesh

EPSILON = 1e-5


@dataclass(frozen=True)
class Sizes:
    """Global ones. `ranks` divides heads and tokens."""

    batch: int
    sequence: int
    features: int
    heads: int
    ranks: int

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def head(self) -> int:
        return self.features // self.heads

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        e = self.features
        return {
            "norm1.weight": (e,),
            "norm1.bias": (e,),
            "qkv": (3 * e, e),
            "out": (e, e),
            "norm2.weight": (e,),
            "norm2.bias": (e,),
            "up": (4 * e, e),
            "down": (e, 4 * e),
        }


COLUMN_PARALLEL = ("qkv", "up")
ROW_PARALLEL = ("out", "down")


def own_weight(sizes: Sizes, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's shard of a weight or of its gradient: of q, k and v it has its heads."""
    if name == "qkv":
        pieces = whole.view(3, sizes.ranks, -1, whole.shape[-1])
        return pieces[:, rank].reshape(-1, whole.shape[-1])
    if name == "up":
        return whole.chunk(sizes.ranks, 0)[rank].contiguous()
    if name in ROW_PARALLEL:
        return whole.chunk(sizes.ranks, 1)[rank].contiguous()
    return whole


@dataclass(frozen=True)
class Block:
    """One program, with its weights by name."""

    fd: FusionDefinition
    sizes: Sizes
    mesh: DeviceMesh
    weights: dict[str, TensorView]

    @staticmethod
    def define(fd: FusionDefinition, sizes: Sizes) -> Block:
        block = Block(fd, sizes, DeviceMesh(range(sizes.ranks)), {})
        for name, shape in sizes.weights.items():
            block.weights[name] = weight = block.input(*shape)
            if name == "qkv":
                weight.set_device_mesh(block.mesh)
                weight.outer_split(0, 3)
                weight.outer_split(1, sizes.ranks)
                weight.axis(1).parallelize(ParallelType.mesh_x)
            else:
                axis = {"up": 0, "out": 1, "down": 1}.get(name)
                place(block.mesh, weight, axis)
        return block

    def input(self, *shape: int, dense: bool = True) -> TensorView:
        return self.fd.define_tensor(list(shape), contiguity=dense, dtype=DataType.BFloat16)

    def tokens(self) -> TensorView:
        x = self.input(self.sizes.tokens, self.sizes.features)
        place(self.mesh, x, 0)
        return x

    def narrow(self, x: TensorView) -> TensorView:
        return self.fd.ops.cast(x, DataType.BFloat16)

    # Forward.

    def normal(self, x: TensorView) -> tuple[TensorView, TensorView]:
        """`x` at mean 0 and variance 1, and one over its standard deviation, in float32."""
        wide = self.fd.ops.cast(x, DataType.Float)
        variance, mean = self.fd.ops.var_mean(wide, [1], correction=0, keepdim=True)
        scale = self.fd.ops.rsqrt(variance + EPSILON)
        return (wide - mean) * scale, scale

    def norm(self, x: TensorView, name: str) -> TensorView:
        weight, bias = (self.weights[f"{name}.{kind}"] for kind in ("weight", "bias"))
        return self.narrow(self.normal(x)[0] * weight + bias)

    def heads(self, joined: TensorView) -> tuple[TensorView, TensorView, TensorView]:
        """q, k and v [b, h, s, e / h] of [s, b, 3, h, e / h]."""
        s, ops = self.sizes, self.fd.ops
        pieces: list[TensorView] = []
        for k in range(3):
            low, high = [0, 0, k, 0, 0], [s.sequence, s.batch, k + 1, s.heads, s.head]
            piece = ops.squeeze(ops.slice(joined, low, high), [2])
            pieces.append(ops.permute(piece, [1, 2, 0, 3]))
        query, key, value = pieces
        return query, key, value

    def merge(self, x: TensorView) -> TensorView:
        """[b, h, s, e / h] -> [s * b, e]"""
        rows = self.fd.ops.permute(x, [2, 0, 1, 3])
        return self.fd.ops.reshape(rows, [self.sizes.tokens, self.sizes.features])

    def forward(self, x: TensorView) -> list[TensorView]:
        """y, and what the backward needs: see define_backward."""
        s, ops, w = self.sizes, self.fd.ops, self.weights
        joined = ops.linear(self.norm(x, "norm1"), w["qkv"])
        joined = ops.reshape(joined, [s.sequence, s.batch, 3, s.heads, s.head])
        query, key, value = self.heads(joined)
        attended, logsumexp, seed, offset = ops.sdpfa_fwd(query, key, value, is_causal=True)
        projected = ops.linear(self.merge(attended), w["out"])
        place(self.mesh, projected, 0)
        middle = self.narrow(projected + x)
        up = ops.linear(self.norm(middle, "norm2"), w["up"])
        down = ops.linear(self.narrow(ops.gelu(up)), w["down"])
        place(self.mesh, down, 0)
        y = self.narrow(down + middle)
        return [y, middle, joined, attended, logsumexp, seed, offset, up]

    # Backward. `found` gets the gradients of the weights.

    def mlp_backward(
        self, grad: TensorView, x: TensorView, up: TensorView, found: dict[str, TensorView]
    ) -> TensorView:
        ops, w = self.fd.ops, self.weights
        found["down"] = self.weight_gradient(grad, self.narrow(ops.gelu(up)))
        wide = ops.cast(up, DataType.Float)
        slope = 0.5 + 0.5 * ops.erf(wide * math.sqrt(0.5))
        slope = slope + wide * ops.exp(wide * wide * -0.5) / math.sqrt(2 * math.pi)
        inner = self.narrow(ops.matmul(grad, w["down"]) * slope)
        found["up"] = self.weight_gradient(inner, self.norm(x, "norm2"))
        back = ops.matmul(inner, w["up"])
        place(self.mesh, back, 0)
        return self.narrow(grad + self.norm_backward(back, x, "norm2", found))

    def attention_backward(
        self, grad: TensorView, x: TensorView, saved: list[TensorView], found: dict[str, TensorView]
    ) -> TensorView:
        joined, attended, logsumexp, seed, offset = saved
        s, ops, w = self.sizes, self.fd.ops, self.weights
        found["out"] = self.weight_gradient(grad, self.merge(attended))
        split = ops.matmul(grad, w["out"])
        split = ops.reshape(split, [s.sequence, s.batch, s.heads, s.head])
        incoming = ops.permute(split, [1, 2, 0, 3])
        query, key, value = self.heads(joined)
        forward = (query, key, value, attended, logsumexp)
        back = ops.sdpfa_bwd(incoming, *forward, 0.0, True, seed, offset, None)
        new_axis = [False, False, True, False, False]
        pieces = [ops.broadcast(ops.permute(g, [2, 0, 1, 3]), new_axis) for g in back]
        inner = ops.reshape(ops.cat(pieces, 2), [s.tokens, 3 * s.features])
        found["qkv"] = self.weight_gradient(inner, self.norm(x, "norm1"))
        projected = ops.matmul(inner, w["qkv"])
        place(self.mesh, projected, 0)
        return self.narrow(grad + self.norm_backward(projected, x, "norm1", found))

    def weight_gradient(self, grad: TensorView, x: TensorView) -> TensorView:
        """Of a linear of x whose result has the gradient `grad`."""
        return self.fd.ops.matmul(self.fd.ops.permute(grad, [1, 0]), x)

    def norm_backward(
        self, grad: TensorView, x: TensorView, name: str, found: dict[str, TensorView]
    ) -> TensorView:
        ops = self.fd.ops
        normal, scale = self.normal(x)
        wide = ops.cast(grad, DataType.Float)
        found[f"{name}.weight"] = self.narrow(ops.sum(wide * normal, [0]))
        found[f"{name}.bias"] = self.narrow(ops.sum(wide, [0]))
        scaled = wide * self.weights[f"{name}.weight"]
        along = ops.mean(scaled * normal, [1], keepdim=True)
        return (scaled - ops.mean(scaled, [1], keepdim=True) - normal * along) * scale


def define_forward(sizes: Sizes) -> FusionDefinition:
    """Inputs: the weights, x. Outputs: y, then what is saved."""
    with FusionDefinition() as fd:
        block = Block.define(fd, sizes)
        for output in block.forward(block.tokens()):
            fd.add_output(output)
    return fd


def define_backward(sizes: Sizes) -> FusionDefinition:
    """Inputs: the weights, x, what the forward returns behind y, the gradient of y.

    Outputs: the gradients of x and of the weights.
    """
    b, s, h, c = sizes.batch, sizes.sequence, sizes.heads, sizes.head
    with FusionDefinition() as fd:
        block = Block.define(fd, sizes)
        x, middle = block.tokens(), block.tokens()
        joined = block.input(s, b, 3, h, c)
        attended = block.input(b, h, s, c, dense=False)  # its order in memory is attention's choice
        logsumexp = fd.define_tensor([b, h, s])
        seed = fd.define_tensor([2], dtype=DataType.Int, contiguity=True)
        offset = fd.define_tensor([], dtype=DataType.Int)
        up = block.input(sizes.tokens, 4 * sizes.features)
        placed = ((joined, 3), (attended, 1), (logsumexp, 1), (seed, None), (offset, None), (up, 1))
        for tensor, axis in placed:
            place(block.mesh, tensor, axis)
        grad = block.tokens()
        found: dict[str, TensorView] = {}
        between = block.mlp_backward(grad, middle, up, found)
        saved = [joined, attended, logsumexp, seed, offset]
        grad_x = block.attention_backward(between, x, saved, found)
        place(block.mesh, grad_x, 0)
        for output in (grad_x, *(found[name] for name in sizes.weights)):
            fd.add_output(output)
    return fd
