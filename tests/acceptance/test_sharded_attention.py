"""sdpfa_fwd and sdpfa_bwd on a mesh: batch and heads stay where they are, the rest is gathered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from attention_programs import F32, bshe, check, gradients, random_tensors, reference
from meshfuse import FusionDefinition, ParallelType, TensorView
from meshfuse.multidevice import DeviceMesh, simulate

MeshAxes = dict[int, int]
"""Tensor axis -> the dimension of the mesh that shards it."""

MESHES: list[tuple[tuple[int, ...], MeshAxes]] = [
    ((1,), {1: 0}),
    ((2,), {1: 0}),
    ((3,), {1: 0}),
    ((4,), {1: 0}),
    ((2,), {0: 0}),
    ((3,), {0: 0}),
    ((2, 2), {0: 0, 1: 1}),
    ((2, 3), {1: 0, 0: 1}),
]
LAYOUTS = {"BHSE": (3, 2, 1, 0), "BSHE": (3, 1, 2, 0)}
OUTPUTS = ("out", "logsumexp", "seed", "offset", "grad_query", "grad_key", "grad_value")
BATCH, HEADS = 6, 12


def make_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh(torch.arange(math.prod(shape)).view(shape))


def place(mesh: DeviceMesh, axes: MeshAxes, *tensors: TensorView) -> None:
    """Blocks of the tensors' `axes`."""
    for tensor in tensors:
        tensor.set_device_mesh(mesh)
        for axis in sorted(axes, reverse=True):
            owner = mesh.axis(axes[axis])
            tensor.outer_split(axis, mesh.shape[axes[axis]])
            tensor.axis(axis).parallelize(owner)


def attention(
    sizes: Sequence[int], order: Sequence[int], dropout: float = 0.0
) -> tuple[FusionDefinition, list[TensorView], list[TensorView]]:
    """A definition with its inputs (query, key, value, gradient) and OUTPUTS."""
    with FusionDefinition() as fd:
        kind: dict[str, Any] = {"contiguity": True, "stride_order": order}
        inputs = [fd.define_tensor(sizes, **kind) for _ in range(4)]
        query, key, value, grad = inputs
        made = fd.ops.sdpfa_fwd(query, key, value, dropout_p=dropout, is_causal=True)
        out, logsumexp, seed, offset = made
        back = fd.ops.sdpfa_bwd(
            grad, query, key, value, out, logsumexp, dropout, True, seed, offset, None
        )
        for output in (*made, *back):
            fd.add_output(output)
    return fd, inputs, [*made, *back]


def local_part(tensor: torch.Tensor, mesh: DeviceMesh, axes: MeshAxes, rank: int) -> torch.Tensor:
    """What `rank` holds of a tensor that is cut in blocks."""
    for axis, dimension in axes.items():
        if axis < tensor.dim() and tensor.dim() > 2:
            ranks = mesh.shape[dimension]
            coordinate = torch.unravel_index(torch.tensor(rank), mesh.shape)[dimension]
            size = -(-tensor.shape[axis] // ranks)
            tensor = tensor.split(size, axis)[int(coordinate)]
    return tensor


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "axes"), MESHES)
def test_heads_and_batch_stay_where_they_are(
    shape: tuple[int, ...], axes: MeshAxes, layout: str, symbolic: bool
) -> None:
    mesh = make_mesh(shape)
    sizes = [-1, -1, -1, 8] if symbolic else [BATCH, HEADS, 5, 8]
    fd, inputs, _ = attention(sizes, LAYOUTS[layout])
    place(mesh, axes, *inputs)
    arrange = bshe if layout == "BSHE" else torch.clone
    data = [arrange(x) for x in random_tensors(4, (BATCH, HEADS, 5, 8))]
    whole = attention([BATCH, HEADS, 5, 8], LAYOUTS[layout])[0].execute(data)
    check(whole[0], reference(data[:3], causal=True)[0], F32)
    shards = [[arrange(local_part(x, mesh, axes, rank)) for x in data] for rank in range(mesh.size)]
    ranks = simulate(fd, shards, per_rank=True)
    assert fd.fec.communications() == ()
    for rank, outputs in enumerate(ranks):
        for name, found, want in zip(OUTPUTS, outputs, whole, strict=True):
            torch.testing.assert_close(found, local_part(want, mesh, axes, rank), msg=name)
            rows_first = found.transpose(1, 2) if layout == "BSHE" and found.dim() == 4 else found
            assert rows_first.is_contiguous(), name


