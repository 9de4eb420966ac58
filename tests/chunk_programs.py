"""Programs in whose loops a chunk is one piece of the block of each rank: of what is gathered, of
what is scattered, and of sums that all ranks want."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from host_loops import chunks, dense
from meshfuse import FusionDefinition, TensorView
from sharded_runs import X, integers, mesh_of, place

COLUMNS = 5
KINDS = ("gather", "scatter", "reduce")


def pieces(tensor: TensorView, axis: int, blocks: int, count: int) -> None:
    """Loop over `count` pieces of each of `blocks` blocks of an axis."""
    tensor.outer_split(axis, blocks)
    chunks(tensor, axis + 1, count)


def product(
    kind: str, d: int, rows: int, count: int | None = None, *, activated: bool = False
) -> FusionDefinition:
    """Rows by columns, `rows` for each rank: of rows that are gathered, or terms of rows that are
    scattered or reduced. In `count` chunks if that is said."""
    mesh = mesh_of(d)
    with FusionDefinition() as fd:
        x, w = dense(fd, d * rows, inner(kind, d)), dense(fd, inner(kind, d), COLUMNS)
        y = fd.ops.matmul(x, w)
        if activated:
            y = fd.ops.relu(y)
        place(mesh, {0 if kind == "gather" else 1: X}, x)
        place(mesh, {} if kind == "gather" else {0: X}, w)
        place(mesh, {0: X} if kind == "scatter" else {}, y)
        if count is not None and kind == "gather":
            pieces(y, 0, d, count)
        elif count is not None:
            chunks(y, int(kind == "scatter"), count)
        fd.add_output(y)
    return fd


def inner(kind: str, d: int) -> int:
    """How long the axis is that is summed over: what is gathered is smaller than the product."""
    return 4 if kind == "gather" else 2 * d


def whole_inputs(kind: str, d: int, rows: int) -> list[torch.Tensor]:
    return [integers(d * rows, inner(kind, d)), integers(inner(kind, d), COLUMNS)]


def shards(kind: str, d: int, rows: int, rank: int) -> list[torch.Tensor]:
    """What a rank has of the inputs."""
    x, w = whole_inputs(kind, d, rows)
    if kind == "gather":
        return [x.chunk(d)[rank], w]
    return [x.chunk(d, 1)[rank].contiguous(), w.chunk(d)[rank]]


def parts(kind: str, value: torch.Tensor, d: int) -> Sequence[torch.Tensor]:
    """What each rank wants of the result."""
    return value.chunk(d) if kind == "scatter" else [value] * d
