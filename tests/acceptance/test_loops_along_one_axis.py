"""Several stream leaves along one axis, however it was split into them: loops within loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from host_loops import STREAM, define, dense, host_program, loops
from meshfuse import DistributedTensor, FusionDefinition, TensorView
from meshfuse.multidevice import simulate
from sharded_runs import X, integers, mesh_of, place, without_kernels

Cuts = Callable[[TensorView], None]


def on_stream(tensor: TensorView, *leaves: int) -> None:
    for leaf in leaves:
        tensor.axis(leaf).parallelize(STREAM)


def halves_of_halves(tensor: TensorView) -> None:
    """[2@stream, 2@stream, ..], the second split off the rest."""
    tensor.outer_split(0, 2)
    tensor.outer_split(1, 2)
    on_stream(tensor, 0, 1)


def quarters_in_halves(tensor: TensorView) -> None:
    """[2@stream, 2, 3@stream, ..]: the first was split off what stands above the other."""
    tensor.outer_split(0, 4)
    tensor.outer_split(0, 2)
    tensor.outer_split(2, 3)
    on_stream(tensor, 0, 2)


def blocks_one_by_one(tensor: TensorView) -> None:
    """[2@stream, 2@stream, ..], the first split off above the second."""
    tensor.outer_split(0, 4)
    tensor.outer_split(0, 2)
    on_stream(tensor, 0, 1)


def blocks_of_an_inner_split(tensor: TensorView) -> None:
    """[2@stream, 2, 2@stream, ..], where the first split is by what is inside."""
    tensor.outer_split(0, 4)
    tensor.inner_split(0, 2)
    tensor.outer_split(2, 2)
    on_stream(tensor, 0, 2)


def single_rows(tensor: TensorView) -> None:
    """[2, 2@stream, rows, 1@stream]: what the second cuts is a row already."""
    tensor.outer_split(0, 2)
    tensor.outer_split(1, 2)
    tensor.inner_split(2, 1)
    on_stream(tensor, 1, 3)


def outer_loop_of_an_empty_rest(tensor: TensorView) -> None:
    """[2, 2@stream, 5@stream, ..] of 12 rows: of 3 rows five chunks, of which two have none."""
    tensor.outer_split(0, 2)
    tensor.outer_split(1, 2)
    tensor.outer_split(2, 5)
    on_stream(tensor, 1, 2)


ALL: Sequence[Cuts] = (
    halves_of_halves,
    quarters_in_halves,
    blocks_one_by_one,
    blocks_of_an_inner_split,
    single_rows,
    outer_loop_of_an_empty_rest,
)


def build(cuts: Cuts, rows: int, fd: FusionDefinition) -> None:
    product = fd.ops.matmul(dense(fd, rows, 4), dense(fd, 4, 5))
    result = fd.ops.relu(product)
    cuts(result)
    fd.add_output(result)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("rows", [12, 24])
@pytest.mark.parametrize("cuts", ALL)
def test_there_are_two_loops_for_all(cuts: Cuts, rows: int, kernels: bool) -> None:
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
def test_any_number_of_rows(cuts: Cuts, rows: int) -> None:
    """Chunks that are not all of one size are not cut any further: there is a loop less."""
    fd = define(partial(build, cuts, rows))
    inputs = [integers(rows, 4), integers(4, 5)]
    host_program(fd, inputs, kernels=False)
    with without_kernels():
        assert torch.equal(fd.execute(inputs)[0], (inputs[0] @ inputs[1]).relu())


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("cuts", [quarters_in_halves, blocks_one_by_one, blocks_of_an_inner_split])
def test_sums_over_ranks(cuts: Cuts, d: int) -> None:
    mesh, rows = mesh_of(d), 24
    with FusionDefinition() as fd:
        x, w = dense(fd, rows, 2 * d), dense(fd, 2 * d, 5)
        y = fd.ops.matmul(x, w)
        place(mesh, {1: X}, x)
        place(mesh, {0: X}, w)
        place(mesh, {}, y)
        cuts(y)
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
        on_stream(y, 0)
        fd.add_output(y)
    value = integers(rows, 4)
    parts = value.relu().reshape(4, d, 2, 4)
    for rank, [found] in enumerate(simulate(fd, [value])):
        assert isinstance(found, DistributedTensor)
        assert torch.equal(found.local, parts[:, rank].reshape(8, 4))
