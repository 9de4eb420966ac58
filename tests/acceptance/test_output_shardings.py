"""What a caller learns of each output: local tensor, mesh, and the axis that a mesh axis shards."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

from meshfuse import DistributedTensor, FusionDefinition, ParallelType
from meshfuse.expr import evaluate
from meshfuse.host.nodes import Evaluate
from meshfuse.ir.ops import Linear, MatMul
from meshfuse.multidevice import DeviceMesh, simulate
from sharded_cases import (
    block,
    integers,
    linear_column_parallel,
    matmul_column_parallel,
    replicate,
    sequence_parallel_mlp,
)


def test_an_output_without_a_mesh_is_a_plain_tensor() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4])
        fd.add_output(fd.ops.relu(x))
    data = integers(3, 4)
    [y] = fd.execute([data])
    assert type(y) is torch.Tensor
    assert torch.equal(y, data.relu())
    assert fd.fec.get_output_shardings() == []


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_axis_numbers_are_tensor_axes(axis: int) -> None:
    """Reduced axes are not counted, whether a split or a whole axis carries the mesh."""
    mesh = DeviceMesh(range(2))
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, 4, 6, 8], contiguity=True)
        y = fd.ops.sum(x, [0])
        z = fd.ops.sum(y, [axis])
        fd.add_output(y)
        fd.add_output(z)
        block(mesh, x, axis + 1)
    results = simulate(fd, [integers(2, 4, 6, 8)])
    for y_part, z_part in results:
        assert isinstance(y_part, DistributedTensor)
        assert isinstance(z_part, DistributedTensor)
        assert y_part.axis_sharded_on(ParallelType.mesh_x) == axis
        assert z_part.axis_sharded_on(ParallelType.mesh_x) == -1


def test_every_mesh_axis_is_reported() -> None:
    """A 2-D mesh: rows of tokens on mesh_y, features on mesh_x; nothing moves."""
    mesh = DeviceMesh([[0, 1, 2], [3, 4, 5]])
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 9], contiguity=True)
        fd.add_output(fd.ops.mul(x, 3))
        x.set_device_mesh(mesh)
        x.outer_split(1, 3)
        x.axis(1).parallelize(ParallelType.mesh_x)
        x.outer_split(0, 2)
        x.axis(0).parallelize(ParallelType.mesh_y)
    data = integers(4, 9)
    for rank, [y] in enumerate(simulate(fd, [data])):
        assert isinstance(y, DistributedTensor)
        assert (y.axis_sharded_on(ParallelType.mesh_y), y.axis_sharded_on(ParallelType.mesh_x)) == (
            0,
            1,
        )
        want = (data * 3).chunk(2, 0)[rank // 3].chunk(3, 1)[rank % 3]
        assert torch.equal(y.local, want)
    assert fd.fec.communications() == ()


def test_shardings_belong_to_the_result() -> None:
    """A later call, of another size, leaves what an earlier one returned as it was."""
    mesh = DeviceMesh(range(2))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 3], contiguity=True)
        y = fd.ops.neg(x)
        fd.add_output(y)
        block(mesh, x, 0)
    [[first], _] = simulate(fd, [integers(4, 3)])
    assert isinstance(first, DistributedTensor)
    before = (first.sharding, first.global_shape, first.local.clone())
    simulate(fd, [integers(8, 3)])
    assert (first.sharding, first.global_shape) == before[:2]
    assert torch.equal(first.local, before[2])
    assert tuple(first.global_shape) == (4, 3)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
def test_column_parallel_products_move_and_copy_nothing(d: int) -> None:
    """One torch call a rank: no communication, no kernel, no buffer but the product."""
    for case in (matmul_column_parallel, linear_column_parallel):
        built = case(d)
        simulate(built.fd, built.inputs)
        [node] = built.fd.fec.host_program().body
        assert isinstance(node, Evaluate)
        [product] = node.body
        assert isinstance(product, Linear | MatMul)


def test_the_product_of_a_sharded_weight_is_sharded_like_it() -> None:
    """Only the weight is annotated: x [2, 3] replicated, w [d, 3, 5]."""
    d = 3
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, 3], contiguity=True)
        w = fd.define_tensor([d, 3, 5], contiguity=True)
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        replicate(mesh, x)
        w.set_device_mesh(mesh)
        w.axis(0).parallelize(ParallelType.mesh_x)
    inputs = [integers(2, 3), integers(d, 3, 5)]
    for rank, [part] in enumerate(simulate(fd, inputs)):
        assert isinstance(part, DistributedTensor)
        assert torch.equal(part.local, torch.matmul(*inputs)[rank : rank + 1])
        assert part.axis_sharded_on(ParallelType.mesh_x) == 0


@pytest.mark.parametrize("d", [2, 3])
def test_local_sizes_follow_from_sizes_that_nothing_changes(d: int) -> None:
    """Shapes are read off a mapping that cannot be written to, and are the ones that come out."""
    built = sequence_parallel_mlp(d)
    results = simulate(built.fd, built.inputs)
    program = built.fd.fec.host_program()
    [symbol] = [str(binding.symbol) for binding in program.symbols]
    places = [str(entry.symbol) for entry in program.coordinates]
    [output] = program.outputs
    for rank, [tensor] in enumerate(results):
        sizes = MappingProxyType({symbol: 3 * d, **dict.fromkeys(places, rank)})
        shape = [evaluate(extent, sizes) for extent in program.buffers[output.buffer].shape]
        assert shape == list(tensor.shape)
        assert dict(sizes) == {symbol: 3 * d, **dict.fromkeys(places, rank)}
