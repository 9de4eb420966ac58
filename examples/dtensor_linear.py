"""A tensor-parallel linear on torch's DTensors, with gradients: meshfuse computes, autograd chains.

Run it on as many processes as you like; no GPU is needed:

    torchrun --nproc-per-node=2 examples/dtensor_linear.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from meshfuse import FusionDefinition, TensorView
from meshfuse.multidevice import DTensorFunction


@DTensorFunction
def forward_pass(fd: FusionDefinition, x: TensorView, w: TensorView) -> None:
    """x [b, s, i], w [o, i]  ->  y [b, s, o]"""
    fd.add_output(fd.ops.linear(x, w))


@DTensorFunction
def backward_pass(fd: FusionDefinition, x: TensorView, w: TensorView, grad: TensorView) -> None:
    """The gradients of x and w, given that of y."""
    batch, sequence, inputs = fd.ops.shape(x)
    rows = fd.ops.mul(batch, sequence)
    flat_grad = fd.ops.reshape(grad, [rows, fd.ops.size(w, 0)])
    flat_x = fd.ops.reshape(x, [rows, inputs])
    fd.add_output(fd.ops.matmul(grad, w))
    fd.add_output(fd.ops.matmul(fd.ops.permute(flat_grad, [1, 0]), flat_x))


class Linear(torch.autograd.Function):
    """Where the gradients' sums cross ranks, meshfuse adds the collectives."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, w: DTensor) -> DTensor:
        ctx.save_for_backward(x, w)
        [y] = forward_pass(x, w)
        return y

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, DTensor]:
        grad_x, grad_w = backward_pass(*ctx.saved_tensors, grad)
        return grad_x, grad_w


def check(
    kind: str, mesh: DeviceMesh, x: torch.Tensor, w: torch.Tensor, lie: list[Placement]
) -> None:
    """Run forward and backward; say how the results lie, and how far from torch's they are."""
    x_shard, w_shard = (
        distribute_tensor(whole, mesh, [placement]).requires_grad_()
        for whole, placement in zip((x, w), lie, strict=True)
    )
    y: Any = Linear.apply(x_shard, w_shard)
    y.backward(DTensor.from_local(torch.ones_like(y.to_local()), mesh, y.placements))
    x_whole, w_whole = x.clone().requires_grad_(), w.clone().requires_grad_()
    expected = torch.nn.functional.linear(x_whole, w_whole)
    expected.sum().backward()
    pairs: list[tuple[Any, Any]] = [
        (y, expected),
        (x_shard.grad, x_whole.grad),
        (w_shard.grad, w_whole.grad),
    ]
    placements = ", ".join(str(mine.placements[0]) for mine, _ in pairs)
    error = max((mine.full_tensor() - whole).abs().max().item() for mine, whole in pairs)
    if mesh.get_rank() == 0:
        print(f"{kind}: y, gradients of x and w: {placements}; largest error {error:.1e}")


def main() -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    torch.manual_seed(0)  # the same whole tensors on every rank
    x, wide = torch.randn(2, 16, 64), torch.randn(2, 16, 64 * ranks)
    check("column-parallel", mesh, x, torch.randn(64 * ranks, 64), [Replicate(), Shard(0)])
    check("row-parallel", mesh, wide, torch.randn(64, 64 * ranks), [Shard(2), Shard(1)])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
