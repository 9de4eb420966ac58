"""The six-layer MiniLM sentence encoder, tensor-parallel on two CPU processes, and checked.

Each process holds half of the vocabulary, of the attention heads and of the inner features of each
MLP. One program has the whole encoder, from token numbers to unit vectors; only weights say how
they are split. An all-reduce follows the embedding, each attention and each MLP.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from gloo_processes import all_errors, run_processes
from minilm_layer import encode
from minilm_package import (
    EPSILON,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    MAX_TOKENS,
    VOCABULARY,
    load_tokenizer,
    load_weights,
    missing_package,
)

import meshfuse as mf
from meshfuse import DataType, FusionDefinition, TensorView
from meshfuse.multidevice import DeviceMesh

RANKS = 2
PAGE = Path(__file__).with_name("page.txt")
DEADLINE = timedelta(seconds=300)
TOLERANCE = 1e-5


class Split(NamedTuple):
    """A weight's shape, and the axis that is split over the processes (None: all hold it)."""

    shape: tuple[int, ...]
    axis: int | None = None


# How a layer splits: whole heads and inner features, so that each half of a layer has one sum over
# the processes.
LAYER_WEIGHTS = {
    **{f"attention.self.{name}.weight": Split((HIDDEN, HIDDEN), 0) for name in ("query", "key")},
    "attention.self.value.weight": Split((HIDDEN, HIDDEN), 0),
    **{f"attention.self.{name}.bias": Split((HIDDEN,), 0) for name in ("query", "key", "value")},
    "attention.output.dense.weight": Split((HIDDEN, HIDDEN), 1),
    "attention.output.dense.bias": Split((HIDDEN,)),
    "attention.output.LayerNorm.weight": Split((HIDDEN,)),
    "attention.output.LayerNorm.bias": Split((HIDDEN,)),
    "intermediate.dense.weight": Split((INNER, HIDDEN), 0),
    "intermediate.dense.bias": Split((INNER,), 0),
    "output.dense.weight": Split((HIDDEN, INNER), 1),
    "output.dense.bias": Split((HIDDEN,)),
    "output.LayerNorm.weight": Split((HIDDEN,)),
    "output.LayerNorm.bias": Split((HIDDEN,)),
}
WEIGHTS = {
    "embeddings.word_embeddings.weight": Split((VOCABULARY, HIDDEN), 0),
    "embeddings.position_embeddings.weight": Split((MAX_TOKENS, HIDDEN)),
    "embeddings.token_type_embeddings.weight": Split((2, HIDDEN)),
    "embeddings.LayerNorm.weight": Split((HIDDEN,)),
    "embeddings.LayerNorm.bias": Split((HIDDEN,)),
    **{
        f"encoder.layer.{layer}.{name}": split
        for layer in range(LAYERS)
        for name, split in LAYER_WEIGHTS.items()
    },
}


