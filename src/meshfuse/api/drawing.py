"""Pictures of who holds what: the parts that text and SVG share, and the text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, product
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.facts.ownership import Holders, Ownership, Piece, idle_ranks

MOST_PIECES = 32
"""Of one axis, in a picture."""
MOST_GRIDS = 24
"""Slices in a picture."""
MOST_NAMES = 8
"""Ranks of one cell that are listed one by one."""


@final
@frozen_dataclass
class Picture:
    """What is drawn: `title` says whose, `remarks` what must be known to read it."""

    title: str
    ownership: Ownership
    remarks: tuple[str, ...] = ()


@final
@frozen_dataclass
class Grid:
    """One slice of a tensor: rows and columns of cells. `at` says where the slice lies, or ""."""

    at: str
    rows: tuple[Piece, ...]
    columns: tuple[Piece, ...]
    holders: tuple[tuple[Holders, ...], ...]


def grids_of(ownership: Ownership) -> Iterator[Grid]:
    """The slices, in order. Of the axes in pieces, the last two are rows and columns."""
    down, across = grid_axes(ownership)
    others = [axis for axis in range(len(ownership.sizes)) if axis not in (down, across)]
    slices = product(*(ownership.pieces[axis] for axis in others))
    for chosen in islice(slices, MOST_GRIDS):
        outside = dict(zip(others, chosen, strict=True))
        rows = (Piece(0, 1),) if down is None else ownership.pieces[down]
        columns = (Piece(0, 1),) if across is None else ownership.pieces[across]
        holders = tuple(
            tuple(ownership.holders_of((*chosen, row, column)) for column in columns)
            for row in rows
        )
        yield Grid(_slice_text(ownership, outside), rows, columns, holders)


def grid_axes(ownership: Ownership) -> tuple[int | None, int | None]:
    """The axes that run down and across a grid; None for those that a tensor has not."""
    axes = range(len(ownership.sizes))
    in_pieces = [axis for axis in axes if len(ownership.pieces[axis]) > 1][-2:]
    whole = [axis for axis in reversed(axes) if axis not in in_pieces]
    chosen = sorted((in_pieces + whole)[:2])
    return (None, *chosen)[-2] if chosen else None, chosen[-1] if chosen else None


def _slice_text(ownership: Ownership, outside: dict[int, Piece]) -> str:
    """`[2:4, :, :]`; "" where there is one slice."""
    if all(len(ownership.pieces[axis]) == 1 for axis in outside):
        return ""
    parts = (str(outside.get(axis, ":")) for axis in range(len(ownership.sizes)))
    return f"[{', '.join(parts)}]"


def axis_text(ownership: Ownership, axis: int | None) -> str:
    return "" if axis is None else f"axis {axis} ({ownership.sizes[axis]})"


def holders_text(holders: Holders, functions: Sequence[str]) -> str:
    """The ranks of a cell: replicas with commas, the terms of a sum with pluses.

    `0, 4`     `0+1`     `max(0, 1)`     `0, 8 .. 1016 (128)`
    """
    if not holders:
        return "every rank"
    if not functions:
        return ranks_text([replica[0] for replica in holders])
    return _joined([_terms_text(terms, functions) for terms in holders])


def _terms_text(terms: Sequence[int], functions: Sequence[str]) -> str:
    if set(functions) == {"sum"}:
        return _joined(list(map(str, terms)), "+")
    return f"{'/'.join(dict.fromkeys(functions))}({ranks_text(terms)})"


def ranks_text(ranks: Sequence[int]) -> str:
    """`0, 1, 2`; many at a constant distance as `0, 8 .. 1016 (128)`."""
    distances = {b - a for a, b in pairwise(ranks)}
    if len(ranks) > MOST_NAMES and len(distances) == 1:
        return f"{ranks[0]}, {ranks[1]} .. {ranks[-1]} ({len(ranks)})"
    return _joined(list(map(str, ranks)))


def _joined(names: Sequence[str], by: str = ", ") -> str:
    if len(names) <= MOST_NAMES:
        return by.join(names)
    return f"{by.join(names[:2])}{by}..{by}{names[-1]} ({len(names)})"


def remarks_on(picture: Picture) -> list[str]:
    """How to read the picture, and what is not in it."""
    ownership = picture.ownership
    partial = ownership.sharding.partial
    lines = [
        f"ranks along {owner} hold terms of a {function}" for owner, function in partial.items()
    ]
    idle = idle_ranks(ownership)
    if idle:
        lines.append(f"nothing on {'rank' if len(idle) == 1 else 'ranks'} {ranks_text(idle)}")
    for axis, is_cut in enumerate(ownership.is_cut):
        if is_cut:
            last = ownership.pieces[axis][-1].stop
            lines.append(f"axis {axis} goes on behind {last} of {ownership.sizes[axis]}")
    down, across = grid_axes(ownership)
    others = (p for axis, p in enumerate(ownership.pieces) if axis not in (down, across))
    slices = math.prod(map(len, others))
    if slices > MOST_GRIDS:
        lines.append(f"{slices - MOST_GRIDS} more slices are not drawn")
    return [*lines, *picture.remarks]


# Text.


def draw_text(picture: Picture) -> str:
    """A title, then each slice as a table of ranks.

    axis 1 (8)   0:4  4:8
    axis 0 (4)  +----+----+
            0:2 | 0  | 1  |
            2:4 | 2  | 3  |
                +----+----+
    """
    ownership = picture.ownership
    lines = [picture.title]
    for grid in grids_of(ownership):
        lines += ["", *([grid.at] if grid.at else []), *_grid_lines(ownership, grid)]
    remarks = remarks_on(picture)
    return "\n".join([*lines, *([""] if remarks else []), *remarks])


def _grid_lines(ownership: Ownership, grid: Grid) -> Iterator[str]:
    down, across = grid_axes(ownership)
    functions = tuple(ownership.sharding.partial.values())
    cells = [[holders_text(holders, functions) for holders in row] for row in grid.holders]
    heads = ["" if across is None else str(piece) for piece in grid.columns]
    labels = ["" if down is None else str(piece) for piece in grid.rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    titles = axis_text(ownership, down), axis_text(ownership, across)
    margin = max(map(len, (*labels, *titles)))
    border = "+".join(["", *("-" * (width + 2) for width in widths), ""])
    if across is not None:
        spread = (f" {head:{width}} " for head, width in zip(heads, widths, strict=True))
        yield f"{titles[1]:{margin}}  {' '.join(spread)}".rstrip()
    yield f"{titles[0]:{margin}} {border}"
    for label, row in zip(labels, cells, strict=True):
        padded = (f" {cell:{width}} " for cell, width in zip(row, widths, strict=True))
        yield f"{label:>{margin}} |{'|'.join(padded)}|"
    yield f"{'':{margin}} {border}"
