"""Loops over chunks on meshes: chunks are gathered, added up and scattered as they are made."""

from __future__ import annotations

import pytest
import torch

from golden_text import GoldenCheck
from host_loops import STREAM, chunks, define, dense, gathered_rows, host_program, loops
from meshfuse import DataType, DistributedTensor, FusionDefinition
from meshfuse.api.planning import plan
from meshfuse.host.nodes import Chunk
from meshfuse.host.printer import print_host_program
from meshfuse.multidevice import Overlap, simulate
from sharded_runs import X, integers, kinds, mesh_of, own_part, place, posted, run


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
def test_chunks_are_gathered_and_multiplied(d: int) -> None:
    fd = gathered_rows(d, 3)
    a, b = integers(3, d, 2, 4), integers(4, 5)
    run(fd, [a, b], [a @ b])
    if d > 1:
        assert posted(fd) == [("all_gather", X, 32)]


def test_a_plan_counts_the_communications_of_all_iterations() -> None:
    """Of 2 rows for each rank: 3 times those of the 3 other ranks, 4 floats each."""
    found = plan(gathered_rows(4, 3), [None, None])
    assert [(each.kind, each.bytes) for each in found.communications] == [("all_gather", 96)] * 3


def test_an_explanation_says_how_often() -> None:
    fd = gathered_rows(2, 3)
    a, b = integers(3, 2, 2, 4), integers(4, 5)
    run(fd, [a, b], [a @ b])
    lines = [line.strip() for line in fd.explain().splitlines()]
    assert "0: all_gather over mesh_x of DeviceMesh{0 1}, 3 times" in lines
    assert "size  T0_j0 is 32 bytes on each rank; each rank receives 96 in all" in lines


def test_the_program_that_gathers_and_multiplies_chunks(golden: GoldenCheck) -> None:
    fd = gathered_rows(2, 3)
    host = host_program(fd, [integers(3, 1, 2, 4), integers(4, 5)])
    golden("host_gather_matmul_chunks", print_host_program(host))


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
def test_chunks_of_rows_split_above_the_mesh(d: int) -> None:
    mesh, count = mesh_of(d), 3

    def build(fd: FusionDefinition) -> None:
        a, b = dense(fd, 2 * d * count, 4), dense(fd, 4, 5)
        c = fd.ops.relu(fd.ops.matmul(a, b))
        for tensor in (a, b, c):
            tensor.set_device_mesh(mesh)
        a.outer_split(0, count)
        a.outer_split(1, d)
        a.axis(1).parallelize(X)
        chunks(c, 0, count)
        fd.add_output(c)

    a, b = integers(2 * d * count, 4), integers(4, 5)
    run(define(build), [a, b], [(a @ b).relu()])


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_chunks_are_multiplied_and_added_up(d: int, axis: int) -> None:
    """The axis that is cut is not the one that the ranks share, and does not divide."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        a, b = dense(fd, 7, 4 * d), dense(fd, 4 * d, 5)
        c = fd.ops.matmul(a, b)
        place(mesh, {1: X}, a)
        place(mesh, {0: X}, b)
        c.set_device_mesh(mesh)
        chunks(c, axis, 3)
        fd.add_output(c)

    fd, a, b = define(build), integers(7, 4 * d), integers(4 * d, 5)
    run(fd, [a, b], [a @ b])
    if d > 1:
        assert [kind for kind, _, _ in posted(fd)] == ["all_reduce"]


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
def test_chunks_are_multiplied_and_scattered(d: int) -> None:
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        a, b = dense(fd, 6 * d, 4 * d), dense(fd, 4 * d, 5)
        c = fd.ops.matmul(a, b)
        place(mesh, {1: X}, a)
        place(mesh, {0: X}, b)
        c.set_device_mesh(mesh)
        c.outer_split(0, 3)
        c.outer_split(1, d)
        c.axis(1).parallelize(X)
        c.axis(0).parallelize(STREAM)
        fd.add_output(c)

    fd, a, b = define(build), integers(6 * d, 4 * d), integers(4 * d, 5)
    run(fd, [a, b], [a @ b])
    if d > 1:
        assert [kind for kind, _, _ in posted(fd)] == ["reduce_scatter"]


@pytest.mark.parametrize("d", [2, 3])
def test_blocks_that_are_no_chunks_are_gathered_as_a_whole(d: int) -> None:
    """Each rank has one block of rows: no chunk of the product has a part of each."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        a, b = dense(fd, 6 * d, 4), dense(fd, 4, 5)
        c = fd.ops.matmul(a, b)
        place(mesh, {0: X}, a)
        for tensor in (b, c):
            tensor.set_device_mesh(mesh)
        chunks(c, 0, 4)
        fd.add_output(c)

    fd, a, b = define(build), integers(6 * d, 4), integers(4, 5)
    run(fd, [a, b], [a @ b])
    assert posted(fd) == [("all_gather", X, 96)]


@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_a_rank_begins_with_the_chunk_of_its_own_number(d: int) -> None:
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        a, b = dense(fd, 2 * d + 1, 4), dense(fd, 4, 5)
        c = fd.ops.matmul(a, b)
        for tensor in (a, b, c):
            tensor.set_device_mesh(mesh)
        c.outer_split(0, d)
        c.swizzle1d(0, X)
        c.axis(0).parallelize(STREAM)
        fd.add_output(c)

    fd, a, b = define(build), integers(2 * d + 1, 4), integers(4, 5)
    run(fd, [a, b], [a @ b])
    assert posted(fd) == []
    if d == 3:
        [loop] = loops(host_program(fd, [a, b]))
        assert [str(n.start) for n in loop.body if isinstance(n, Chunk)] == [
            "3*((j0 + x_3_0) % 3)"
        ] * 2


def test_terms_of_one_row_in_more_chunks_than_rows() -> None:
    """Only the first iteration has the row."""
    mesh = mesh_of(3)

    def build(fd: FusionDefinition) -> None:
        x = dense(fd, 1, 12)
        y = fd.ops.sum(x, [1])
        place(mesh, {1: X}, x)
        place(mesh, {}, y)
        chunks(y, 0, 4)
        fd.add_output(y)

    fd, x = define(build), integers(1, 12)
    run(fd, [x], [x.sum(1)])
    assert kinds(fd) == [("all_reduce", X)]


@pytest.mark.parametrize("count", [2, 3])
def test_terms_of_16_bits_in_pieces(count: int) -> None:
    """Columns are scattered, and the terms of a chunk are copied from one order to another."""
    mesh = mesh_of(4)

    def build(fd: FusionDefinition) -> None:
        a, b = (
            fd.define_tensor(shape, contiguity=True, dtype=DataType.BFloat16)
            for shape in ([2, 4], [4, 12])
        )
        place(mesh, {0: X}, a, b)
        fd.add_output(fd.ops.matmul(a, b))

    a, b = integers(2, 4, dtype=torch.bfloat16), integers(4, 12, dtype=torch.bfloat16)
    fd = define(build)
    for rank, [found] in enumerate(simulate(fd, [a, b], overlap=Overlap.chunks(count))):
        assert isinstance(found, DistributedTensor)
        assert torch.equal(found.local, own_part(found, a @ b, rank))
    assert [str(loop.count) for loop in loops(fd.fec.host_program())] == [str(count)]
