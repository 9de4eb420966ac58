"""Programs whose all-reduces can be in place, with what they compute: what tests of that share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from host_loops import chunks, define, dense
from meshfuse import FusionDefinition, TensorView
from meshfuse.facts.overlap_form import PLAIN, Overlap
from sharded_runs import X, Y, integers, mesh_of, place


@dataclass(frozen=True)
class Reduced:
    """A program for `d` ranks, or twice as many, its whole inputs, and the value of its result,
    which all ranks have."""

    fd: FusionDefinition
    inputs: list[torch.Tensor]
    wanted: torch.Tensor
    form: Overlap = PLAIN


def row_parallel(d: int, rows: int = 8, columns: int = 5) -> Reduced:
    """x @ w, of which each rank has terms; the sum is returned."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, rows, 4 * d), dense(fd, 4 * d, columns)
        y = fd.ops.matmul(x, w)
        place(mesh, {1: X}, x)
        place(mesh, {0: X}, w)
        place(mesh, {}, y)
        fd.add_output(y)

    x, w = integers(rows, 4 * d), integers(4 * d, columns)
    return Reduced(define(build), [x, w], x @ w)


def in_chunks(d: int, rows: int = 8, columns: int = 5) -> Reduced:
    """Chunk by chunk, each of them a chunk of the result."""
    found = row_parallel(d, rows, columns)
    return Reduced(found.fd, found.inputs, found.wanted, Overlap.chunks(2))


def activated_in_chunks(d: int) -> Reduced:
    """Chunk by chunk, and read in the loop only: chunks are memory of the iteration."""
    return _read_in_a_loop(d, 7, lambda fd, y: fd.ops.relu(y), torch.relu)


def added_over_a_loop(d: int) -> Reduced:
    """Each iteration reduces its chunk over the ranks, and adds it to a sum."""
    return _read_in_a_loop(
        d, 6, lambda fd, y: fd.ops.sum(fd.ops.relu(y), [0]), lambda y: y.relu().sum(0)
    )


def _read_in_a_loop(
    d: int,
    rows: int,
    read: Callable[[FusionDefinition, TensorView], TensorView],
    wanted: Callable[[torch.Tensor], torch.Tensor],
) -> Reduced:
    """What is made of a product, in three chunks, none of which is there outside of the loop."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, rows, 4 * d), dense(fd, 4 * d, 5)
        y = fd.ops.matmul(x, w)
        z = read(fd, y)
        place(mesh, {1: X}, x)
        place(mesh, {0: X}, w)
        place(mesh, {}, y, z)
        chunks(z, 0, 3)
        fd.add_output(z)

    x, w = integers(rows, 4 * d), integers(4 * d, 5)
    return Reduced(define(build), [x, w], wanted(x @ w))


def along_two_axes(d: int) -> Reduced:
    """Reduced along one mesh axis, and the result along the other."""
    mesh = mesh_of(2, d)

    def build(fd: FusionDefinition) -> None:
        x = dense(fd, 4, 3 * d, 5)
        y = fd.ops.neg(fd.ops.sum(x, [0, 1]))
        place(mesh, {0: Y, 1: X}, x)
        place(mesh, {}, y)
        fd.add_output(y)

    x = integers(4, 3 * d, 5)
    return Reduced(define(build), [x], -x.sum([0, 1]))


def own_shards(case: Reduced, rank: int, d: int) -> list[torch.Tensor]:
    """Of x [.., 4 d] and w [4 d, ..] the rank's parts."""
    x, w = case.inputs
    return [x.chunk(d, 1)[rank].contiguous(), w.chunk(d, 0)[rank].contiguous()]


CASES: dict[str, Callable[[int], Reduced]] = {
    "row_parallel": row_parallel,
    "in_chunks": in_chunks,
    "activated_in_chunks": activated_in_chunks,
    "added_over_a_loop": added_over_a_loop,
    "along_two_axes": along_two_axes,
}
