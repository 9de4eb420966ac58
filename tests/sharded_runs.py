"""What tests of whole models share: placing tensors on a mesh, running, checking every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

from meshfuse import DistributedTensor, FusionDefinition, ParallelType, TensorView
from meshfuse.cache import FusionCache
from meshfuse.expr import const_value
from meshfuse.multidevice import DeviceMesh, simulate

X, Y, Z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z
Cuts = dict[int, ParallelType]
"""Tensor axis -> the mesh axis that has it in blocks."""
Posted = tuple[str, ParallelType | None, int]
"""Kind, mesh axis (None for an exchange) and bytes that a rank puts in."""


def mesh_of(*shape: int) -> DeviceMesh:
    return DeviceMesh(torch.arange(math.prod(shape)).reshape(shape))


def place(mesh: DeviceMesh, cuts: Cuts, *tensors: TensorView) -> None:
    """Blocks along the axes of `cuts`, as even as they come; all else is on every rank."""
    for tensor in tensors:
        loops = tensor.get_loop_domain()
        kept = [place for place, axis in enumerate(loops) if not axis.is_reduction()]
        tensor.set_device_mesh(mesh)
        for axis in sorted(cuts, reverse=True):
            tensor.outer_split(kept[axis], mesh.ranks.axis_size(cuts[axis]))
            tensor.axis(kept[axis]).parallelize(cuts[axis])


def placed_linear(
    mesh: DeviceMesh, x: Sequence[int], w: Sequence[int], cuts: Sequence[Cuts]
) -> FusionDefinition:
    """x @ w.T, on global shapes, with the `cuts` of x, of w and of the result: see `place`."""
    with FusionDefinition() as fd:
        tensors = [fd.define_tensor(list(shape), contiguity=True) for shape in (x, w)]
        tensors.append(fd.ops.linear(*tensors))
        for tensor, own in zip(tensors, cuts, strict=True):
            place(mesh, own, tensor)
        fd.add_output(tensors[-1])
    return fd


def place_strided(mesh: DeviceMesh, pieces: int, owner: ParallelType, *tensors: TensorView) -> None:
    """Axis 0 is `pieces` one after the other, and each piece is in blocks over `owner`."""
    for tensor in tensors:
        tensor.set_device_mesh(mesh)
        tensor.outer_split(0, pieces)
        tensor.outer_split(1, mesh.ranks.axis_size(owner))
        tensor.axis(1).parallelize(owner)


def integers(
    *shape: int, low: int = -4, high: int = 5, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Small whole numbers, the same for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def run(
    fd: FusionDefinition,
    inputs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> list[list[DistributedTensor]]:
    """Every rank of every output holds its part of the value that is wanted; by rank."""
    ranks: list[list[DistributedTensor]] = []
    for rank, outputs in enumerate(simulate(fd, inputs)):
        assert len(outputs) == len(wanted)
        ranks.append([])
        for position, (output, value) in enumerate(zip(outputs, wanted, strict=True)):
            assert isinstance(output, DistributedTensor)
            assert not output.sharding.partial
            torch.testing.assert_close(
                output.local,
                own_part(output, value, rank),
                rtol=rtol,
                atol=atol,
                msg=lambda text, p=position, r=rank: f"output {p}, rank {r}: {text}",
            )
            ranks[-1].append(output)
    return ranks


def own_part(output: DistributedTensor, value: torch.Tensor, rank: int) -> torch.Tensor:
    """What `rank` must hold of a whole value, index by index."""
    mesh = output.mesh
    for axis, digits in enumerate(output.sharding.axes):
        indices = torch.arange(value.shape[axis])
        sizes = [const_value(digit.extent) or 0 for digit in digits]
        for place, (size, digit) in enumerate(zip(sizes, digits, strict=True)):
            if digit.owner is not None:
                below = math.prod(sizes[place + 1 :])
                indices = indices[indices // below % size == mesh.coordinate(rank, digit.owner)]
        if len(indices) < value.shape[axis]:
            value = value.index_select(axis, indices)
    return value


def posted(fd: FusionDefinition) -> list[Posted]:
    """The communications of the last call, in order."""
    return [
        (step.collective.value, step.mesh_axis, const_value(step.bytes) or 0)
        for step in fd.fec.communications()
    ]


def kinds(fd: FusionDefinition) -> list[tuple[str, ParallelType | None]]:
    return [(kind, axis) for kind, axis, _ in posted(fd)]


@contextmanager
def without_kernels() -> Iterator[None]:
    """Operations run one by one: shardings are looked at, and compiling takes most of the time."""
    FusionCache.instance().reset()
    with patch.object(FusionCache, "_compiler_for", lambda *_: None):
        yield
    FusionCache.instance().reset()
