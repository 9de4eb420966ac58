"""Axes that ranks do not share in equal blocks, empty parts, cycles, other meshes: by value."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch

from meshfuse import DataType, DistributedTensor, FusionDefinition, ParallelType, TensorView
from meshfuse.dist.shard import shard_tensor, unshard_tensor
from meshfuse.multidevice import DeviceMesh, SimulatedResults, simulate
from meshfuse.multidevice import shard_tensor as cut

MESH_X, MESH_Y = ParallelType.mesh_x, ParallelType.mesh_y
SIZES = (5, 7, 1, 0, 9)
RANKS = (1, 2, 3, 4, 8)

Place = Callable[[DeviceMesh, TensorView, int], None]


def block(mesh: DeviceMesh, tensor: TensorView, axis: int) -> None:
    """Blocks of ceil(n / d), the last ones shorter or empty."""
    tensor.set_device_mesh(mesh)
    tensor.outer_split(axis, mesh.size)
    tensor.axis(axis).parallelize(MESH_X)


def cyclic(mesh: DeviceMesh, tensor: TensorView, axis: int) -> None:
    """Element k lies on rank k % d."""
    tensor.set_device_mesh(mesh)
    tensor.inner_split(axis, mesh.size)
    tensor.axis(axis + 1).parallelize(MESH_X)


def strided(mesh: DeviceMesh, tensor: TensorView, axis: int) -> None:
    """Two pieces, each in blocks."""
    tensor.set_device_mesh(mesh)
    tensor.outer_split(axis, 2)
    tensor.outer_split(axis + 1, mesh.size)
    tensor.axis(axis + 1).parallelize(MESH_X)


PLACES: dict[str, Place] = {"block": block, "cyclic": cyclic, "strided": strided}


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randint(-4, 4, shape, generator=generator).to(dtype)


def check(results: SimulatedResults, wanted: Sequence[torch.Tensor]) -> None:
    """Every rank holds its part of each value, and knows the global shape."""
    for position, value in enumerate(wanted):
        outputs = dict(enumerate(outputs[position] for outputs in results))
        parts: dict[int, DistributedTensor] = {}
        for rank, output in outputs.items():
            assert isinstance(output, DistributedTensor)
            assert output.dtype == value.dtype
            if rank not in output.mesh.ids:
                assert output.shape == (0,) * max(value.ndim, 1)
                continue
            part = shard_tensor(value, output.sharding, rank)
            assert output.shape == part.shape
            assert output.global_shape == tuple(value.shape)
            torch.testing.assert_close(output.local, part, rtol=1e-5, atol=1e-5, equal_nan=True)
            parts[rank] = output
        sharding = next(iter(parts.values())).sharding
        whole = unshard_tensor(parts, sharding, value.shape)
        torch.testing.assert_close(whole, value, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("d", RANKS)
@pytest.mark.parametrize("place", PLACES)
def test_element_by_element_and_reductions_of_whole_axes(place: str, d: int) -> None:
    """One program for all sizes: nothing moves, whatever the blocks."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 3], contiguity=True)
        y = fd.define_tensor([-1, 3], contiguity=True)
        z = fd.ops.add(fd.ops.relu(x), y)
        fd.add_output(z)
        fd.add_output(fd.ops.sum(z, [1]))
        fd.add_output(fd.ops.max(z, [1], keepdim=True))
        PLACES[place](mesh, x, 0)
        PLACES[place](mesh, y, 0)
    for n in SIZES:
        a, b = integers(n, 3), integers(n, 3) + 1
        value = a.relu() + b
        check(simulate(fd, [a, b]), [value, value.sum(1), value.amax(1, keepdim=True)])
    assert not fd.fec.communications()


