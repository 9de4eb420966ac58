"""The frame of a kernel: the grid axes and tile axes that its loop nests share.

Nests that bind one grid type share that grid axis, and tile axes of equal size are shared as well:
each nest covers its own elements with them, and a value made in one nest serves another only at
equal indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import final

from meshfuse.base.errors import ScheduleError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, Symbol, const, symbol
from meshfuse.ir.axes import AxisName
from meshfuse.ir.mesh import ParallelType
from meshfuse.kernel.index import ragged_bounds, source_indices
from meshfuse.kernel.nests import Nest
from meshfuse.kernel.nodes import Bound, GridAxis, IndexName, Mask, TileAxis


@final
@frozen_dataclass
class Frame:
    """Grid axes by parallel type, tile axes by size and place among tiles of that size."""

    grid: Mapping[ParallelType, GridAxis]
    tiles: Mapping[tuple[int, int], TileAxis]

    def tile_axes_of(self, nest: Nest) -> tuple[TileAxis, ...]:
        """The tile axis of each tile group of `nest`."""
        return tuple(self.tiles[key] for key in _tile_keys(nest))

    def axes_missing_from(self, nest: Nest) -> tuple[GridAxis, ...]:
        """The grid axes that `nest` has no leaf for."""
        own = {bound for _, bound in nest.grid}
        return tuple(axis for bound, axis in self.grid.items() if bound not in own)

    def first_program_only(self, nest: Nest) -> Mask:
        """The bounds that leave one program of every grid axis missing from `nest`."""
        return tuple(Bound(grid_symbol(axis), const(1)) for axis in self.axes_missing_from(nest))


def frame_of(nests: Sequence[Nest], taken: frozenset[str]) -> Frame:
    """The frame of a kernel's nests, in names that are not `taken`.

    Raises ScheduleError where two nests bind one grid type to axes of different sizes, or one nest
    binds it twice.
    """
    widest = max(nests, key=lambda nest: len(nest.grid), default=None)
    grid: dict[ParallelType, GridAxis] = {}
    names = _fresh_names("g", taken)
    for nest in (*([] if widest is None else [widest]), *nests):
        seen: set[ParallelType] = set()
        for leaf, bound in nest.grid:
            if bound in seen:
                raise _grid_conflict(nest, leaf, bound, "is bound twice")
            seen.add(bound)
            if bound not in grid:
                grid[bound] = GridAxis(IndexName(next(names)), nest.extent(leaf))
            elif grid[bound].extent is not nest.extent(leaf):
                reason = f"runs over {grid[bound].extent} elsewhere, over {nest.extent(leaf)} here"
                raise _grid_conflict(nest, leaf, bound, reason)
    tiles: dict[tuple[int, int], TileAxis] = {}
    names = _fresh_names("n", taken)
    for nest in nests:
        for key in _tile_keys(nest):
            if key not in tiles:
                tiles[key] = TileAxis(IndexName(next(names)), key[0])
    return Frame(grid, tiles)


def _grid_conflict(nest: Nest, leaf: AxisName, bound: ParallelType, reason: str) -> ScheduleError:
    return ScheduleError(
        "grid-extent",
        nest.tensor,
        leaf,
        f"{bound} {reason}",
        "Bind each grid type once, to axes of one size in all tensors of the kernel.",
    )


def _fresh_names(letter: str, taken: frozenset[str]) -> Iterator[str]:
    return (name for name in (f"{letter}{k}" for k in count()) if name not in taken)


def _tile_keys(nest: Nest) -> list[tuple[int, int]]:
    keys: list[tuple[int, int]] = []
    for group in nest.tiles:
        occurrence = sum(size == group.size for size, _ in keys)
        keys.append((group.size, occurrence))
    return keys


# Positions in a nest.


def grid_symbol(axis: GridAxis) -> Symbol:
    return loop_symbol(axis.name, axis.extent)


def tile_symbol(axis: TileAxis) -> Symbol:
    return symbol(axis.name, 0, axis.size - 1)


def loop_symbol(name: IndexName, extent: IntExpr) -> Symbol:
    """The symbol of a loop over 0..extent-1, with what is known of its range.

    A loop of one iteration at most, or none, stays a symbol: what depends on it must not leave it.
    """
    last = None if extent.high is None or extent.high < 2 else extent.high - 1
    return symbol(name, 0, last)


@final
@frozen_dataclass
class Position:
    """A place in a nest: the indices of the axes known there, and the bounds of ragged splits."""

    indices: Mapping[AxisName, IntExpr]
    bounds: Mask


def position_in(frame: Frame, nest: Nest, path: Sequence[Symbol]) -> Position:
    """The position inside the outermost serial loops of `nest`, whose variables `path` holds."""
    leaves: dict[AxisName, IntExpr] = dict.fromkeys(nest.fixed, const(0))
    for leaf, bound in nest.grid:
        leaves[leaf] = grid_symbol(frame.grid[bound])
    for loop, variable in zip(nest.serial, path, strict=False):
        if loop.leaf is not None:
            leaves[loop.leaf] = variable
    for group, axis in zip(nest.tiles, frame.tile_axes_of(nest), strict=True):
        rest: IntExpr = tile_symbol(axis)
        for leaf, extent in reversed(tuple(zip(group.leaves, group.extents, strict=True))):
            leaves[leaf] = rest % extent if extent else const(0)
            rest = rest // extent if extent else const(0)
    indices = source_indices(nest.steps, nest.axes, leaves)
    return Position(indices, ragged_bounds(nest.steps, nest.axes, indices))


def is_never_empty(axis: GridAxis) -> bool:
    """Whether the grid axis is known to have a program for all sizes."""
    return (axis.extent.low or 0) >= 1
