"""How long the host takes for a call that was compiled before: microseconds, on tiny inputs.

    python benchmarks/host_latency.py

Ours and torch's are measured in turns, so that what else the machine does slows them alike; each
number is the smallest of many calls. torch.compile is left out with --no-compile (it takes a
minute to import and compile).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from meshfuse import FusionDefinition, ParallelType
from meshfuse.multidevice import DeviceMesh

GOAL_MICROSECONDS = 40.0
ELEMENTS = 64
ROUNDS = 20
CALLS = 500


def one_kernel() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.add(fd.ops.tanh(x), 1.0))
    return fd


def one_kernel_on_a_mesh() -> FusionDefinition:
    """As `one_kernel`, on shards: what a DistributedTensor costs."""
    mesh = DeviceMesh([0])
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        y = fd.ops.add(fd.ops.tanh(x), 1.0)
        fd.add_output(y)
        for tensor in (x, y):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(0, 1)
            tensor.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def kernels_and_a_linear() -> FusionDefinition:
    """Three segments: a kernel, torch's linear, a kernel."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        w = fd.define_tensor([8, 8], contiguity=True)
        fd.add_output(fd.ops.relu(fd.ops.linear(fd.ops.tanh(x), w)))
    return fd


def tanh_plus_one(x: torch.Tensor) -> torch.Tensor:
    return x.tanh() + 1.0


def tanh_linear_relu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x.tanh(), w).relu()


def smallest_times(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The smallest time of each call, in microseconds; they take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            for _ in range(CALLS):
                start = time.perf_counter_ns()
                call()
                best[name] = min(best[name], (time.perf_counter_ns() - start) / 1000)
    return best


def compare(
    title: str,
    fd: FusionDefinition,
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    with_compile: bool,
) -> None:
    calls: dict[str, Callable[[], object]] = {
        "meshfuse": lambda: fd.execute(inputs),
        "torch eager": lambda: function(*inputs),
    }
    if with_compile:
        compiled = torch.compile(function)
        calls["torch.compile"] = lambda: compiled(*inputs)
    with torch.no_grad():
        for call in calls.values():
            call()
        times = smallest_times(calls)
    shown = ", ".join(f"{name} {best:.1f}" for name, best in times.items())
    print(f"{title}: {shown} us (goal: {GOAL_MICROSECONDS:.0f})")


def main() -> None:
    parser = argparse.ArgumentParser(description="How long the host takes for a hot call.")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    with_compile = not parser.parse_args().no_compile
    vector = [torch.randn(ELEMENTS)]
    matrices = [torch.randn(8, 8), torch.randn(8, 8)]
    compare("one kernel", one_kernel(), tanh_plus_one, vector, with_compile)
    compare("on a mesh of one", one_kernel_on_a_mesh(), tanh_plus_one, vector, with_compile)
    compare("with a linear", kernels_and_a_linear(), tanh_linear_relu, matrices, with_compile)


if __name__ == "__main__":
    main()
