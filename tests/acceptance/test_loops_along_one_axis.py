"""Several stream leaves along one axis, however it was split into them: loops within loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from host_loops import STREAM, define, dense, host_program, loops
from meshfuse import DistributedTensor, FusionDefinition, TensorView
from meshfuse.multidevice import simulate
from sharded_runs import X, integers, mesh_of, place, without_kernels

OUTER, INNER = TensorView.outer_split, TensorView.inner_split


@dataclass(frozen=True)
class Cuts:
    """Splits one after the other, each of the leaf at a place by a factor; and which leaves are on
    the stream then."""

    splits: tuple[tuple[Callable[[TensorView, int, int], object], int, int], ...]
    on_stream: tuple[int, ...]

    def apply(self, tensor: TensorView) -> None:
        for split, leaf, factor in self.splits:
            split(tensor, leaf, factor)
        for leaf in self.on_stream:
            tensor.axis(leaf).parallelize(STREAM)


ALL = {
    # [2@stream, 2@stream, ..], the second split off the rest
    "halves of halves": Cuts(((OUTER, 0, 2), (OUTER, 1, 2)), (0, 1)),
    # [2@stream, 2, 3@stream, ..]: the first was split off what stands above the other
    "quarters in halves": Cuts(((OUTER, 0, 4), (OUTER, 0, 2), (OUTER, 2, 3)), (0, 2)),
    # [2@stream, 2@stream, ..], the first split off above the second
    "blocks one by one": Cuts(((OUTER, 0, 4), (OUTER, 0, 2)), (0, 1)),
    # [2@stream, 2, 2@stream, ..], where the first split is by what is inside
    "blocks of an inner split": Cuts(((OUTER, 0, 4), (INNER, 0, 2), (OUTER, 2, 2)), (0, 2)),
    # [2, 2@stream, rows, 1@stream]: what the second cuts is a row already
    "single rows": Cuts(((OUTER, 0, 2), (OUTER, 1, 2), (INNER, 2, 1)), (1, 3)),
    # [2, 2@stream, 5@stream, ..] of 12 rows: of 3 rows five chunks, of which two have none
    "chunks without rows": Cuts(((OUTER, 0, 2), (OUTER, 1, 2), (OUTER, 2, 5)), (1, 2)),
}
SPLIT_OFF_ABOVE = ("quarters in halves", "blocks one by one", "blocks of an inner split")


def build(cuts: str, rows: int, fd: FusionDefinition) -> None:
    product = fd.ops.matmul(dense(fd, rows, 4), dense(fd, 4, 5))
    result = fd.ops.relu(product)
    ALL[cuts].apply(result)
    fd.add_output(result)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("rows", [12, 24])
@pytest.mark.parametrize("cuts", ALL)
def test_there_are_two_loops_for_all(cuts: str, rows: int, kernels: bool) -> None:
    fd = define(partial(build, cuts, rows))
    inputs = [integers(rows, 4), integers(4, 5)]
    found = loops(host_program(fd, inputs, kernels=kernels))
    assert len(found) >= 2 and found[1] in found[0].body
    expected = (inputs[0] @ inputs[1]).relu()
    if kernels:
        assert torch.equal(fd.execute(inputs)[0], expected)
    else:
        with without_kernels():
            assert torch.equal(fd.execute(inputs)[0], expected)


@pytest.mark.parametrize("rows", [1, 2, 7, 11, 13])
@pytest.mark.parametrize("cuts", ALL)
def test_any_number_of_rows(cuts: str, rows: int) -> None:
    """Chunks that are not all of one size are not cut any further: there is a loop less."""
    fd = define(partial(build, cuts, rows))
    inputs = [integers(rows, 4), integers(4, 5)]
    host_program(fd, inputs, kernels=False)
    with without_kernels():
        assert torch.equal(fd.execute(inputs)[0], (inputs[0] @ inputs[1]).relu())


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("cuts", SPLIT_OFF_ABOVE)
def test_sums_over_ranks(cuts: str, d: int) -> None:
    mesh, rows = mesh_of(d), 24
    with FusionDefinition() as fd:
        x, w = dense(fd, rows, 2 * d), dense(fd, 2 * d, 5)
        y = fd.ops.matmul(x, w)
        place(mesh, {1: X}, x)
        place(mesh, {0: X}, w)
        place(mesh, {}, y)
        ALL[cuts].apply(y)
        fd.add_output(y)
    inputs = [integers(rows, 2 * d), integers(2 * d, 5)]
    for [found] in simulate(fd, inputs):
        assert isinstance(found, DistributedTensor)
        assert torch.equal(found.local, inputs[0] @ inputs[1])


@pytest.mark.parametrize("d", [1, 2, 3])
def test_ranks_have_a_part_of_each_chunk(d: int) -> None:
    """[2@stream, 2, d@mesh, ..], the stream leaf split off what stands above the ranks."""
    mesh, rows = mesh_of(d), 8 * d
    with FusionDefinition() as fd:
        x = dense(fd, rows, 4)
        y = fd.ops.relu(x)
        for tensor in (x, y):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(0, 4)
            tensor.outer_split(0, 2)
            tensor.outer_split(2, d)
            tensor.axis(2).parallelize(mesh.axis(0))
        y.axis(0).parallelize(STREAM)
        fd.add_output(y)
    value = integers(rows, 4)
    parts = value.relu().reshape(4, d, 2, 4)
    for rank, [found] in enumerate(simulate(fd, [value])):
        assert isinstance(found, DistributedTensor)
        assert torch.equal(found.local, parts[:, rank].reshape(8, 4))
