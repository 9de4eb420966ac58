"""Shardings as DTensor's placements."""

from __future__ import annotations

import pytest

from index_sets import digits
from meshfuse.base.errors import Unsupported
from meshfuse.dist.placements import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    placements_of,
)
from meshfuse.expr import const, symbol
from meshfuse.facts.sharding import Digit, Sharding
from meshfuse.ir.mesh import ParallelType, make_mesh

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
LINE, GRID = make_mesh([0, 1]), make_mesh([[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        (Sharding(None, (digits(4),)), ()),
        (Sharding(LINE, (digits(4),)), (Replicate(),)),
        (Sharding(LINE, (digits(4), digits((2, X), 3))), (Shard(1),)),
        (Sharding(LINE, (digits(3, (2, X), 5),)), (StridedShard(0, 3),)),
        (Sharding(LINE, (digits(4),), {X: "sum"}), (Partial("sum"),)),
        # mesh axes are listed first to last: mesh_y, then mesh_x
        (Sharding(GRID, (digits((3, X), 2), digits((2, Y), 2))), (Shard(1), Shard(0))),
        (Sharding(GRID, (digits((2, Y), (3, X), 2),)), (Shard(0), Shard(0))),
        (Sharding(GRID, (digits((3, X), (2, Y), 2),)), (StridedShard(0, 3), Shard(0))),
        (Sharding(GRID, (digits((2, Y), 5, (3, X)),)), (Shard(0), StridedShard(0, 5))),
    ],
)
def test_placements(sharding: Sharding, expected: tuple[Placement, ...]) -> None:
    assert placements_of(sharding) == expected


def test_symbolic_extent_above_a_mesh_axis() -> None:
    axis = (Digit(symbol("i0", low=1)), Digit(const(2), X))
    with pytest.raises(Unsupported, match="i0 above mesh_x must be a number"):
        placements_of(Sharding(LINE, (axis,)))