def test_an_axis_of_devices_in_front() -> None:
    """[d, N, H, L, E], the first axis whole on the mesh, as models write it."""
    d = 3
    mesh = DeviceMesh(range(d))
    shape = (d, 2, 2, 5, 8)
    fd, inputs, _ = attention([d, -1, -1, -1, -1], (4, 3, 1, 2, 0))
    for tensor in inputs:
        tensor.set_device_mesh(mesh)
        tensor.axis(0).parallelize(ParallelType.mesh_x)
    data = random_tensors(4, shape)
    shards = [[bshe(x[rank : rank + 1]) for x in data] for rank in range(d)]
    ranks = simulate(fd, shards, per_rank=True)
    assert fd.fec.communications() == ()
    out = reference(data[:3], causal=True)[0]
    wanted = gradients(data[3], data[:3], causal=True)
    for rank, outputs in enumerate(ranks):
        assert outputs[0].shape == (1, *shape[1:])
        check(outputs[0], out[rank : rank + 1], F32)
        for found, want in zip(outputs[4:], wanted, strict=True):
            check(found, want[rank : rank + 1], F32)
        for found in (outputs[0], *outputs[4:]):
            assert found.transpose(2, 3).is_contiguous()


def test_heads_that_ranks_share_unevenly() -> None:
    mesh, axes = DeviceMesh(range(3)), {1: 0}
    fd, inputs, _ = attention([2, 5, 4, 8], LAYOUTS["BHSE"])
    place(mesh, axes, *inputs)
    data = random_tensors(4, (2, 5, 4, 8))
    whole = attention([2, 5, 4, 8], LAYOUTS["BHSE"])[0].execute(data)
    for rank, outputs in enumerate(simulate(fd, data)):
        assert outputs[0].shape[1] == (2, 2, 1)[rank]
        for found, want in zip(outputs, whole, strict=True):
            torch.testing.assert_close(found, local_part(want, mesh, axes, rank))
    assert fd.fec.communications() == ()


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("axis", [2, 3])
def test_what_it_works_along_is_gathered(axis: int, dropout: float) -> None:
    """Sequences and features: by value, whatever it costs; results may be sharded there, too."""
    mesh, axes = DeviceMesh(range(2)), {axis: 0}
    sizes = [2, 3, 4, 8]
    fd, inputs, outputs = attention(sizes, LAYOUTS["BHSE"], dropout)
    place(mesh, axes, *inputs, outputs[0], outputs[5])
    data = random_tensors(4, sizes)
    torch.manual_seed(5)
    whole = attention(sizes, LAYOUTS["BHSE"], dropout)[0].execute(data)
    torch.manual_seed(5)
    for rank, found in enumerate(simulate(fd, data)):
        for k, want in enumerate(whole):
            part = local_part(want, mesh, axes, rank) if k in (0, 5) else want
            torch.testing.assert_close(found[k], part, msg=OUTPUTS[k])
    assert fd.fec.communications() != ()


def test_dropout_does_not_depend_on_the_mesh() -> None:
    sizes = [2, 6, 5, 8]
    data = random_tensors(4, sizes)
    torch.manual_seed(5)
    whole = attention(sizes, LAYOUTS["BHSE"], 0.3)[0].execute(data)
    for shape, axes in MESHES[1:3] + MESHES[6:7]:
        mesh = make_mesh(shape)
        fd, inputs, _ = attention(sizes, LAYOUTS["BHSE"], 0.3)
        place(mesh, axes, *inputs)
        torch.manual_seed(5)
        for rank, outputs in enumerate(simulate(fd, data)):
            for found, want in zip(outputs, whole, strict=True):
                part = local_part(want, mesh, axes, rank)
                torch.testing.assert_close(found, part)
                assert torch.equal(found == 0, part == 0)
        assert fd.fec.communications() == ()


def test_operands_that_lie_otherwise_are_moved() -> None:
    """Key and value whole, the query in heads: a slice of what is there, and no message."""
    mesh, axes = DeviceMesh(range(3)), {1: 0}
    fd, inputs, _ = attention([2, 6, 4, 8], LAYOUTS["BHSE"])
    place(mesh, axes, inputs[0])
    place(mesh, {}, *inputs[1:])
    data = random_tensors(4, (2, 6, 4, 8))
    whole = attention([2, 6, 4, 8], LAYOUTS["BHSE"])[0].execute(data)
    ranks = simulate(fd, data)
    for rank, outputs in enumerate(ranks):
        torch.testing.assert_close(outputs[0], local_part(whole[0], mesh, axes, rank))
