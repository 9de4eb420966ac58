"""Attention by hand, in float64, and what programs of sdpfa_fwd and sdpfa_bwd are checked with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from meshfuse import DataType, FusionDefinition, TensorView

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
DATA_TYPES = {
    F32: DataType.Float,
    F64: DataType.Double,
    F16: DataType.Half,
    BF16: DataType.BFloat16,
}
# S0.9 asks for the second pair of bfloat16; gradients are sums over queries.
TOLERANCES = {F32: (1e-5, 1e-5), F64: (1e-6, 1e-7), F16: (2e-3, 4e-3), BF16: (1.6e-2, 2e-2)}


def random_tensors(
    count: int, shape: Sequence[int], dtype: torch.dtype = F32, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def reference(
    operands: Sequence[torch.Tensor],
    causal: bool = False,
    scale: float | None = None,
    added: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp, in float64, of query, key and value.

    `added` is -inf where nothing may be seen.
    """
    query, key, value = operands
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query.double() @ key.double().mT * scale
    if added is not None:
        scores = scores + added.double()
    if causal:
        hidden = ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ value.double(), scores.logsumexp(-1)


def define_three(
    fd: FusionDefinition, shape: Sequence[int], **keywords: Any
) -> tuple[TensorView, TensorView, TensorView]:
    """Query, key and value of one shape."""
    query, key, value = (fd.define_tensor(shape, **keywords) for _ in range(3))
    return query, key, value


def gradients(
    grad: torch.Tensor, inputs: Sequence[torch.Tensor], **arguments: Any
) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    out, _ = reference(leaves, **arguments)
    return torch.autograd.grad(out, leaves, grad.double())


def check(found: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(found, want.to(found.dtype), rtol=rtol, atol=atol)


def bshe(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the heads inside the sequence in memory."""
    return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
