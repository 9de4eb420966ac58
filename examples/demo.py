"""The MLP half of a transformer layer, sequence-parallel on two CPU processes, and checked.

Each process holds half of the tokens and half of the inner features. The program is written on
global shapes; the inputs and one product say how they are split, and meshfuse finds the rest: the
tokens are gathered before the first linear and reduce-scattered after the second one.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from gloo_processes import all_errors, run_processes
from minilm_layer import load_layer_input, run_mlp
from minilm_package import EPSILON, HIDDEN, INNER

import meshfuse as mf
from meshfuse import FusionDefinition, TensorView
from meshfuse.multidevice import DeviceMesh

RANKS = 2
PAGE = Path(__file__).with_name("page.txt")
DEADLINE = timedelta(seconds=120)
TOLERANCE = 1e-5


def layer_norm(
    fd: FusionDefinition, x: TensorView, scale: TensorView, shift: TensorView
) -> TensorView:
    """Normalise the last axis of `x` [b, s, e]."""
    variance, mean = fd.ops.var_mean(x, dims=[2], correction=0, keepdim=True)
    normal = (x - mean) * fd.ops.rsqrt(variance + EPSILON)
    return normal * scale + shift


def define_mlp(mesh: DeviceMesh) -> FusionDefinition:
    """Global shapes; the sequence length is symbolic."""
    with FusionDefinition() as fd:
        hidden = fd.define_tensor([1, -1, HIDDEN], contiguity=True)
        shapes = ([HIDDEN], [HIDDEN], [INNER, HIDDEN], [INNER], [HIDDEN, INNER], *[[HIDDEN]] * 3)
        weights = [fd.define_tensor(shape, contiguity=True) for shape in shapes]
        scale1, shift1, up, up_bias, down, down_bias, scale2, shift2 = weights

        x = layer_norm(fd, hidden, scale1, shift1)
        inner = fd.ops.gelu(fd.ops.linear(x, up, up_bias))
        projected = fd.ops.linear(inner, down, down_bias)
        y = layer_norm(fd, projected + x, scale2, shift2)
        fd.add_output(y)

        ranks = mesh.size
        for tensor, axis in ((hidden, 1), (projected, 1), (up, 0), (up_bias, 0), (down, 1)):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(axis, ranks)
            tensor.axis(axis).parallelize(mf.ParallelType.mesh_x)
        for tensor in (scale1, shift1, down_bias, scale2, shift2):
            tensor.set_device_mesh(mesh)
    return fd


def run_rank(rank: int) -> None:
    """One process: take this rank's shards, run, compare with one-device torch."""
    layer = load_layer_input(PAGE, multiple=RANKS)
    fd = define_mlp(DeviceMesh(range(RANKS)))
    tensors = (layer.hidden, *layer.weights)
    views = [view for view in fd.fusion.inputs() if isinstance(view, TensorView)]
    shards = [
        mf.multidevice.shard_tensor(tensor, view)
        for tensor, view in zip(tensors, views, strict=True)
    ]
    [y] = fd.execute(shards)
    if not isinstance(y, mf.DistributedTensor):
        raise SystemExit(f"rank {rank}: got {type(y).__name__}, not a DistributedTensor")

    whole = run_mlp(layer.hidden, layer.weights)
    expected = whole.chunk(RANKS, dim=1)[rank]
    if y.shape != expected.shape:
        raise SystemExit(f"rank {rank}: got shape {tuple(y.shape)}, not {tuple(expected.shape)}")
    errors = all_errors((y.local - expected).abs().max().item(), RANKS)
    if rank == 0:
        _report(fd, layer.origin, whole, errors)
    if not all(error <= TOLERANCE for error in errors):  # written so that NaN fails
        raise SystemExit(1)


def _report(fd: FusionDefinition, origin: str, whole: torch.Tensor, errors: list[float]) -> None:
    print(f"input: {origin}")
    print(f"each process holds 1/{RANKS} of the tokens and 1/{RANKS} of the inner features\n")
    print("-- program, as defined, on global shapes --")
    print(fd)
    print(fd.explain())
    print("-- result --")
    scale = whole.abs().max().item()
    for rank, error in enumerate(errors):
        print(f"rank {rank}: largest error {error:.1e} (values reach {scale:.2f})")
    verdict = "agree" if all(error <= TOLERANCE for error in errors) else "DO NOT AGREE"
    print(
        f"checked: {RANKS} gloo processes {verdict} with one-device torch within {TOLERANCE:.0e} "
        f"on all {whole.numel()} values of the MLP half ({origin})"
    )


if __name__ == "__main__":
    run_processes(run_rank, RANKS, DEADLINE)
