"""How long compiling takes besides g++: milliseconds for programs of 5 to 320 operations.

    python benchmarks/compile_time.py

`first` is in a fresh process, when nothing has been simplified before; `again` is the smallest of
later compilations of the same program. g++ is measured by itself, a kernel after the other, and
torch.compile (all of it, g++ and torch's caches off) on request with --torch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from meshfuse import FusionDefinition, ParallelType
from meshfuse.ir.parser import parse_program
from meshfuse.ir.program import Program
from meshfuse.multidevice import DeviceMesh
from meshfuse.pipeline import compile
from meshfuse.runtime.arguments import signature_of
from meshfuse.runtime.compile import KernelCompiler

GOAL_MILLISECONDS = 300.0
"""For 20 operations."""
AGAIN = 5


@dataclass(frozen=True)
class Subject:
    title: str
    program: Program
    inputs: Sequence[torch.Tensor]


def pointwise(count: int) -> Subject:
    """A chain of `count` operations, one kernel."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = x
        for place in range(count):
            y = fd.ops.tanh(y) if place % 2 else fd.ops.mul(y, 1.5)
        fd.add_output(y)
    return _subject(f"pointwise, {count} ops", fd, [torch.randn(8, 16)])


def norm() -> Subject:
    """A layer norm, a gelu and a softmax-like division: 19 operations, two kernels."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        w = fd.define_tensor([-1], contiguity=True)
        mean = fd.ops.div(fd.ops.sum(x, [1], keepdim=True), 16.0)
        centred = fd.ops.sub(x, mean)
        squares = fd.ops.sum(fd.ops.mul(centred, centred), [1], keepdim=True)
        scale = fd.ops.rsqrt(fd.ops.add(fd.ops.div(squares, 16.0), 1e-5))
        y = fd.ops.gelu(fd.ops.mul(fd.ops.mul(centred, scale), w))
        z = fd.ops.add(fd.ops.div(y, fd.ops.sum(y, [1], keepdim=True)), x)
        fd.add_output(z)
        fd.add_output(fd.ops.sum(z, [0]))
    return _subject("norms, 19 ops", fd, [torch.randn(8, 16), torch.randn(16)])


def parallel_mlps(layers: int, ranks: int = 2) -> Subject:
    """Tensor-parallel MLPs of five operations each: four kernels and an all-reduce a layer."""
    mesh = DeviceMesh(range(ranks))
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, -1, 64], contiguity=True)
        y, weights = x, []
        for _ in range(layers):
            up = fd.define_tensor([128, 64], contiguity=True)
            down = fd.define_tensor([64, 128], contiguity=True)
            weights.append((up, down))
            hidden = fd.ops.gelu(fd.ops.linear(y, up))
            y = fd.ops.mul(fd.ops.add(fd.ops.linear(hidden, down), y), 0.5)
        fd.add_output(y)
        for tensor in (x, y, *(tensor for pair in weights for tensor in pair)):
            tensor.set_device_mesh(mesh)
        for pair in weights:
            for axis, weight in enumerate(pair):
                weight.outer_split(axis, ranks)
                weight.axis(axis).parallelize(ParallelType.mesh_x)
    shards = [shape for _ in weights for shape in ((128 // ranks, 64), (64, 128 // ranks))]
    inputs = [torch.randn(2, 6, 64), *(torch.randn(shape) for shape in shards)]
    return _subject(f"sharded MLPs, {5 * layers} ops", fd, inputs)


def _subject(title: str, fd: FusionDefinition, inputs: Sequence[torch.Tensor]) -> Subject:
    return Subject(title, parse_program(repr(fd.fusion)), inputs)


def measure(subject: Subject) -> None:
    signature = signature_of(subject.inputs)
    first = _milliseconds(lambda: compile(subject.program, signature))
    again = min(_milliseconds(lambda: compile(subject.program, signature)) for _ in range(AGAIN))
    sources = compile(subject.program, signature).sources
    compiler = KernelCompiler()
    built = _milliseconds(lambda: [compiler.compile_source(s) for s in sources.values()])
    print(
        f"{subject.title}: first {first:.1f}, again {again:.1f} ms "
        f"(goal: {GOAL_MILLISECONDS:.0f} for 20 ops); g++ {built:.0f} ms, {len(sources)} kernels"
    )


def measure_torch() -> None:
    """torch.compile of the pointwise chain of 20, from nothing to its first result."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for place in range(20):
            x = x.tanh() if place % 2 else x * 1.5
        return x

    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # read when torch.compile is first used
    compiled = torch.compile(chain)
    taken = _milliseconds(lambda: compiled(torch.randn(8, 16)))
    print(f"torch.compile, pointwise, 20 ops: {taken:.0f} ms, g++ included")


def _milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description="How long compiling takes besides g++.")
    parser.add_argument("--torch", action="store_true", help="measure torch.compile, too")
    with_torch = parser.parse_args().torch
    for subject in (pointwise(20), norm(), parallel_mlps(4), pointwise(320), parallel_mlps(16)):
        measure(subject)
    if with_torch:
        measure_torch()


if __name__ == "__main__":
    main()
