"""Scaled dot-product attention through torch: its flash kernels, and products where these do not
fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch

from meshfuse.base.errors import UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops_attention import Attention, SdpfaBwd, SdpfaFwd
from meshfuse.runtime.evaluate_ops import Environment, Value, evaluate
from meshfuse.runtime.evaluate_random import state_of
from meshfuse.runtime.random import RandomState, random_numbers

_ATEN: Any = torch.ops.aten

_CUDA_FEATURES = 256
"""The most that a flash kernel on CUDA takes."""


@final
@frozen_dataclass
class Scores:
    """How scores become weights, [*batch, H, L, S] all: what is added, kept, and after it scaled.

    `kept` are weights that dropout leaves, and `dropout_p` the part that it does not.
    """

    scale: float
    is_causal: bool
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    kept: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.bias is None and self.mask is None and self.kept is None


# The expressions.


@evaluate.register
def _(expr: SdpfaFwd, env: Environment) -> tuple[Value, ...]:
    query, key, value = (env.tensor(name) for name in (expr.query, expr.key, expr.value))
    bias = None if expr.bias is None else env.tensor(expr.bias)
    mask = None if expr.mask is None else env.tensor(expr.mask)
    dropout_p = _dropout(expr, env)
    state, kept = None, None
    if dropout_p and expr.rng_seed is not None and expr.rng_offset is not None:
        state = state_of(expr.rng_seed, expr.rng_offset, expr.draw, env)
        kept = _kept(expr.out, key.shape[-2], state, dropout_p, env)
    scores = Scores(_scale(expr, query, env), _causal(expr, env), bias, mask, dropout_p, kept)
    out, logsumexp = attend(query, key, value, scores)
    results = (out, logsumexp, *_as_tensors(state, query.device))
    return _own_parts(expr, results, query.dim() - 2, env)


@evaluate.register
def _(expr: SdpfaBwd, env: Environment) -> tuple[Value, ...]:
    names = (expr.grad_out, expr.query, expr.key, expr.value, expr.out, expr.logsumexp)
    grad_out, query, key, value, out, logsumexp = (env.tensor(name) for name in names)
    dropout_p = _dropout(expr, env)
    kept = None
    if dropout_p:
        seed, offset = env.tensor(expr.seed), env.tensor(expr.offset)
        state = RandomState(int(seed[0]), int(offset))
        kept = _kept(expr.grad_query, key.shape[-2], state, dropout_p, env)
    scale, is_causal = _scale(expr, query, env), _causal(expr, env)
    scores = Scores(scale, is_causal, dropout_p=dropout_p, kept=kept)
    results = attend_backward(grad_out, query, key, value, out, logsumexp, scores)
    return _own_parts(expr, results, query.dim() - 2, env)


def _as_tensors(
    state: RandomState | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Seed [2] and offset; without a state zeros, which need no copy to the device."""
    if state is None:
        whole = {"dtype": torch.int64, "device": device}
        return torch.zeros(2, **whole), torch.zeros((), **whole)
    return torch.tensor([state.seed, 0], device=device), torch.tensor(state.offset, device=device)


def _own_parts(
    expr: Attention, results: Sequence[torch.Tensor], shared: int, env: Environment
) -> tuple[torch.Tensor, ...]:
    """What the rank is to have of results whose axes behind batch and heads were computed whole.

    `shared`: the number of batch axes and heads, of which the operands had the rank's part.
    """
    own: list[torch.Tensor] = []
    for name, result in zip(expr.outs, results, strict=True):
        inner = shared if result.dim() > shared else 0
        for axis in range(inner, result.dim()):
            runs = env.held(name, axis)
            if runs is not None:
                device = result.device  # nothing is copied there: a capture would refuse that
                parts = [torch.arange(r.start, r.stop, r.step, device=device) for r in runs]
                index = torch.cat(parts) if parts else torch.arange(0, device=device)
                result = result.index_select(axis, index)
        own.append(result)
    return tuple(own)


def _causal(expr: Attention, env: Environment) -> bool:
    return bool(env.scalar(expr.is_causal))


def _scale(expr: Attention, query: torch.Tensor, env: Environment) -> float:
    if expr.scale is not None:
        return float(env.scalar(expr.scale))
    return 1.0 / math.sqrt(max(query.shape[-1], 1))


def _dropout(expr: Attention, env: Environment) -> float:
    dropout_p = float(env.scalar(expr.dropout_p))
    if not 0.0 <= dropout_p < 1.0:
        function = "sdpfa_fwd" if isinstance(expr, SdpfaFwd) else "sdpfa_bwd"
        raise UserError(f"{function} {expr.outs[0]}: dropout_p must lie in [0, 1), got {dropout_p}")
    return dropout_p


