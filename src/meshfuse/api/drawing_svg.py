"""Pictures of who holds what, as SVG: self-contained, one colour for what the same ranks hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from typing import Final, final
from xml.sax.saxutils import escape

from meshfuse.api.drawing import (
    Grid,
    Picture,
    axis_text,
    grid_axes,
    grids_of,
    holders_text,
    ranks_text,
    remarks_on,
)
from meshfuse.facts.ownership import Holders, Ownership, Piece

# Pixels. A character of the font is at most CHARACTER wide.
CHARACTER: Final = 7.5
LINE: Final = 20
MARGIN: Final = 16
PADDING: Final = 8
CELL_HEIGHT: Final = 30
STRETCH: Final = 240
"""Shared by the columns of a grid by their sizes, and by the rows, on top of what text needs."""
SWATCH: Final = 12
MOST_ENTRIES: Final = 64
"""Of the legend."""

_FONT: Final = "font-family='ui-monospace, Menlo, Consolas, monospace' font-size='12'"
_TURN: Final = 0.381966
"""Of the circle, between one hue and the next: the golden angle keeps neighbours apart."""


@final
@dataclass(slots=True, eq=False, repr=False)
class _Sheet:
    """The drawing so far: elements from the top down, and the extent of the widest."""

    elements: list[str]
    height: float = MARGIN
    width: float = 0.0

    def text(self, x: float, y: float, text: str, anchor: str = "start", style: str = "") -> None:
        """`y` is the middle of the line."""
        self.elements.append(
            f"<text x='{x:g}' y='{y + 4:g}' text-anchor='{anchor}'{style}>{escape(text)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, name: str) -> None:
        self.elements.append(
            f"<rect class='{name}' x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' "
            f"fill='{fill}' stroke='#444'/>"
        )
        self.width = max(self.width, x + width)

    def line(self, text: str, style: str = "") -> None:
        """A line of text by itself."""
        self.text(MARGIN, self.height + LINE / 2, text, style=style)
        self.height += LINE
        self.width = max(self.width, MARGIN + _length(text))


def draw_svg(picture: Picture) -> str:
    """A title, each slice as a grid, a legend of the ranks, and remarks."""
    ownership, sheet = picture.ownership, _Sheet([])
    functions = tuple(ownership.sharding.partial.values())
    sheet.line(picture.title, " font-weight='bold'")
    colours: dict[Holders, str] = {}
    for grid in grids_of(ownership):
        for row in grid.holders:
            for holders in row:
                colours.setdefault(holders, _colour(len(colours)))
        _draw_grid(sheet, ownership, grid, colours, functions)
    sheet.height += LINE / 2
    _draw_legend(sheet, colours)
    for remark in remarks_on(picture):
        sheet.line(remark)
    width, height = math.ceil(sheet.width + MARGIN), math.ceil(sheet.height + MARGIN)
    return "\n".join(
        (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
            f"viewBox='0 0 {width} {height}' {_FONT} fill='#111'>",
            f"<title>{escape(picture.title)}</title>",
            f"<rect width='{width}' height='{height}' fill='#fff'/>",
            *sheet.elements,
            "</svg>",
        )
    )


def _draw_grid(
    sheet: _Sheet,
    ownership: Ownership,
    grid: Grid,
    colours: dict[Holders, str],
    functions: Sequence[str],
) -> None:
    down, across = grid_axes(ownership)
    cells = [[holders_text(holders, functions) for holders in row] for row in grid.holders]
    labels = ["" if down is None else str(piece) for piece in grid.rows]
    titles = axis_text(ownership, down), axis_text(ownership, across)
    widths = _widths(grid.columns, list(zip(*cells, strict=True)), is_axis=across is not None)
    heights = [CELL_HEIGHT + extra for extra in _stretch(grid.rows)]
    left = MARGIN + PADDING + max(map(_length, (*labels, *titles)))
    sheet.height += LINE / 2
    if grid.at:
        sheet.line(f"slice {grid.at}")
    for title in filter(None, reversed(titles)):
        sheet.text(MARGIN, sheet.height + LINE / 2, title)
        sheet.height += LINE
    if across is not None:
        for piece, x, width in zip(grid.columns, _starts(left, widths), widths, strict=True):
            sheet.text(x + width / 2, sheet.height - LINE / 2, str(piece), "middle")
    for row, (label, height) in enumerate(zip(labels, heights, strict=True)):
        middle = sheet.height + height / 2
        sheet.text(left - PADDING, middle, label, "end")
        for column, (x, width) in enumerate(zip(_starts(left, widths), widths, strict=True)):
            colour = colours[grid.holders[row][column]]
            sheet.box(x, sheet.height, width, height, colour, name="cell")
            sheet.text(x + width / 2, middle, cells[row][column], "middle")
        sheet.height += height


def _draw_legend(sheet: _Sheet, colours: dict[Holders, str]) -> None:
    """A swatch for all that the same ranks hold, by the first of these."""
    for holders in sorted(colours)[:MOST_ENTRIES]:
        top = sheet.height + (LINE - SWATCH) / 2
        sheet.box(MARGIN, top, SWATCH, SWATCH, colours[holders], name="swatch")
        ranks = sorted(rank for replica in holders for rank in replica)
        named = f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}" if ranks else "every rank"
        sheet.text(MARGIN + SWATCH + PADDING, sheet.height + LINE / 2, named)
        sheet.width = max(sheet.width, MARGIN + SWATCH + PADDING + _length(named))
        sheet.height += LINE
    if len(colours) > MOST_ENTRIES:
        sheet.line(f"and {len(colours) - MOST_ENTRIES} more")


def _widths(
    pieces: Sequence[Piece], texts: Sequence[Sequence[str]], *, is_axis: bool
) -> list[float]:
    """Of columns: room for their texts, and a share by size."""
    heads = [str(piece) if is_axis else "" for piece in pieces]
    rooms = (
        2 * PADDING + max(map(_length, (head, *column)))
        for head, column in zip(heads, texts, strict=True)
    )
    return [room + extra for room, extra in zip(rooms, _stretch(pieces), strict=True)]


def _stretch(pieces: Sequence[Piece]) -> list[float]:
    total = sum(piece.stop - piece.start for piece in pieces)
    return [STRETCH * (piece.stop - piece.start) / max(total, 1) / 2 for piece in pieces]


def _starts(first: float, sizes: Sequence[float]) -> Iterator[float]:
    for size in sizes:
        yield first
        first += size


def _length(text: str) -> float:
    return CHARACTER * len(text)


def _colour(number: int) -> str:
    """Light enough for black text on it."""
    lightness = 0.82 - 0.08 * (number // 12 % 3)
    parts = hls_to_rgb(number * _TURN % 1, lightness, 0.65)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)
