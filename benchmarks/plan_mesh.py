"""How long planning takes for a mesh of a thousand devices that is not there, and how much memory.

    python benchmarks/plan_mesh.py --layers 12 24 48 96

A stack of transformer blocks: tokens split over both mesh axes between the blocks (data and
sequence parallel), heads and inner features over the second (tensor parallel). Each stack is
planned in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from dataclasses import dataclass

import torch

from meshfuse import DataType, FusionDefinition, TensorView
from meshfuse.multidevice import DeviceMesh, plan

GOAL_SECONDS = 20.0
GOAL_BYTES = 2 << 30
"""For 96 layers on 1024 devices."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one model and of the mesh: `batch` sequences of `sequence` tokens."""

    layers: int
    batch: int
    sequence: int
    hidden: int
    heads: int
    data_ranks: int
    tensor_ranks: int


class Blocks:
    """Writes the blocks of one model into a definition, one call a block."""

    def __init__(self, fd: FusionDefinition, shape: Shape) -> None:
        self.fd, self.shape = fd, shape
        ranks = torch.arange(shape.data_ranks * shape.tensor_ranks)
        grid = ranks.reshape(shape.data_ranks, shape.tensor_ranks)
        self.mesh = DeviceMesh(grid, names=("dp", "tp"))

    def place(self, tensor: TensorView, dp: int | None = None, tp: int | None = None) -> TensorView:
        """Put a tensor on the mesh, with these tensor axes in blocks over its two axes."""
        tensor.set_device_mesh(self.mesh)
        shards = [(axis, name) for axis, name in ((dp, "dp"), (tp, "tp")) if axis is not None]
        for axis, name in sorted(shards, reverse=True):
            ranks = self.shape.data_ranks if name == "dp" else self.shape.tensor_ranks
            tensor.outer_split(axis, ranks)
            tensor.axis(axis).parallelize(self.mesh.axis(name))
        return tensor

    def weight(self, *sizes: int, tp: int | None = None) -> TensorView:
        tensor = self.fd.define_tensor(list(sizes), contiguity=True, dtype=DataType.BFloat16)
        return self.place(tensor, tp=tp)

    def tokens(self) -> TensorView:
        """[batch, sequence, hidden], split on batch and sequence."""
        s = self.shape
        sizes = [s.batch, s.sequence, s.hidden]
        tensor = self.fd.define_tensor(sizes, contiguity=True, dtype=DataType.BFloat16)
        return self.place(tensor, dp=0, tp=1)

    def norm(self, x: TensorView) -> TensorView:
        """Layer norm over the features, in float32."""
        ops, hidden = self.fd.ops, self.shape.hidden
        scale, shift = self.weight(hidden), self.weight(hidden)
        wide = ops.cast(x, DataType.Float)
        variance, mean = ops.var_mean(wide, dims=[2], correction=0, keepdim=True)
        normal = (wide - mean) * ops.rsqrt(variance + 1e-5)
        return ops.cast(normal * scale + shift, DataType.BFloat16)

    def attention(self, x: TensorView) -> TensorView:
        """Queries, keys and values of the heads, causal attention, and the projection back."""
        ops, s = self.fd.ops, self.shape
        size = s.hidden // s.heads
        parts = []
        for _ in range(3):
            part = ops.linear(x, self.weight(s.hidden, s.hidden, tp=0))
            heads = ops.reshape(part, [s.batch, s.sequence, s.heads, size])
            parts.append(ops.permute(heads, [0, 2, 1, 3]))
        mixed = ops.sdpfa_fwd(*parts, is_causal=True)[0]
        rows = ops.reshape(ops.permute(mixed, [0, 2, 1, 3]), [s.batch, s.sequence, s.hidden])
        return self.place(ops.linear(rows, self.weight(s.hidden, s.hidden, tp=1)), dp=0, tp=1)

    def mlp(self, x: TensorView) -> TensorView:
        ops, hidden = self.fd.ops, self.shape.hidden
        inner = ops.linear(x, self.weight(4 * hidden, hidden, tp=0))
        inner = ops.cast(ops.gelu(inner), DataType.BFloat16)
        return self.place(ops.linear(inner, self.weight(hidden, 4 * hidden, tp=1)), dp=0, tp=1)

    def block(self, x: TensorView) -> TensorView:
        x = self.add(x, self.attention(self.norm(x)))
        return self.add(x, self.mlp(self.norm(x)))

    def add(self, x: TensorView, y: TensorView) -> TensorView:
        return self.fd.ops.cast(x + y, DataType.BFloat16)


def define(shape: Shape) -> FusionDefinition:
    with FusionDefinition() as fd:
        blocks = Blocks(fd, shape)
        x = blocks.tokens()
        for _ in range(shape.layers):
            x = blocks.block(x)
        fd.add_output(x)
    return fd


def measure(shape: Shape) -> None:
    """Define and plan once, from nothing, and print what it took."""
    start, busy = time.perf_counter(), time.process_time()
    fd = define(shape)
    defined = time.perf_counter()
    found = plan(fd, link_classes={"tp": "nvlink", "dp": "network"}, bandwidths={"nvlink": 450.0})
    done, busy = time.perf_counter(), time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{shape.layers} layers on {found.ranks} devices: defined in {defined - start:.2f} s, "
        f"planned in {done - defined:.2f} s ({busy:.2f} s of CPU in all; goal: "
        f"{GOAL_SECONDS:.0f} s for 96 layers), {peak / 2**20:.0f} MiB "
        f"(goal: {GOAL_BYTES / 2**20:.0f})"
    )
    print(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="How long planning for a large mesh takes.")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--dp", type=int, default=128, help="data-parallel ranks")
    parser.add_argument("--tp", type=int, default=8, help="tensor-parallel ranks")
    given = parser.parse_args()
    for layers in given.layers:
        shape = Shape(layers, 2 * given.dp, 4096, 12288, 96, given.dp, given.tp)
        worker = multiprocessing.get_context("spawn").Process(target=measure, args=(shape,))
        worker.start()
        worker.join()
        if worker.exitcode:
            raise SystemExit(worker.exitcode)


if __name__ == "__main__":
    main()