def _kept(
    out: TensorName, keys: int, state: RandomState, dropout_p: float, env: Environment
) -> torch.Tensor:
    """Which weights dropout leaves, by the numbers of their global indices.

    `out` has the batch axes, heads and queries; `keys` is how many keys there are.
    """
    *rows, _ = env.whole_sizes(out)
    held = [env.held(out, axis) for axis in range(len(rows) - 1)]
    sizes, runs = [*rows, keys], [*held, None, None]
    numbers = random_numbers("uniform", sizes, runs, state, torch.float32, env.device)
    return numbers >= dropout_p


# What they compute.


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [*batch, H, L, V] and the logsumexp of its scores [*batch, H, L], float32."""
    if not _has_flash(query, key, value, scores):
        weights, logsumexp = _weights(query, key, scores)
        return _with_dropout(weights, scores).matmul(value.to(weights.dtype)).to(
            query.dtype
        ), logsumexp.to(torch.float32)
    batch = query.shape[:-3]
    flat = [_flat(tensor, query.dim() - 4) for tensor in (query, key, value)]
    if query.is_cuda:
        found = _ATEN._scaled_dot_product_flash_attention(
            *flat, 0.0, scores.is_causal, False, scale=scores.scale
        )
    else:
        found = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            *flat, 0.0, scores.is_causal, scale=scores.scale
        )
    out, logsumexp = (part.unflatten(0, batch) for part in found[:2])
    return out, logsumexp.to(torch.float32)


def attend_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    scores: Scores,
) -> tuple[torch.Tensor, ...]:
    """The gradients of query, key and value."""
    if query.dtype == torch.float64 or not _has_flash(query, key, value, scores):
        return _products_backward(grad_out, query, key, value, scores)
    batch = query.shape[:-3]
    saved = (grad_out, query, key, value, out)
    flat = [_flat(tensor, query.dim() - 4) for tensor in saved]
    rows = logsumexp.flatten(0, query.dim() - 4).contiguous()
    if query.is_cuda:
        # Of sequences that are no pieces of one tensor; the seed is for dropout, which is none.
        lengths = (None, None, query.shape[-2], key.shape[-2])
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        offset = torch.zeros((), dtype=torch.uint64, device=query.device)
        found = _ATEN._scaled_dot_product_flash_attention_backward(
            *flat, rows, *lengths, 0.0, scores.is_causal, seed, offset, scale=scores.scale
        )
    else:
        found = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            *flat, rows, 0.0, scores.is_causal, scale=scores.scale
        )
    return tuple(part.unflatten(0, batch) for part in found)


def _flat(tensor: torch.Tensor, last_batch_axis: int) -> torch.Tensor:
    """[batch, H, L, E], with features side by side as the kernels want them."""
    flat = tensor.flatten(0, last_batch_axis)
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def _has_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> bool:
    """Whether torch has a flash kernel for this: what it has none for may end the process."""
    sizes = (*query.shape, *key.shape)
    if not scores.is_plain or query.shape[-1] != value.shape[-1] or 0 in sizes:
        return False
    if not query.is_cuda:
        return query.device.type == "cpu"
    # Those of CUDA align the ends of queries and keys where causality counts from their starts.
    is_square = query.shape[-2] == key.shape[-2] or not scores.is_causal
    features = query.shape[-1]
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and features % 8 == 0
        and features <= _CUDA_FEATURES
        and is_square
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _weights(
    query: torch.Tensor, key: torch.Tensor, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax of the scores, and their logsumexp; 0 and -inf for a row that may see nothing."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    found = query.to(wide).matmul(key.to(wide).mT) * scores.scale
    if scores.bias is not None:
        found = found + scores.bias
    if scores.is_causal:
        seen = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).tril()
        found = found.masked_fill(~seen, -math.inf)
    if scores.mask is not None:
        found = found.masked_fill(~scores.mask, -math.inf)
    logsumexp = found.logsumexp(-1, keepdim=True)
    weights = (found - logsumexp).exp().masked_fill(logsumexp == -math.inf, 0.0)
    return weights, logsumexp.squeeze(-1)


def _with_dropout(weights: torch.Tensor, scores: Scores) -> torch.Tensor:
    if scores.kept is None:
        return weights
    return weights * scores.kept / (1.0 - scores.dropout_p)


def _products_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
) -> tuple[torch.Tensor, ...]:
    weights, _ = _weights(query, key, scores)
    wide, own = weights.dtype, query.dtype
    incoming = grad_out.to(wide)
    grad_value = _with_dropout(weights, scores).mT.matmul(incoming)
    grad_weights = _with_dropout(incoming.matmul(value.to(wide).mT), scores)
    inner = (grad_weights * weights).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - inner) * scores.scale
    grad_query = grad_scores.matmul(key.to(wide))
    grad_key = grad_scores.mT.matmul(query.to(wide))
    return grad_query.to(own), grad_key.to(own), grad_value.to(own)
