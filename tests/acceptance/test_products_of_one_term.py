"""Contractions over an axis of size 1, as one operand says, and of the other a call: what cuts it
for the one, in chunks or between ranks, cuts it for the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import linear

from host_loops import STREAM, chunks
from meshfuse import FusionDefinition, TensorView
from meshfuse.host.check import check_host_program
from sharded_runs import X, integers, mesh_of, place, run, without_kernels

Cut = Callable[[TensorView], None]
SIZES = [(1, -1), (-1, 1), (1, 1), (-1, -1)]
"""What is said of the terms of either operand."""


def uncut(tensor: TensorView) -> None:
    pass


def in_three(tensor: TensorView) -> None:
    """One term in three chunks: two have none."""
    chunks(tensor, 2, 3)


def one_by_one(tensor: TensorView) -> None:
    tensor.axis(2).parallelize(STREAM)


def product(name: str, sizes: tuple[int, int]) -> tuple[FusionDefinition, list[TensorView]]:
    """[6, k] by [k, 4] or [4, k]: the definition, and operands and result."""
    a, b = sizes
    with FusionDefinition() as fd:
        x = fd.define_tensor([6, a], contiguity=True)
        w = fd.define_tensor([b, 4] if name == "matmul" else [4, b], contiguity=True)
        y = fd.ops.matmul(x, w) if name == "matmul" else fd.ops.linear(x, w)
        fd.add_output(fd.ops.relu(y))
    return fd, [x, w, y]


def values(name: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    x, w = integers(6, 1), integers(1, 4)
    if name == "matmul":
        return [x, w], (x @ w).relu()
    return [x, w.mT.contiguous()], linear(x, w.mT).relu()


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("cut", [in_three, one_by_one])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ["matmul", "linear"])
def test_a_term_in_chunks(name: str, sizes: tuple[int, int], cut: Cut, kernels: bool) -> None:
    fd, tensors = product(name, sizes)
    cut(tensors[-1])
    inputs, wanted = values(name)
    with nullcontext() if kernels else without_kernels():
        assert torch.equal(fd.execute(inputs)[0], wanted)
    assert check_host_program(fd.fec.host_program()) == ()


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("placed", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("cut", [uncut, in_three])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ["matmul", "linear"])
def test_a_term_that_one_rank_has(
    name: str, sizes: tuple[int, int], cut: Cut, placed: tuple[bool, bool], d: int
) -> None:
    fd, (x, w, y) = product(name, sizes)
    mesh = mesh_of(d)
    place(mesh, {1: X} if placed[0] else {}, x)
    place(mesh, {0 if name == "matmul" else 1: X} if placed[1] else {}, w)
    place(mesh, {}, y)
    cut(y)
    inputs, wanted = values(name)
    run(fd, inputs, [wanted])
    assert check_host_program(fd.fec.host_program()) == ()