@pytest.mark.parametrize("d", RANKS)
@pytest.mark.parametrize("place", PLACES)
def test_reductions_across_the_ranks(place: str, d: int) -> None:
    """A rank that holds nothing contributes the identity."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 3], contiguity=True)
        i = fd.define_tensor([-1], contiguity=True, dtype=DataType.Int)
        fd.add_output(fd.ops.sum(x, [0]))
        fd.add_output(fd.ops.prod(x, [0]))
        fd.add_output(fd.ops.mean(x, [0]))
        fd.add_output(fd.ops.max(i, [0]))
        fd.add_output(fd.ops.min(i, [0]))
        PLACES[place](mesh, x, 0)
        PLACES[place](mesh, i, 0)
    for n in SIZES:
        a, b = integers(n, 3), integers(n, dtype=torch.int64) + 7
        limits = torch.iinfo(torch.int64)
        top = b.amax() if n else torch.tensor(limits.min)
        bottom = b.amin() if n else torch.tensor(limits.max)
        check(simulate(fd, [a, b]), [a.sum(0), a.prod(0), a.mean(0), top, bottom])


@pytest.mark.parametrize("d", RANKS)
@pytest.mark.parametrize("place", ["block", "cyclic"])
@pytest.mark.parametrize("n", SIZES)
def test_static_sizes(place: str, d: int, n: int) -> None:
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, n], contiguity=True)
        y = fd.ops.mul(x, 3.0)
        fd.add_output(y)
        fd.add_output(fd.ops.sum(y, [0]))
        PLACES[place](mesh, x, 1)
    data = integers(2, n)
    check(simulate(fd, [data]), [data * 3, (data * 3).sum(0)])


@pytest.mark.parametrize("d", RANKS)
@pytest.mark.parametrize("place", ["block", "cyclic"])
def test_products(place: str, d: int) -> None:
    """Rows, columns, and the contracted axis in uneven parts."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as rows:
        x = rows.define_tensor([-1, 4], contiguity=True)
        w = rows.define_tensor([4, 3], contiguity=True)
        rows.add_output(rows.ops.matmul(x, w))
        PLACES[place](mesh, x, 0)
        w.set_device_mesh(mesh)
    with FusionDefinition() as columns:
        x = columns.define_tensor([3, 4], contiguity=True)
        w = columns.define_tensor([-1, 4], contiguity=True)
        b = columns.define_tensor([-1], contiguity=True)
        columns.add_output(columns.ops.linear(x, w, b))
        x.set_device_mesh(mesh)
        PLACES[place](mesh, w, 0)
        PLACES[place](mesh, b, 0)
    with FusionDefinition() as contracted:
        x = contracted.define_tensor([3, -1], contiguity=True)
        w = contracted.define_tensor([2, -1], contiguity=True)
        b = contracted.define_tensor([2], contiguity=True)
        contracted.add_output(contracted.ops.linear(x, w, b))
        PLACES[place](mesh, x, 1)
        PLACES[place](mesh, w, 1)
        b.set_device_mesh(mesh)
    for n in SIZES:
        left, right = integers(n, 4), integers(4, 3)
        check(simulate(rows, [left, right]), [left @ right])
        inputs = [integers(3, 4), integers(n, 4), integers(n)]
        check(simulate(columns, inputs), [torch.nn.functional.linear(*inputs)])
        inputs = [integers(3, n), integers(2, n), integers(2)]
        check(simulate(contracted, inputs), [torch.nn.functional.linear(*inputs)])


