"""The MiniLM sentence encoder in plain torch, on one device: the reference of the examples.

Post-norm: `h = attention(e) + e`, then the MLP half that the demo compiles: `x = norm1(h)`,
`y = norm2(down(gelu(up(x))) + x)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from minilm_package import (
    EPSILON,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    MAX_TOKENS,
    Weights,
    load_tokenizer,
    load_weights,
    missing_package,
)


class MlpWeights(NamedTuple):
    """Weights of the MLP half. Linear weights are `[out, in]` as torch.nn.Linear has them."""

    norm1_scale: torch.Tensor
    norm1_shift: torch.Tensor
    up: torch.Tensor
    up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor
    norm2_scale: torch.Tensor
    norm2_shift: torch.Tensor


@dataclass(frozen=True)
class LayerInput:
    """`hidden` is `[1, s, 384]`, what stands before the MLP half; `origin` names the data."""

    hidden: torch.Tensor
    weights: MlpWeights
    origin: str


def load_layer_input(page: Path, multiple: int) -> LayerInput:
    """The page, cut to a multiple of `multiple` tokens, run through embeddings and attention.

    Without the model package or its readers: made weights and a made hidden state of the same
    shapes.
    """
    missing = missing_package()
    if missing is not None:
        return _made_input(multiple, missing)
    weights = load_weights()
    tokens = load_tokenizer().encode(page.read_text()).ids[:MAX_TOKENS]
    tokens = tokens[: len(tokens) // multiple * multiple]
    origin = f"layer 0 of MiniLM (all-MiniLM-L6-v2), {len(tokens)} tokens of {page.name}"
    ids = torch.tensor([tokens])
    hidden = attend(weights, 0, embed(weights, ids), torch.ones_like(ids, dtype=torch.bool))
    return LayerInput(hidden, mlp_weights(weights, 0), origin)


def run_mlp(hidden: torch.Tensor, w: MlpWeights) -> torch.Tensor:
    """The MLP half in torch, on one device: the reference."""
    x = F.layer_norm(hidden, (HIDDEN,), w.norm1_scale, w.norm1_shift, EPSILON)
    inner = F.gelu(F.linear(x, w.up, w.up_bias))
    return F.layer_norm(
        F.linear(inner, w.down, w.down_bias) + x, (HIDDEN,), w.norm2_scale, w.norm2_shift, EPSILON
    )


def encode(weights: Weights, tokens: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Unit vectors `[b, 384]` for sentences of `tokens` `[b, s]`, those where `keep` is false left
    out."""
    hidden = embed(weights, tokens)
    for layer in range(LAYERS):
        hidden = run_mlp(attend(weights, layer, hidden, keep), mlp_weights(weights, layer))
    kept = keep[:, :, None].to(hidden.dtype)
    return F.normalize((hidden * kept).sum(1) / kept.sum(1), dim=1)


def embed(weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """`[b, s]` to `[b, s, 384]`: word, position and type embeddings, normalised."""
    embedded = (
        weights["embeddings.word_embeddings.weight"][tokens]
        + weights["embeddings.position_embeddings.weight"][: tokens.shape[1]]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    scale = weights["embeddings.LayerNorm.weight"]
    return F.layer_norm(embedded, (HIDDEN,), scale, weights["embeddings.LayerNorm.bias"], EPSILON)


def attend(weights: Weights, layer: int, hidden: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Self-attention over the kept tokens with its residual, before the norm: `[b, s, 384]`."""

    def project(name: str, value: torch.Tensor) -> torch.Tensor:
        prefix = f"encoder.layer.{layer}.attention.{name}"
        return F.linear(value, weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])

    def heads(name: str) -> torch.Tensor:
        return project(f"self.{name}", hidden).unflatten(2, (HEADS, -1)).transpose(1, 2)

    attended = F.scaled_dot_product_attention(
        heads("query"), heads("key"), heads("value"), attn_mask=keep[:, None, None, :]
    )
    return project("output.dense", attended.transpose(1, 2).flatten(2)) + hidden


def mlp_weights(weights: Weights, layer: int) -> MlpWeights:
    prefix = f"encoder.layer.{layer}."
    return MlpWeights(
        weights[prefix + "attention.output.LayerNorm.weight"],
        weights[prefix + "attention.output.LayerNorm.bias"],
        weights[prefix + "intermediate.dense.weight"],
        weights[prefix + "intermediate.dense.bias"],
        weights[prefix + "output.dense.weight"],
        weights[prefix + "output.dense.bias"],
        weights[prefix + "output.LayerNorm.weight"],
        weights[prefix + "output.LayerNorm.bias"],
    )


def _made_input(multiple: int, missing: str) -> LayerInput:
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    weights = MlpWeights(
        1 + made(HIDDEN, scale=0.1),
        made(HIDDEN, scale=0.1),
        made(INNER, HIDDEN, scale=0.05),
        made(INNER, scale=0.1),
        made(HIDDEN, INNER, scale=0.05),
        made(HIDDEN, scale=0.1),
        1 + made(HIDDEN, scale=0.1),
        made(HIDDEN, scale=0.1),
    )
    length = MAX_TOKENS // multiple * multiple
    origin = f"MADE weights and a made input of {length} tokens: {missing} is not installed"
    return LayerInput(made(1, length, HIDDEN), weights, origin)