@dataclass(frozen=True)
class Encoder:
    """The program of the encoder for `sentences` sentences of `length` tokens."""

    fd: FusionDefinition
    sentences: int
    length: int
    weights: dict[str, TensorView] = field(default_factory=dict[str, TensorView])

    def norm(self, x: TensorView, name: str) -> TensorView:
        """Layer norm over the last axis of `x` [b, s, e]."""
        ops = self.fd.ops
        variance, mean = ops.var_mean(x, dims=[2], correction=0, keepdim=True)
        normal = (x - mean) * ops.rsqrt(variance + EPSILON)
        return normal * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def linear(self, x: TensorView, name: str) -> TensorView:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return self.fd.ops.linear(x, weight, bias)

    def embed(self, tokens: TensorView) -> TensorView:
        ops = self.fd.ops
        shape = [self.sentences, self.length, HIDDEN]
        words = ops.embedding_fwd(tokens, self.weights["embeddings.word_embeddings.weight"])
        positions = self.weights["embeddings.position_embeddings.weight"]
        types = self.weights["embeddings.token_type_embeddings.weight"]
        positions = ops.slice(positions, [0, 0], [self.length, HIDDEN])
        first_type = ops.squeeze(ops.slice(types, [0, 0], [1, HIDDEN]), [0])
        embedded = (
            words
            + ops.broadcast_in_dim(positions, shape, [1, 2])
            + ops.broadcast_in_dim(first_type, shape, [2])
        )
        return self.norm(embedded, "embeddings.LayerNorm")

    def attend(self, x: TensorView, keep: TensorView, prefix: str) -> TensorView:
        """Self-attention with its residual and norm."""
        ops = self.fd.ops
        heads_shape = [self.sentences, self.length, HEADS, HIDDEN // HEADS]

        def heads(name: str) -> TensorView:
            projected = self.linear(x, f"{prefix}.self.{name}")
            return ops.permute(ops.reshape(projected, heads_shape), [0, 2, 1, 3])

        attended = ops.sdpfa_fwd(heads("query"), heads("key"), heads("value"), mask=keep)[0]
        merged = ops.reshape(
            ops.permute(attended, [0, 2, 1, 3]), [self.sentences, self.length, HIDDEN]
        )
        return self.norm(
            self.linear(merged, f"{prefix}.output.dense") + x, f"{prefix}.output.LayerNorm"
        )

    def mlp(self, x: TensorView, prefix: str) -> TensorView:
        inner = self.fd.ops.gelu(self.linear(x, f"{prefix}.intermediate.dense"))
        return self.norm(
            self.linear(inner, f"{prefix}.output.dense") + x, f"{prefix}.output.LayerNorm"
        )

    def pool(self, hidden: TensorView, keep: TensorView) -> TensorView:
        """The mean over kept tokens, scaled to length 1."""
        ops = self.fd.ops
        kept = ops.cast(keep, DataType.Float)
        sums = ops.sum(hidden * ops.broadcast(kept, [False, False, True]), [1])
        means = sums / ops.broadcast(ops.sum(kept, [1]), [False, True])
        norm = ops.sqrt(ops.sum(means * means, [1], keepdim=True))
        return means / ops.maximum(norm, EPSILON)


def define_encoder(mesh: DeviceMesh, sentences: int, length: int) -> FusionDefinition:
    """Inputs: tokens [b, s], keep [b, s] (false past a sentence's end), then WEIGHTS."""
    with FusionDefinition() as fd:
        model = Encoder(fd, sentences, length)
        tokens = fd.define_tensor([sentences, length], dtype=DataType.Int, contiguity=True)
        keep = fd.define_tensor([sentences, length], dtype=DataType.Bool, contiguity=True)
        for name, split in WEIGHTS.items():
            model.weights[name] = weight = fd.define_tensor(list(split.shape), contiguity=True)
            weight.set_device_mesh(mesh)
            if split.axis is not None:
                weight.outer_split(split.axis, mesh.size)
                weight.axis(split.axis).parallelize(mf.ParallelType.mesh_x)

        keys = fd.ops.broadcast_in_dim(keep, [sentences, HEADS, length, length], [0, 3])
        hidden = model.embed(tokens)
        for layer in range(LAYERS):
            hidden = model.attend(hidden, keys, f"encoder.layer.{layer}.attention")
            hidden = model.mlp(hidden, f"encoder.layer.{layer}")
        fd.add_output(model.pool(hidden, keep))
    return fd


def load_sentences() -> tuple[torch.Tensor, torch.Tensor]:
    """The page's sentences as tokens `[b, s]`, padded with 0, and where they are none."""
    tokenizer = load_tokenizer()
    text = " ".join(PAGE.read_text().split())
    sentences = [s for s in re.split(r"(?<=[.?!])\s+", text) if s]
    ids = [torch.tensor(tokenizer.encode(sentence).ids) for sentence in sentences]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    lengths = torch.tensor([len(i) for i in ids])
    return tokens, torch.arange(tokens.shape[1]) < lengths[:, None]


def run_rank(rank: int) -> None:
    """One process: take this rank's shards of the weights, encode, compare with torch."""
    weights, (tokens, keep) = load_weights(), load_sentences()
    fd = define_encoder(DeviceMesh(range(RANKS)), *tokens.shape)
    views = [view for view in fd.fusion.inputs() if isinstance(view, TensorView)]
    shards = [
        mf.multidevice.shard_tensor(weights[name].contiguous(), view)
        for name, view in zip(WEIGHTS, views[2:], strict=True)
    ]
    start = time.perf_counter()
    fd.execute([tokens, keep, *shards])
    compiled = time.perf_counter()
    [vectors] = fd.execute([tokens, keep, *shards])
    seconds = time.perf_counter() - compiled
    expected = encode(weights, tokens, keep)
    errors = all_errors((vectors - expected).abs().max().item(), RANKS)
    if rank == 0:
        _report(fd, len(tokens), errors, compiled - start, seconds)
    if not all(error <= TOLERANCE for error in errors):  # written so that NaN fails
        raise SystemExit(1)


def _report(
    fd: FusionDefinition, sentences: int, errors: list[float], first: float, again: float
) -> None:
    kinds = Counter(re.findall(r"communicate\((\w+)", fd.explain()))
    posted = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    print(
        f"first call {first:.1f} s (compiles), second {again * 1e3:.0f} ms; collectives: {posted}"
    )
    for rank, error in enumerate(errors):
        print(f"rank {rank}: largest error {error:.1e}")
    verdict = "agree" if all(error <= TOLERANCE for error in errors) else "DO NOT AGREE"
    print(
        f"checked: {RANKS} gloo processes {verdict} with one-device torch within {TOLERANCE:.0e} "
        f"on the embeddings of {sentences} sentences of {PAGE.name} by MiniLM (all-MiniLM-L6-v2)"
    )


if __name__ == "__main__":
    missing = missing_package()
    if missing is not None:
        sys.exit(f"the model cannot be read: {missing} is not installed; run `make example-minilm`")
    run_processes(run_rank, RANKS, DEADLINE)