@pytest.mark.parametrize("d", RANKS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_weight_of_slices(axis: int, d: int) -> None:
    """[d, n, k] with each of its axes in uneven parts, with and without a bias; some are empty."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, -1], contiguity=True)
        weight = fd.define_tensor([-1, -1, -1], contiguity=True)
        bias = fd.define_tensor([-1, -1], contiguity=True)
        fd.add_output(fd.ops.linear(x, weight))
        fd.add_output(fd.ops.linear(x, weight, bias))
        block(mesh, weight, axis)
    for sizes in ((5, 3, 2), (2, 5, 3), (3, 2, 5), (2, 0, 3), (2, 3, 0)):
        inputs = [integers(2, sizes[2]), integers(*sizes), integers(*sizes[:2])]
        product = torch.einsum("bk,dnk->dbn", inputs[0], inputs[1])
        check(simulate(fd, inputs), [product, product + inputs[2][:, None]])


@pytest.mark.parametrize("place", ["block", "cyclic"])
def test_statistics_along_and_across(place: str) -> None:
    mesh = DeviceMesh(range(4))
    for axis, sizes in ((1, (5, 7, 1)), (0, (5, 9, 2))):
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, 3], contiguity=True)
            variance, mean = fd.ops.var_mean(x, [axis], correction=0)
            fd.add_output(variance)
            fd.add_output(mean)
            PLACES[place](mesh, x, 0)
        for n in sizes:
            data = integers(n, 3)
            check(simulate(fd, [data]), list(torch.var_mean(data, axis, correction=0)))


def test_several_mesh_axes_on_one_axis_and_on_two() -> None:
    mesh = DeviceMesh([[0, 1, 2], [3, 4, 5]])
    with FusionDefinition() as fd:
        x = fd.define_tensor([11, 7], contiguity=True)
        y = fd.define_tensor([11, 7], contiguity=True)
        fd.add_output(fd.ops.neg(x))
        fd.add_output(fd.ops.neg(y))
        for tensor in (x, y):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(0, 2)
            tensor.axis(0).parallelize(MESH_Y)
        x.outer_split(1, 3)
        x.axis(1).parallelize(MESH_X)
        y.inner_split(2, 3)
        y.axis(3).parallelize(MESH_X)
    data = integers(11, 7)
    check(simulate(fd, [data, data]), [-data, -data])


# Global sizes.


def negation(d: int, sizes: Sequence[int]) -> tuple[FusionDefinition, TensorView]:
    with FusionDefinition() as fd:
        x = fd.define_tensor(list(sizes), contiguity=True)
        fd.add_output(fd.ops.neg(x))
        block(DeviceMesh(range(d)), x, 0)
    return fd, x


def test_global_sizes_are_given_or_blocks_are_equal() -> None:
    fd, x = negation(2, [-1, 3])
    data = integers(5, 3)
    shards = [[data[:3]], [data[3:]]]
    with pytest.raises(RuntimeError, match="global sizes must be given, or be static"):
        simulate(fd, shards, per_rank=True)
    check(simulate(fd, shards, per_rank=True, global_sizes={0: (5, 3)}), [-data])
    check(simulate(fd, shards, per_rank=True, global_sizes={x: [5, 3]}), [-data])
    check(simulate(fd, [[data[:2]], [data[2:4]]], per_rank=True), [-data[:4]])


def test_outputs_say_their_global_sizes_to_the_next_program() -> None:
    fd, _ = negation(3, [-1])
    data = integers(7)
    first = simulate(fd, [data])
    check(simulate(fd, first, per_rank=True), [data])


def test_a_size_that_an_unsharded_axis_says() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        y = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.add(x, y))
        block(DeviceMesh(range(2)), x, 0)
        y.set_device_mesh(DeviceMesh(range(2)))
    data = integers(5)
    check(simulate(fd, [data, data]), [data + data])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({1: (5, 3)}, "1 is no tensor input; those are 0"),
        ({0: (5,)}, r"has 2 axes, but its global shape is given as \[5\]"),
        ({0: (5, 4)}, r"axis 1 of T0 .* has size 3"),
        ({0: 5}, "a shape is a list of ints"),
        ([5], "takes a mapping"),
    ],
)
def test_refused_global_sizes(given: object, message: str) -> None:
    fd, _ = negation(1, [-1, 3])
    with pytest.raises((RuntimeError, TypeError), match=message):
        fd.execute([integers(5, 3)], global_sizes=given)  # type: ignore[arg-type]  # users' values


def test_a_part_of_the_wrong_size_is_told_all_that_it_should_be() -> None:
    fd, _ = negation(2, [5, 3])
    message = r"size 2 on axis 0 \(rank 1 holds \[2, 3\] of it, sharded as \[mesh_x\{2\} 3, 3\]"
    with pytest.raises(RuntimeError, match=message):
        simulate(fd, [[integers(3, 3)], [integers(3, 3)]], per_rank=True)
    fd, _ = negation(2, [-1, 3])
    with pytest.raises(RuntimeError, match=r"size 3 on axis 0.*rank 0 holds \[3, 3\].* axis is 5"):
        simulate(fd, [[integers(2, 3)]] * 2, per_rank=True, global_sizes={0: (5, 3)})


# Meshes that differ.


def test_two_meshes_in_one_program() -> None:
    """What is done on one mesh is left out on the ranks of the other."""
    left, right = DeviceMesh([0, 1]), DeviceMesh([2, 4])
    with FusionDefinition() as fd:
        x = fd.define_tensor([5, 3], contiguity=True)
        y = fd.define_tensor([7], contiguity=True)
        w = fd.define_tensor([2, 3], contiguity=True)
        fd.add_output(fd.ops.linear(fd.ops.neg(x), w))
        fd.add_output(fd.ops.exp(y))
        fd.add_output(fd.ops.sum(y, [0]))
        block(left, x, 0)
        w.set_device_mesh(left)
        cyclic(right, y, 0)
    a, b, c = integers(5, 3), integers(7), integers(2, 3)
    results = simulate(fd, [a, b, c])
    assert len(results) == 5
    check(results, [torch.nn.functional.linear(-a, c), b.exp(), b.sum()])
    assert [tuple(outputs[0].shape) for outputs in results] == [(3, 2), (2, 2), *[(0, 0)] * 3]
    assert [tuple(outputs[1].shape) for outputs in results] == [(0,), (0,), (4,), (0,), (3,)]


def test_a_rank_outside_passes_an_empty_tensor() -> None:
    left, right = DeviceMesh([0]), DeviceMesh([1])
    with FusionDefinition() as fd:
        x = fd.define_tensor([4], contiguity=True)
        y = fd.define_tensor([3], contiguity=True)
        fd.add_output(fd.ops.neg(x))
        fd.add_output(fd.ops.neg(y))
        x.set_device_mesh(left)
        y.set_device_mesh(right)
    a, b = integers(4), integers(3)
    empty = torch.empty(0)
    check(simulate(fd, [[a, empty], [torch.empty(2, 0), b]], per_rank=True), [-a, -b])
    with pytest.raises(RuntimeError, match=r"to be an empty tensor on rank 0, which is not in Dev"):
        simulate(fd, [[a, b], [empty, b]], per_rank=True)


def test_sizes_that_only_other_ranks_know() -> None:
    """Each mesh has its own; where one needs the other's, the simulator gives it."""
    left, right = DeviceMesh([0, 1]), DeviceMesh([2, 3, 4])
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        y = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.neg(x))
        fd.add_output(fd.ops.neg(y))
        block(left, x, 0)
        block(right, y, 0)
    a, b = integers(5), integers(8)
    check(simulate(fd, [a, b]), [-a, -b])


