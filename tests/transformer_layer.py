"""A transformer layer as GPT-3 has it: pre-norm, causal attention, MLP. Forward and backward.

Weights say which way it is cut: q, k and v in one weight, its heads over the ranks, and so the
inner features of the MLP. With `sequence_parallel` what is between lies in blocks of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from meshfuse import DataType, FusionDefinition, TensorView
from meshfuse.multidevice import DeviceMesh
from sharded_runs import X, place, place_strided

EPSILON = 1e-5


@dataclass(frozen=True)
class Sizes:
    batch: int
    tokens: int
    heads: int
    features: int

    @property
    def head(self) -> int:
        return self.features // self.heads

    def weights(self) -> dict[str, tuple[int, ...]]:
        e = self.features
        return {
            "norm1.weight": (e,),
            "norm1.bias": (e,),
            "qkv.weight": (3 * e, e),
            "qkv.bias": (3 * e,),
            "out.weight": (e, e),
            "out.bias": (e,),
            "norm2.weight": (e,),
            "norm2.bias": (e,),
            "up.weight": (4 * e, e),
            "up.bias": (4 * e,),
            "down.weight": (e, 4 * e),
            "down.bias": (e,),
        }


class Saved(NamedTuple):
    """What the backward takes from the forward; `middle` is the input of the MLP half."""

    middle: TensorView
    attended: TensorView
    logsumexp: TensorView
    seed: TensorView
    offset: TensorView


@dataclass(frozen=True)
class Layer:
    """One program, with its weights by name."""

    fd: FusionDefinition
    sizes: Sizes
    mesh: DeviceMesh
    weights: dict[str, TensorView]
    sequence_parallel: bool

    @staticmethod
    def define(
        fd: FusionDefinition, sizes: Sizes, mesh: DeviceMesh, sequence_parallel: bool
    ) -> Layer:
        weights = {
            name: fd.define_tensor(list(shape), contiguity=True)
            for name, shape in sizes.weights().items()
        }
        layer = Layer(fd, sizes, mesh, weights, sequence_parallel)
        for name, weight in weights.items():
            layer.place_weight(name, weight)
        return layer

    def place_weight(self, name: str, weight: TensorView) -> None:
        if name in ("qkv.weight", "qkv.bias"):
            place_strided(self.mesh, 3, X, weight)
        elif name in ("up.weight", "up.bias"):
            place(self.mesh, {0: X}, weight)
        else:
            place(self.mesh, {1: X} if name in ("out.weight", "down.weight") else {}, weight)

    def tokens(self) -> TensorView:
        """An input [b, s, e]."""
        b, s, e = self.sizes.batch, self.sizes.tokens, self.sizes.features
        x = self.fd.define_tensor([b, s, e], contiguity=True)
        self.place_tokens(x)
        return x

    def place_tokens(self, x: TensorView) -> None:
        place(self.mesh, {1: X} if self.sequence_parallel else {}, x)

    # Forward.

    def normal(self, x: TensorView) -> tuple[TensorView, TensorView]:
        """`x` at mean 0 and variance 1, and one over its standard deviation."""
        variance, mean = self.fd.ops.var_mean(x, [2], correction=0, keepdim=True)
        scale = self.fd.ops.rsqrt(variance + EPSILON)
        return (x - mean) * scale, scale

    def norm(self, x: TensorView, name: str) -> TensorView:
        return self.normal(x)[0] * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def heads(self, x: TensorView) -> tuple[TensorView, TensorView, TensorView]:
        """q, k and v [b, h, s, e / h] of the normalized x."""
        b, s, h = self.sizes.batch, self.sizes.tokens, self.sizes.heads
        ops = self.fd.ops
        joined = ops.linear(x, self.weights["qkv.weight"], self.weights["qkv.bias"])
        joined = ops.reshape(joined, [b, s, 3, h, self.sizes.head])

        def piece(k: int) -> TensorView:
            cut = ops.slice(joined, [0, 0, k, 0, 0], [b, s, k + 1, h, self.sizes.head])
            return ops.permute(ops.squeeze(cut, [2]), [0, 2, 1, 3])

        return piece(0), piece(1), piece(2)

    def merge(self, x: TensorView) -> TensorView:
        """[b, h, s, e / h] -> [b, s, e]"""
        shape = [self.sizes.batch, self.sizes.tokens, self.sizes.features]
        return self.fd.ops.reshape(self.fd.ops.permute(x, [0, 2, 1, 3]), shape)

    def forward(self, x: TensorView) -> tuple[TensorView, Saved]:
        ops, w = self.fd.ops, self.weights
        made = ops.sdpfa_fwd(*self.heads(self.norm(x, "norm1")), is_causal=True)
        projected = ops.linear(self.merge(made[0]), w["out.weight"], w["out.bias"])
        self.place_tokens(projected)
        middle = projected + x
        inner = ops.gelu(ops.linear(self.norm(middle, "norm2"), w["up.weight"], w["up.bias"]))
        down = ops.linear(inner, w["down.weight"], w["down.bias"])
        self.place_tokens(down)
        return down + middle, Saved(middle, *made)

    # Backward.

    def backward(
        self, grad: TensorView, x: TensorView, saved: Saved
    ) -> tuple[TensorView, dict[str, TensorView]]:
        """The gradients of x and of the weights."""
        found: dict[str, TensorView] = {}
        middle = self.mlp_backward(grad, saved.middle, found)
        return self.attention_backward(middle, x, saved, found), found

    def mlp_backward(
        self, grad: TensorView, x: TensorView, found: dict[str, TensorView]
    ) -> TensorView:
        ops, w = self.fd.ops, self.weights
        normal = self.norm(x, "norm2")
        up = ops.linear(normal, w["up.weight"], w["up.bias"])
        self.weight_gradients(grad, ops.gelu(up), "down", found)
        slope = 0.5 + 0.5 * ops.erf(up * math.sqrt(0.5))
        slope = slope + up * ops.exp(up * up * -0.5) / math.sqrt(2 * math.pi)
        inner = ops.matmul(grad, w["down.weight"]) * slope
        self.weight_gradients(inner, normal, "up", found)
        back = ops.matmul(inner, w["up.weight"])
        self.place_tokens(back)
        return grad + self.norm_backward(back, x, "norm2", found)

    def attention_backward(
        self, grad: TensorView, x: TensorView, saved: Saved, found: dict[str, TensorView]
    ) -> TensorView:
        ops, w = self.fd.ops, self.weights
        b, s, h = self.sizes.batch, self.sizes.tokens, self.sizes.heads
        normal = self.norm(x, "norm1")
        self.weight_gradients(grad, self.merge(saved.attended), "out", found)
        split = ops.reshape(ops.matmul(grad, w["out.weight"]), [b, s, h, self.sizes.head])
        attended = ops.permute(split, [0, 2, 1, 3])
        query, key, value = self.heads(normal)
        back = ops.sdpfa_bwd(
            attended,
            query,
            key,
            value,
            saved.attended,
            saved.logsumexp,
            0.0,
            True,
            saved.seed,
            saved.offset,
            None,
        )
        new_axis = [False, False, True, False, False]
        pieces = [ops.broadcast(ops.permute(g, [0, 2, 1, 3]), new_axis) for g in back]
        joined = ops.reshape(ops.cat(pieces, 2), [b, s, 3 * self.sizes.features])
        self.weight_gradients(joined, normal, "qkv", found)
        projected = ops.matmul(joined, w["qkv.weight"])
        self.place_tokens(projected)
        return grad + self.norm_backward(projected, x, "norm1", found)

    def weight_gradients(
        self, grad: TensorView, x: TensorView, name: str, found: dict[str, TensorView]
    ) -> None:
        """Of a linear of x whose result has the gradient `grad`."""
        ops = self.fd.ops
        rows = self.sizes.batch * self.sizes.tokens
        grad_rows = ops.reshape(grad, [rows, -1])
        found[f"{name}.weight"] = ops.matmul(
            ops.permute(grad_rows, [1, 0]), ops.reshape(x, [rows, -1])
        )
        found[f"{name}.bias"] = ops.sum(grad, [0, 1])

    def norm_backward(
        self, grad: TensorView, x: TensorView, name: str, found: dict[str, TensorView]
    ) -> TensorView:
        ops = self.fd.ops
        normal, scale = self.normal(x)
        found[f"{name}.weight"] = ops.sum(grad * normal, [0, 1])
        found[f"{name}.bias"] = ops.sum(grad, [0, 1])
        scaled = grad * self.weights[f"{name}.weight"]
        along = ops.mean(scaled * normal, [2], keepdim=True)
        return (scaled - ops.mean(scaled, [2], keepdim=True) - normal * along) * scale


def define_forward(sizes: Sizes, mesh: DeviceMesh, sequence_parallel: bool) -> FusionDefinition:
    """Inputs: the weights, x. Outputs: y, then what is saved."""
    with FusionDefinition() as fd:
        layer = Layer.define(fd, sizes, mesh, sequence_parallel)
        y, saved = layer.forward(layer.tokens())
        for output in (y, *saved):
            fd.add_output(output)
    return fd


def define_backward(sizes: Sizes, mesh: DeviceMesh, sequence_parallel: bool) -> FusionDefinition:
    """Inputs: the weights, x, what is saved, the gradient of y. Outputs: those of x and weights."""
    b, s, h = sizes.batch, sizes.tokens, sizes.heads
    with FusionDefinition() as fd:
        layer = Layer.define(fd, sizes, mesh, sequence_parallel)
        x, middle = layer.tokens(), layer.tokens()
        attended = fd.define_tensor([b, h, s, sizes.head], contiguity=True)
        logsumexp = fd.define_tensor([b, h, s], contiguity=True)
        seed = fd.define_tensor([2], dtype=DataType.Int, contiguity=True)
        offset = fd.define_tensor([], dtype=DataType.Int)
        place(mesh, {1: X}, attended, logsumexp)
        place(mesh, {}, seed, offset)
        saved = Saved(middle, attended, logsumexp, seed, offset)
        grad = layer.tokens()
        grad_x, gradients = layer.backward(grad, x, saved)
        layer.place_tokens(grad_x)
        for output in (grad_x, *(gradients[name] for name in sizes.weights())):
            fd.add_output(output)
    return fd


# By torch.


def random_weights(sizes: Sizes) -> dict[str, torch.Tensor]:
    """Of a size at which nothing grows or fades."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator)
        / math.sqrt(shape[-1] if len(shape) > 1 else 4)
        for name, shape in sizes.weights().items()
    }


