"""Meshes, shardings and simulated runs as users write them."""

from __future__ import annotations

import pytest
import torch

from meshfuse import DistributedTensor, FusionDefinition, ParallelType, TensorView
from meshfuse.multidevice import Communicator, DeviceMesh, Sharding, shard_tensor, simulate

MESH_X, MESH_Y = ParallelType.mesh_x, ParallelType.mesh_y


def block(mesh: DeviceMesh, tensor: TensorView, axis: int) -> None:
    tensor.set_device_mesh(mesh)
    tensor.outer_split(axis, mesh.size)
    tensor.axis(axis).parallelize(MESH_X)


# Meshes.


def test_mesh_from_lists_ranges_and_tensors() -> None:
    mesh = DeviceMesh([[0, 1, 2], [3, 4, 5]], names=["dp", "tp"])
    assert repr(mesh) == "DeviceMesh{{0 1 2} {3 4 5}}"
    assert (mesh.size, mesh.shape, mesh.ndim, mesh.names) == (6, (2, 3), 2, ("dp", "tp"))
    assert mesh.axis("tp") is not None
    assert mesh.axis("tp") == mesh.axis(-1) == MESH_X
    assert mesh.axis("dp") == mesh.axis(0) == MESH_Y
    assert mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert DeviceMesh(torch.arange(6).reshape(2, 3), names=["dp", "tp"]) == mesh
    assert DeviceMesh(range(6)) != mesh
    assert len({DeviceMesh(range(2)), DeviceMesh([0, 1])}) == 1
    assert repr(DeviceMesh(range(4))) == "DeviceMesh{0 1 2 3}"


@pytest.mark.parametrize(
    ("devices", "names", "message"),
    [
        ([], (), "at least one rank"),
        ([0, 0], (), "each rank may stand once"),
        ([[0], [1, 2]], (), "same length"),
        ([0, 1], ("a", "b"), "one name for each axis of the mesh"),
    ],
)
def test_mesh_refusals(devices: list[int], names: tuple[str, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        DeviceMesh(devices, names)


def test_mesh_axis_refusals() -> None:
    mesh = DeviceMesh([0, 1], names=["tp"])
    with pytest.raises(RuntimeError, match=r"axis\('dp'\)"):
        mesh.axis("dp")
    with pytest.raises(RuntimeError, match=r"axis\(1\)"):
        mesh.axis(1)


def test_mesh_shards_a_tensor_for_this_rank() -> None:
    data = torch.arange(12).view(2, 6)
    assert torch.equal(DeviceMesh([0, 1]).shard_tensor(data, -1), data[:, :3])
    assert torch.equal(DeviceMesh([1, 0]).shard_tensor(data, 0), data[1:])
    assert torch.equal(DeviceMesh([3, 4]).shard_tensor(data, 0), data[:1]), "outside: block 0"
    with pytest.raises(RuntimeError, match="must be evenly divisble by mesh"):
        DeviceMesh(range(4)).shard_tensor(data, 1)
    with pytest.raises(RuntimeError, match=r"axis must lie in \[-2, 2\)"):
        DeviceMesh(range(2)).shard_tensor(data, 2)


# Shardings.


def test_sharding_by_parallel_type() -> None:
    mesh = DeviceMesh([[0, 1], [2, 3]])
    sharding = Sharding(mesh, {MESH_X: 1})
    assert sharding.mesh == mesh
    assert sharding.axis_sharded_on(MESH_X) == 1
    assert sharding.axis_sharded_on(MESH_Y) == -1


@pytest.mark.parametrize(
    ("mesh", "axes", "message"),
    [
        (DeviceMesh([0, 1]), [(MESH_X, 0), (MESH_X, 1)], "already used to shard axis 0"),
        (DeviceMesh([0, 1]), {ParallelType.grid_x: 0}, "no device type"),
        (DeviceMesh([0, 1]), {MESH_Y: 0}, "has no axis mesh_y"),
        (DeviceMesh([0, 1]), {MESH_X: -1}, "0 or more"),
        (None, {MESH_X: 0}, "needs a mesh"),
    ],
)
def test_sharding_refusals(mesh: DeviceMesh | None, axes: object, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        Sharding(mesh, axes)  # type: ignore[arg-type]  # the point of the test


def test_a_sharding_answers_for_mesh_axes_only() -> None:
    with pytest.raises(RuntimeError, match="no device type"):
        Sharding(DeviceMesh([0, 1]), {}).axis_sharded_on(ParallelType.stream)


# Alone in this process.


def test_communicator_of_one_process() -> None:
    communicator = Communicator.instance()
    assert communicator is Communicator.instance()
    assert (communicator.size(), communicator.rank()) == (1, 0)
    communicator.barrier()


def test_a_mesh_of_one_rank_runs_without_a_launcher() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 3], contiguity=True)
        y = fd.ops.sum(fd.ops.exp(x), [0])
        fd.add_output(y)
        block(DeviceMesh([0]), x, 0)
    data = torch.randn(4, 3)
    [out] = fd.execute([shard_tensor(data, x)])
    assert isinstance(out, DistributedTensor)
    assert type(out.local) is torch.Tensor
    assert out.axis_sharded_on(MESH_X) == -1
    assert out.mesh.size == 1
    torch.testing.assert_close(out.local, data.exp().sum(0))
    [sharding] = fd.fec.get_output_shardings()
    assert sharding.axis_sharded_on(MESH_X) == -1
    assert sharding.mesh == DeviceMesh([0])


def test_a_mesh_beyond_the_communicator() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 3], contiguity=True)
        fd.add_output(fd.ops.exp(x))
        block(DeviceMesh([0, 1]), x, 0)
    with pytest.raises(RuntimeError, match=r"DeviceMesh\{0 1\}.* 1 (process|rank)"):
        fd.execute([torch.zeros(2, 3)])


