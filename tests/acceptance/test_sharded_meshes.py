"""Programs whose tensors lie on several meshes: right on every rank, and each move is said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional

from meshfuse import DataType, DistributedTensor, FusionDefinition, ParallelType
from meshfuse.multidevice import DeviceMesh, simulate
from sharded_cases import block, integers, replicate

X = ParallelType.mesh_x


def check(
    results: Sequence[Sequence[torch.Tensor]], want: torch.Tensor, mesh: Sequence[int], axis: int
) -> None:
    """The ranks of `mesh` have `want`, in blocks along `axis` or (-1) whole; others nothing."""
    for rank, (output,) in enumerate(results):
        assert isinstance(output, DistributedTensor)
        if rank not in mesh:
            assert output.local.numel() == 0
        elif axis < 0:
            assert torch.equal(output.local, want)
        else:
            assert torch.equal(output.local, want.chunk(len(mesh), axis)[mesh.index(rank)])


def posted(fd: FusionDefinition) -> list[str]:
    return [step.collective.value for step in fd.fec.communications()]


@pytest.mark.parametrize(("first", "second"), [([0], [1]), ([0, 1], [2, 3]), ([0, 1], [1, 2, 3])])
def test_stages_of_a_pipeline(first: list[int], second: list[int]) -> None:
    """Rows in blocks on either stage; what the first makes is handed over once."""
    rows = 6
    fd = FusionDefinition()
    with fd:
        x = fd.define_tensor([rows, 4], contiguity=True)
        up = fd.define_tensor([5, 4], contiguity=True)
        down = fd.define_tensor([3, 5], contiguity=True)
        hidden = fd.ops.relu(fd.ops.linear(x, up))
        y = fd.ops.linear(hidden, down)
        fd.add_output(y)
        block(DeviceMesh(first), x, 0)
        replicate(DeviceMesh(first), up)
        replicate(DeviceMesh(second), down)
        block(DeviceMesh(second), y, 0)
    inputs = [integers(rows, 4), integers(5, 4), integers(3, 5)]
    want = functional.linear(functional.linear(inputs[0], inputs[1]).relu(), inputs[2])
    check(simulate(fd, inputs), want, second, 0)
    assert posted(fd) == ["exchange"]
    assert "lies on DeviceMesh" in fd.explain()


@pytest.mark.parametrize("d", [1, 2, 3])
def test_a_sum_goes_to_another_mesh_when_it_is_done(d: int) -> None:
    there = list(range(d, 2 * d))
    fd = FusionDefinition()
    with fd:
        x = fd.define_tensor([d * 2, 6], contiguity=True)
        total = fd.ops.sum(x, [0])
        fd.add_output(total)
        block(DeviceMesh(range(d)), x, 0)
        replicate(DeviceMesh(there), total)
    data = integers(d * 2, 6)
    check(simulate(fd, [data]), data.sum(0), there, -1)
    assert posted(fd)[-1] == "exchange"


def test_a_result_of_two_meshes_lies_where_less_moves() -> None:
    fd = FusionDefinition()
    with fd:
        row = fd.define_tensor([1, 6], contiguity=True)
        x = fd.define_tensor([4, 6], contiguity=True)
        fd.add_output(fd.ops.relu(row + x))
        block(DeviceMesh([0, 1]), row, 1)
        block(DeviceMesh([2, 3]), x, 0)
    inputs = [integers(1, 6), integers(4, 6)]
    check(simulate(fd, inputs), (inputs[0] + inputs[1]).relu(), [2, 3], 0)
    assert posted(fd) == ["exchange"]


def test_statistics_for_another_mesh() -> None:
    """Parts of a mesh share the features; the mean goes to a third rank."""
    fd = FusionDefinition()
    with fd:
        x = fd.define_tensor([3, 4], contiguity=True)
        _, mean = fd.ops.var_mean(x, [1])
        fd.add_output(mean)
        block(DeviceMesh([0, 1]), x, 1)
        replicate(DeviceMesh([2]), mean)
    data = integers(3, 4)
    check(simulate(fd, [data]), data.mean(1), [2], -1)


def test_a_kernel_of_a_scalar_that_the_first_rank_does_not_hold() -> None:
    mesh = DeviceMesh([2, 1])
    fd = FusionDefinition()
    with fd:
        x = fd.define_tensor([])
        fd.add_output(fd.ops.exp(x) * x)
        replicate(mesh, x)
    for rank, (output,) in enumerate(simulate(fd, [torch.tensor(0.0)])):
        assert isinstance(output, DistributedTensor)
        assert output.local.tolist() == ([] if rank == 0 else 0.0)


def test_the_mesh_of_a_result_places_the_next_program() -> None:
    mesh = DeviceMesh([[1, 0]], names=("dp", "tp"))
    fd, following = FusionDefinition(), FusionDefinition()
    with fd:
        x = fd.define_tensor([4], contiguity=True)
        fd.add_output(fd.ops.neg(x))
        replicate(mesh, x)
    (output,), _ = simulate(fd, [integers(4)])
    assert isinstance(output, DistributedTensor)
    assert output.mesh == mesh
    assert mesh == output.mesh
    with following:
        x = following.define_tensor([4], contiguity=True)
        x.set_device_mesh(output.mesh)
        following.add_output(following.ops.neg(x))
    (back,), _ = simulate(following, [output.local])
    assert isinstance(back, DistributedTensor)
    assert torch.equal(back.local, integers(4))
    assert back.mesh == mesh


@pytest.mark.parametrize("rows", [0, 5])
def test_an_input_that_nobody_placed_goes_where_it_is_used(rows: int) -> None:
    """It is passed whole on all ranks, lies on one of the meshes, and moves to the other."""
    few, many = DeviceMesh([0, 1]), DeviceMesh([3, 1, 0, 2])
    fd = FusionDefinition()
    with fd:
        table = fd.define_tensor([rows, 4], contiguity=True)
        index = fd.define_tensor([-1, 4], dtype=DataType.Int, contiguity=True)
        taken = fd.ops.take_along_axis(table, index, 0)
        fd.add_output(taken)
        block(many, index, 0)
        block(few, taken, 1)
    data = integers(rows, 4)
    places = integers(min(rows, 3), 4, dtype=torch.int64) % max(rows, 1)
    check(simulate(fd, [data, places]), data.gather(0, places), [0, 1], 1)