class Truth(NamedTuple):
    y: torch.Tensor
    middle: torch.Tensor
    attended: torch.Tensor
    logsumexp: torch.Tensor
    gradients: list[torch.Tensor]
    """Of x, then of the weights."""


def by_torch(
    sizes: Sizes, weights: dict[str, torch.Tensor], x: torch.Tensor, grad: torch.Tensor
) -> Truth:
    """The layer in float64 on one device, and its gradients by autograd."""
    w = {name: value.double().requires_grad_() for name, value in weights.items()}
    x = x.double().requires_grad_()

    def linear(of: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(of, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(of: torch.Tensor, name: str) -> torch.Tensor:
        shape = (sizes.features,)
        return functional.layer_norm(of, shape, w[f"{name}.weight"], w[f"{name}.bias"], EPSILON)

    joined = linear(norm(x, "norm1"), "qkv")
    shape = (sizes.batch, sizes.tokens, 3, sizes.heads, sizes.head)
    query, key, value = joined.reshape(shape).permute(2, 0, 3, 1, 4)
    scores = query @ key.mT / math.sqrt(sizes.head)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -math.inf)
    attended = scores.softmax(-1) @ value
    middle = x + linear(attended.transpose(1, 2).reshape(x.shape), "out")
    y = middle + linear(functional.gelu(linear(norm(middle, "norm2"), "up")), "down")
    gradients = torch.autograd.grad(y, [x, *w.values()], grad.double())
    values = (y, middle, attended, scores.logsumexp(-1))
    rounded = [value.detach().float() for value in values]
    return Truth(rounded[0], rounded[1], rounded[2], rounded[3], [g.float() for g in gradients])