# Simulated.


@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_simulated_layer(d: int) -> None:
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 6], contiguity=True)
        up, down = fd.define_tensor([2 * d, 6]), fd.define_tensor([6, 2 * d])
        hidden = fd.ops.relu(fd.ops.linear(x, up))
        fd.add_output(hidden)
        fd.add_output(fd.ops.linear(hidden, down))
        x.set_device_mesh(mesh)
        block(mesh, up, 0)
        block(mesh, down, 1)
    inputs = [torch.randint(-3, 3, shape).float() for shape in ((5, 6), (2 * d, 6), (6, 2 * d))]
    hidden_value = torch.nn.functional.linear(inputs[0], inputs[1]).relu()
    value = torch.nn.functional.linear(hidden_value, inputs[2])
    results = simulate(fd, inputs)
    assert len(results) == d
    for rank, (part, whole) in enumerate(results):
        assert isinstance(part, DistributedTensor)
        assert isinstance(whole, DistributedTensor)
        assert torch.equal(part, hidden_value.chunk(d, 1)[rank])
        assert part.axis_sharded_on(MESH_X) == 1
        assert torch.equal(whole, value)
        assert whole.axis_sharded_on(MESH_X) == -1


def test_simulated_inputs_are_copies_and_updates_are_returned() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4], contiguity=True)
        y = x + 1.0
        fd.add_output(y, x)
        fd.add_output(y * 2.0)
        block(DeviceMesh([0, 1]), x, 0)
    data = torch.arange(4.0)
    results = simulate(fd, [data])
    assert torch.equal(data, torch.arange(4.0))
    for rank, [doubled] in enumerate(results):
        assert torch.equal(results.inputs[rank][0], data[2 * rank : 2 * rank + 2] + 1)
        assert torch.equal(doubled, (data[2 * rank : 2 * rank + 2] + 1) * 2)


def test_simulated_per_rank_inputs() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4], contiguity=True)
        fd.add_output(fd.ops.sum(x, [0]))
        block(DeviceMesh([0, 1]), x, 0)
    results = simulate(fd, [[torch.ones(2)], [torch.full((2,), 3.0)]], per_rank=True)
    assert [float(total) for [total] in results] == [8.0, 8.0]
    with pytest.raises(RuntimeError, match=r"per_rank.* 2 ranks.* 1"):
        simulate(fd, [[torch.ones(2)]], per_rank=True)


def test_simulating_without_a_mesh_is_one_rank() -> None:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.neg(fd.define_tensor([4], contiguity=True)))
    [[y]] = simulate(fd, [torch.ones(4)])
    assert type(y) is torch.Tensor


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 3], contiguity=True)
        fd.add_output(fd.ops.neg(x))
        block(DeviceMesh([2, 1]), x, 0)
    data = torch.randn(4, 3)
    outside, second, first = simulate(fd, [data])
    assert outside[0].shape == (0, 0)
    assert torch.equal(first[0], -data[:2])
    assert torch.equal(second[0], -data[2:])


def test_simulating_fewer_ranks_than_the_mesh_has() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4], contiguity=True)
        fd.add_output(fd.ops.neg(x))
        block(DeviceMesh([0, 1]), x, 0)
    with pytest.raises(RuntimeError, match=r"ranks=1.*DeviceMesh\{0 1\}"):
        simulate(fd, [torch.ones(4)], ranks=1)


def test_a_size_that_the_mesh_does_not_divide() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.neg(x))
        block(DeviceMesh([0, 1]), x, 0)
    [[first], [second]] = simulate(fd, [torch.arange(5.0)])
    assert (first.tolist(), second.tolist()) == ([0, -1, -2], [-3, -4])


def test_distributed_inputs_must_be_sharded_as_the_input_says() -> None:
    mesh = DeviceMesh([0, 1])
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 4], contiguity=True)
        fd.add_output(fd.ops.neg(x))
        block(mesh, x, 0)
    with FusionDefinition() as other:
        y = other.define_tensor([4, 4], contiguity=True)
        other.add_output(other.ops.neg(y))
        block(mesh, y, 1)
    data = torch.randn(4, 4)
    by_rows = simulate(fd, [data])
    again = simulate(fd, by_rows, per_rank=True)
    assert torch.equal(again[1][0], data[2:])
    by_columns = simulate(other, [data])
    with pytest.raises(RuntimeError, match=r"input 0.*mesh_x"):
        simulate(fd, by_columns, per_rank=True)


def test_explain_names_communications_with_their_cause() -> None:
    mesh = DeviceMesh([0, 1])
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 3], contiguity=True)
        y = fd.ops.sum(x, [0])
        fd.add_output(y)
        block(mesh, x, 0)
    simulate(fd, [torch.ones(4, 3)])
    text = fd.explain()
    assert "all_reduce" in text
    assert "12 bytes" in text