@pytest.mark.parametrize("sizes", [(5, 3), (-1, 3)])
def test_a_pipeline_over_two_meshes(sizes: tuple[int, int]) -> None:
    """The second half of the ranks knows a symbolic size by the simulator only."""
    left, right = DeviceMesh([0, 1]), DeviceMesh([2, 3, 4])
    with FusionDefinition() as fd:
        x = fd.define_tensor(list(sizes), contiguity=True)
        hidden = fd.ops.neg(x)
        handed = fd.ops.set(hidden)
        fd.add_output(fd.ops.exp(handed))
        fd.add_output(hidden)
        block(left, x, 0)
        block(left, hidden, 0)
        cyclic(right, handed, 0)
    data = integers(5, 3)
    check(simulate(fd, [data]), [(-data).exp(), -data])
    if sizes[0] < 0:
        empty = torch.empty(0, 0)
        with pytest.raises(RuntimeError, match=r"rank 2 needs the size i0, .* global_sizes=\{k: s"):
            simulate(fd, [[data[:2]], [data[2:4]], [empty], [empty], [empty]], per_rank=True)


def test_meshes_that_overlap() -> None:
    left, right = DeviceMesh([0, 1]), DeviceMesh([1, 2])
    with FusionDefinition() as fd:
        x = fd.define_tensor([5, 3], contiguity=True)
        y = fd.define_tensor([5, 3], contiguity=True)
        z = fd.ops.add(x, y)
        fd.add_output(z)
        block(left, x, 0)
        block(right, y, 0)
        cyclic(right, z, 0)
    a, b = integers(5, 3), integers(5, 3) + 1
    check(simulate(fd, [a, b]), [a + b])


@pytest.mark.parametrize("n", [7, 1, 0])
@pytest.mark.parametrize("place", PLACES)
def test_a_static_axis_is_gathered(place: str, n: int) -> None:
    mesh = DeviceMesh(range(3))
    with FusionDefinition() as fd:
        x = fd.define_tensor([n, 2], contiguity=True)
        whole = fd.ops.set(fd.ops.neg(x))
        fd.add_output(whole)
        PLACES[place](mesh, x, 0)
        whole.set_device_mesh(mesh)
    data = integers(n, 2)
    check(simulate(fd, [data]), [-data])


# What users hold.


def test_an_input_is_updated_in_place() -> None:
    mesh = DeviceMesh(range(3))
    with FusionDefinition() as fd:
        x = fd.define_tensor([7, 5], contiguity=True)
        fd.add_output(fd.ops.add(x, 1.0), x)
        block(mesh, x, 0)
    data = integers(7, 5)
    updated = [inputs[0] for inputs in simulate(fd, [data]).inputs]
    for rank, part in enumerate((data + 1).split(3)):
        tensor = updated[rank]
        assert isinstance(tensor, DistributedTensor)
        assert tensor.global_shape == (7, 5)
        assert torch.equal(tensor.local, part)


def test_copies_and_pickles_keep_the_global_shape() -> None:
    fd, _ = negation(3, [-1, 4])
    [tensor] = simulate(fd, [integers(5, 4)])[2]
    assert isinstance(tensor, DistributedTensor)
    for other in (copy.copy(tensor), copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert (other.global_shape, other.sharding) == ((5, 4), tensor.sharding)
        assert torch.equal(other.local, tensor.local)


def test_segments_run_one_by_one() -> None:
    mesh = DeviceMesh([0])
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4], contiguity=True)
        w = fd.define_tensor([3, 4], contiguity=True)
        fd.add_output(fd.ops.relu(fd.ops.linear(fd.ops.neg(x), w)))
        block(mesh, x, 0)
        w.set_device_mesh(mesh)
    inputs = [integers(5, 4), integers(3, 4)]
    fd.segment(inputs)
    [output] = fd.execute(inputs, global_sizes={x: (5, 4)})
    assert torch.equal(output, torch.nn.functional.linear(-inputs[0], inputs[1]).relu())


def test_a_tensor_that_is_no_value_of_the_view_is_not_cut() -> None:
    _, x = negation(1, [5, 3])
    assert torch.equal(cut(integers(5, 3), x), integers(5, 3))
    with pytest.raises(RuntimeError, match=r"shard_tensor\(tensor of shape \[4, 3\], .*size 5"):
        cut(integers(4, 3), x)
