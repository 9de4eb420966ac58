"""Softmax and layer norm along features that ranks share, and their gradients, by value.

What moves is a few numbers for each row, however long it is.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

from meshfuse import FusionDefinition, TensorView
from meshfuse.multidevice import DeviceMesh
from sharded_runs import X, Y, mesh_of, posted, run, without_kernels

ROWS, EPSILON = 3, 1e-5


def share(mesh: DeviceMesh, axis: int, form: str, *tensors: TensorView) -> None:
    """Give each place on x a part of an axis; in a grid those on y a part of that part."""
    ranks = mesh.shape[-1]
    for tensor in tensors:
        tensor.set_device_mesh(mesh)
        if form == "cyclic":
            tensor.inner_split(axis, ranks)
            tensor.axis(axis + 1).parallelize(X)
        else:
            tensor.outer_split(axis, ranks)
            tensor.axis(axis).parallelize(X)
        if form == "grid":
            tensor.outer_split(axis + 1, mesh.shape[0])
            tensor.axis(axis + 1).parallelize(Y)


def softmax(fd: FusionDefinition, x: TensorView, grad: TensorView) -> list[TensorView]:
    exponentials = fd.ops.exp(x - fd.ops.max(x, [1], keepdim=True))
    y = exponentials / fd.ops.sum(exponentials, [1], keepdim=True)
    return [y, (grad - fd.ops.sum(grad * y, [1], keepdim=True)) * y]


def layer_norm(
    fd: FusionDefinition, x: TensorView, grad: TensorView, weight: TensorView, bias: TensorView
) -> list[TensorView]:
    """Its value, and the gradients of x, weight and bias."""
    variance, mean = fd.ops.var_mean(x, [1], correction=0, keepdim=True)
    scale = fd.ops.rsqrt(variance + EPSILON)
    normal = (x - mean) * scale
    scaled = grad * weight
    along = fd.ops.mean(scaled * normal, [1], keepdim=True)
    back = (scaled - fd.ops.mean(scaled, [1], keepdim=True) - normal * along) * scale
    gradients = [back, fd.ops.sum(grad * normal, [0]), fd.ops.sum(grad, [0])]
    return [normal * weight + bias, *gradients]


MESHES: list[tuple[tuple[int, ...], str]] = [
    ((1,), "blocks"),
    ((2,), "blocks"),
    ((4,), "blocks"),
    ((2,), "cyclic"),
    ((4,), "cyclic"),
    ((2, 2), "grid"),
    ((3, 2), "grid"),
]


@pytest.mark.parametrize("features", [24, 13, 3])
@pytest.mark.parametrize(("shape", "form"), MESHES)
def test_softmax(shape: tuple[int, ...], form: str, features: int) -> None:
    mesh = mesh_of(*shape)
    with FusionDefinition() as fd:
        x, grad = (fd.define_tensor([ROWS, features], contiguity=True) for _ in range(2))
        for output in softmax(fd, x, grad):
            fd.add_output(output)
        share(mesh, 1, form, x, grad)
    generator = torch.Generator().manual_seed(features)
    x_value, grad_value = torch.randn(2, ROWS, features, generator=generator)
    leaf = x_value.double().requires_grad_()
    y = leaf.softmax(1)
    (back,) = torch.autograd.grad(y, leaf, grad_value.double())
    with nullcontext() if (shape, features) == ((4,), 13) else without_kernels():
        run(fd, [x_value, grad_value], [y.detach().float(), back.float()], rtol=1e-5, atol=1e-6)
    moved = posted(fd)
    if len(shape) == 1:
        assert moved == ([("all_reduce", X, 4 * ROWS)] * 3 if shape[0] > 1 else [])
    assert all(size <= 4 * ROWS for _, _, size in moved)


@pytest.mark.parametrize("features", [24, 13, 3])
@pytest.mark.parametrize(("shape", "form"), MESHES)
def test_layer_norm(shape: tuple[int, ...], form: str, features: int) -> None:
    mesh = mesh_of(*shape)
    with FusionDefinition() as fd:
        x, grad = (fd.define_tensor([ROWS, features], contiguity=True) for _ in range(2))
        weight, bias = (fd.define_tensor([features], contiguity=True) for _ in range(2))
        for output in layer_norm(fd, x, grad, weight, bias):
            fd.add_output(output)
        share(mesh, 1, form, x, grad)
        share(mesh, 0, form, weight, bias)
    generator = torch.Generator().manual_seed(features)
    sizes = ((ROWS, features), (ROWS, features), (features,), (features,))
    data = [torch.randn(size, generator=generator) for size in sizes]
    leaves = [data[k].double().requires_grad_() for k in (0, 2, 3)]
    y = functional.layer_norm(leaves[0], (features,), leaves[1], leaves[2], EPSILON)
    gradients = torch.autograd.grad(y, leaves, data[1].double())
    wanted = [value.detach().float() for value in (y, *gradients)]
    with nullcontext() if (shape, features) == ((4,), 13) else without_kernels():
        run(fd, data, wanted, rtol=1e-5, atol=1e-5)
    moved = posted(fd)
    moments = [step for step in moved if step[0] == "all_gather" and step[2] >= 4 * ROWS]
    if len(shape) == 1:
        sums = [step for step in moved if step not in moments]
        assert sums == ([("all_reduce", X, 4 * ROWS)] * 2 if shape[0] > 1 else [])
    assert len(moments) <= 3 * len(shape)
    assert all(size <= 8 * ROWS * shape[0] for _, _, size in moved)
