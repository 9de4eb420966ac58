"""Reductions over axes that are whole on every rank: no communication, the values of one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from meshfuse import DistributedTensor, FusionDefinition, ParallelType, TensorView
from meshfuse.multidevice import DeviceMesh, simulate

MESH_X, MESH_Y = ParallelType.mesh_x, ParallelType.mesh_y
RANKS = (1, 2, 3, 4, 8)


@dataclass
class Statistics:
    """A program on a mesh of any number of ranks, sequences in blocks on mesh_x.

    Inputs are [batch, sequence, features]; the last is random, the sequence a multiple of `ranks`.
    """

    ranks: int
    batch: int = 2
    features: int = 24
    fd: FusionDefinition = field(default_factory=FusionDefinition)

    def __post_init__(self) -> None:
        self.mesh = DeviceMesh(range(self.ranks))
        generator = torch.Generator().manual_seed(self.ranks)
        shape = (self.batch, 6 * self.ranks, self.features)
        self.data = torch.randn(shape, generator=generator)

    def input(self, contiguity: bool = True) -> TensorView:
        """x, sharded on its sequence."""
        x = self.fd.define_tensor([self.batch, -1, self.features], contiguity=contiguity)
        x.set_device_mesh(self.mesh)
        x.outer_split(1, self.ranks)
        x.axis(1).parallelize(MESH_X)
        return x

    def check(self, expected: Sequence[torch.Tensor], axis: int = 1) -> None:
        """Every rank has its block of each output along `axis`, and nothing moved."""
        for rank, outputs in enumerate(simulate(self.fd, [self.data])):
            assert len(outputs) == len(expected)
            for output, whole in zip(outputs, expected, strict=True):
                assert isinstance(output, DistributedTensor)
                assert output.axis_sharded_on(MESH_X) == axis
                torch.testing.assert_close(output.local, whole.chunk(self.ranks, axis)[rank])
        assert self.fd.fec.communications() == ()


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("ranks", RANKS)
def test_variance_and_mean(ranks: int, correction: int, keepdim: bool) -> None:
    s = Statistics(ranks)
    variance, mean = s.fd.ops.var_mean(s.input(), [2], correction=correction, keepdim=keepdim)
    s.fd.add_output(variance)
    s.fd.add_output(mean)
    s.check(torch.var_mean(s.data, 2, correction=correction, keepdim=keepdim))


@pytest.mark.parametrize("ranks", RANKS)
def test_three_results_of_welford(ranks: int) -> None:
    s = Statistics(ranks)
    for result in s.fd.ops.welford(s.input(), [2]):
        s.fd.add_output(result)
    mean = s.data.mean(2)
    m2 = (s.data - mean.unsqueeze(2)).square().sum(2)
    s.check([mean, m2, torch.full_like(mean, s.features).long()])


@pytest.mark.parametrize("ranks", RANKS)
def test_layer_norm(ranks: int) -> None:
    s = Statistics(ranks)
    x = s.input()
    variance, mean = s.fd.ops.var_mean(x, [2], correction=0, keepdim=True)
    scale = s.fd.ops.rsqrt(s.fd.ops.add(variance, 1e-5))
    s.fd.add_output(s.fd.ops.mul(s.fd.ops.sub(x, mean), scale))
    s.check([torch.nn.functional.layer_norm(s.data, [s.features])])


@pytest.mark.parametrize("ranks", RANKS)
def test_two_reductions_of_one_tensor(ranks: int) -> None:
    s = Statistics(ranks)
    x = s.input()
    s.fd.add_output(s.fd.ops.sum(x, [2]))
    s.fd.add_output(s.fd.ops.max(x, [2]))
    variance, _ = s.fd.ops.var_mean(x, [2])
    s.fd.add_output(variance)
    s.check([s.data.sum(2), s.data.amax(2), s.data.var(2)])


@pytest.mark.parametrize("ranks", RANKS)
def test_inputs_of_any_strides(ranks: int) -> None:
    """No promise about memory is given, and none is needed."""
    s = Statistics(ranks)
    variance, mean = s.fd.ops.var_mean(s.input(contiguity=False), [2], correction=1)
    s.fd.add_output(variance)
    s.fd.add_output(mean)
    s.check(torch.var_mean(s.data, 2))


@pytest.mark.parametrize("ranks", RANKS)
def test_a_result_that_is_sharded_on_a_kept_axis(ranks: int) -> None:
    """The operand is replicated: each rank reduces the rows that it keeps."""
    s = Statistics(ranks)
    x = s.fd.define_tensor([s.batch, -1, s.features], contiguity=True)
    total = s.fd.ops.sum(x, [2])
    s.fd.add_output(total)
    x.set_device_mesh(s.mesh)
    total.set_device_mesh(s.mesh)
    total.outer_split(1, ranks)
    total.axis(1).parallelize(MESH_X)
    s.check([s.data.sum(2)])


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 2), (2, 4), (3, 2)])
def test_batch_on_a_second_mesh_axis(shape: tuple[int, int]) -> None:
    """Data parallel on mesh_y, sequence parallel on mesh_x."""
    rows, columns = shape
    mesh = DeviceMesh(torch.arange(rows * columns).reshape(shape))
    fd = FusionDefinition()
    x = fd.define_tensor([-1, -1, 24], contiguity=True)
    variance, mean = fd.ops.var_mean(x, [2], correction=1, keepdim=True)
    fd.add_output(fd.ops.mul(fd.ops.sub(x, mean), fd.ops.rsqrt(variance)))
    fd.add_output(variance)
    x.set_device_mesh(mesh)
    x.outer_split(1, columns)
    x.axis(1).parallelize(MESH_X)
    x.outer_split(0, rows)
    x.axis(0).parallelize(MESH_Y)
    data = torch.randn(rows * 2, columns * 3, 24)
    wanted_variance, wanted_mean = torch.var_mean(data, 2, keepdim=True)
    wanted = [(data - wanted_mean) * wanted_variance.rsqrt(), wanted_variance]
    for rank, outputs in enumerate(simulate(fd, [data])):
        for output, whole in zip(outputs, wanted, strict=True):
            assert isinstance(output, DistributedTensor)
            row, column = divmod(rank, columns)
            block = whole.chunk(rows, 0)[row].chunk(columns, 1)[column]
            torch.testing.assert_close(output.local, block, rtol=1e-4, atol=1e-5)
            assert output.axis_sharded_on(MESH_X) == 1
            assert output.axis_sharded_on(MESH_Y) == 0
    assert fd.fec.communications() == ()


# Memory order of a result.


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_memory_order_of_a_sharded_product(ranks: int, order: tuple[int, int, int]) -> None:
    """What the user wants of a result's strides is what the result has."""
    fd = FusionDefinition()
    mesh = DeviceMesh(range(ranks))
    x = fd.define_tensor([2, 5, 8])
    weight = fd.define_tensor([8, ranks * 3])
    product = fd.ops.matmul(x, weight)
    fd.add_output(product)
    x.set_device_mesh(mesh)
    for tensor, axis in ((weight, 1), (product, 2)):
        tensor.set_device_mesh(mesh)
        tensor.outer_split(axis, ranks)
        tensor.axis(axis).parallelize(MESH_X)
    logical = product.get_logical_domain()
    product.set_allocation_domain([logical[axis] for axis in order], True)
    inputs = [torch.randint(-4, 4, shape).float() for shape in ((2, 5, 8), (8, ranks * 3))]
    whole = inputs[0] @ inputs[1]
    for rank, (output,) in enumerate(simulate(fd, inputs)):
        assert isinstance(output, DistributedTensor)
        assert torch.equal(output.local, whole.chunk(ranks, 2)[rank])
        strides = output.local.stride()
        assert tuple(sorted(range(3), key=lambda axis: -strides[axis])) == order
        assert output.local.permute(order).is_contiguous()
    assert fd.fec.communications() == ()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_memory_order_of_a_kernel(order: tuple[int, int]) -> None:
    """By hand or automatically scheduled, in the order of the loops or as said."""
    data = torch.randn(5, 33)
    for manual in (False, True):
        fd = FusionDefinition()
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.exp(x)
        fd.add_output(y)
        y.reorder({0: order.index(0)})
        fd.sched.set_allocation_as_loop(y)
        (result,) = fd.manual_execute([data]) if manual else fd.execute([data])
        torch.testing.assert_close(result, data.exp())
        assert result.permute(order).is_contiguous()
