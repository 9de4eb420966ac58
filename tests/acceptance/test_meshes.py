"""Meshes of several axes and of one element a rank, by value on all ranks in this process."""

from __future__ import annotations

import pytest
import torch

from meshfuse import DistributedTensor, FusionDefinition, ParallelType, TensorView, UserError
from meshfuse.multidevice import DeviceMesh, shard_tensor, simulate

SQUARE = DeviceMesh([[2, 0], [1, 3]])


def block(mesh: DeviceMesh, tensor: TensorView, axis: int, *owners: ParallelType) -> None:
    """Shard loop axis `axis` over mesh axes, the first the outermost."""
    tensor.set_device_mesh(mesh)
    for place, owner in enumerate(owners, axis):
        tensor.outer_split(place, mesh.ranks.axis_size(owner))
        tensor.axis(place).parallelize(owner)


def local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DistributedTensor)
    return tensor.local


@pytest.mark.parametrize("length", [4, 8])
@pytest.mark.parametrize("dims", [[0], [0, 1]])
def test_reduction_of_an_axis_on_two_mesh_axes(length: int, dims: list[int]) -> None:
    """With one element a rank, nothing but the ranks' partial results is left to reduce."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([length, 3], contiguity=True)
        block(SQUARE, x, 0, ParallelType.mesh_x, ParallelType.mesh_y)
        fd.add_output(fd.ops.sum(x, dims))
    data = torch.randint(-4, 4, (length, 3)).float()
    for [total] in simulate(fd, [data]):
        assert torch.equal(local(total), data.sum(dims))


def test_gather_of_blocks_of_one_element() -> None:
    """A block's stride is that of the tensor it was cut from, and says nothing."""
    mesh = DeviceMesh([1, 2, 0])
    with FusionDefinition() as fd:
        x = fd.define_tensor([1, 3])
        block(mesh, x, 1, ParallelType.mesh_x)
        y = fd.ops.neg(x)
        y.set_device_mesh(mesh)
        fd.add_output(y)
    data = torch.tensor([[1.0, 2.0, 3.0]])
    for [gathered] in simulate(fd, [data]):
        assert torch.equal(local(gathered), -data)


def test_shards_that_make_no_one_tensor() -> None:
    mesh = DeviceMesh([0, 1])
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 2])
        block(mesh, x, 0, ParallelType.mesh_x)
        fd.add_output(fd.ops.neg(x))
    with pytest.raises(
        UserError, match="ranks 0 and 1 disagree on the global size i0, axis 0 of T0: 4 and 6"
    ):
        simulate(fd, [[torch.ones(2, 2)], [torch.ones(3, 2)]], per_rank=True)
    assert shard_tensor(torch.ones(4, 2), x).shape == (2, 2)


@pytest.mark.parametrize("function", ["linear", "sum"])
def test_a_reduction_over_two_mesh_axes_laid_out_by_both(function: str) -> None:
    """The terms leave one segment for a copy into the order that they travel in."""
    x_axis, y_axis = ParallelType.mesh_x, ParallelType.mesh_y
    with FusionDefinition() as fd:
        x = fd.define_tensor([6, 4], contiguity=True)
        w = fd.define_tensor([-1, 4], contiguity=True)
        if function == "linear":
            result = fd.ops.linear(x, w)
        else:
            products = fd.ops.broadcast(x, [False, True, False]) * fd.ops.broadcast(
                w, [True, False, False]
            )
            result = fd.ops.sum(products, [2])
        y = result * 2.0
        fd.add_output(y)
        block(SQUARE, w, 1, y_axis, x_axis)
        y.set_device_mesh(SQUARE)
        y.outer_split(1, 2)
        y.outer_split(0, 2)
        y.axis(0).parallelize(x_axis)
        y.axis(2).parallelize(y_axis)
    inputs = [torch.randint(-4, 4, (rows, 4)).float() for rows in (6, 5)]
    want = torch.nn.functional.linear(*inputs) * 2
    for rank, [output] in enumerate(simulate(fd, inputs)):
        assert torch.equal(local(output), block_on_square(want, rank))


def block_on_square(whole: torch.Tensor, rank: int) -> torch.Tensor:
    """The rank's block of rows over mesh_x, and of columns over mesh_y, of SQUARE."""
    row, column = divmod([2, 0, 1, 3].index(rank), 2)
    return whole.chunk(2, 0)[column].chunk(2, 1)[row]
