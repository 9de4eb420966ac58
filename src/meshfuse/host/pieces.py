"""A memory as boxes: what of it has been written, which indices lie where, what is summed there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.host.indices import Indices, Terms, joined

Box = tuple[tuple[int, int], ...]
"""First place and end, axis by axis."""


def is_empty(box: Box) -> bool:
    return any(low >= high for low, high in box)


def common(box: Box, other: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    return None if is_empty(found) else found


def without(box: Box, taken: Box) -> Iterator[Box]:
    """The rest of a box in pieces; `taken` lies in it."""
    for axis, ((low, high), (first, end)) in enumerate(zip(box, taken, strict=True)):
        for side in ((low, first), (end, high)):
            if side[0] < side[1]:
                yield (*taken[:axis], side, *box[axis + 1 :])


@final
@frozen_dataclass
class Piece:
    """A box that has been written, and the terms of the sum that is there; None: not known."""

    box: Box
    terms: Terms | None


@final
@frozen_dataclass
class Value:
    """What is read or written: the indices of each axis, None where not known, and its terms."""

    axes: tuple[Indices | None, ...]
    terms: Terms | None = ()

    def without(self, axis: int) -> Value:
        """With nothing known of an axis."""
        return Value((*self.axes[:axis], None, *self.axes[axis + 1 :]), self.terms)


@final
@dataclass(slots=True, eq=False, repr=False)
class Pieces:
    """A memory of some lengths. `is_placed`: which indices lie where was known in advance; else it
    is learned from what is written."""

    lengths: tuple[int, ...]
    is_placed: bool
    axes: list[dict[tuple[int, int], Indices]]
    pieces: list[Piece] = field(default_factory=list[Piece])

    @staticmethod
    def placed(axes: Sequence[Indices]) -> Pieces:
        lengths = tuple(map(len, axes))
        return Pieces(lengths, True, [{(0, len(found)): found} for found in axes])

    @staticmethod
    def learning(lengths: Sequence[int]) -> Pieces:
        return Pieces(tuple(lengths), False, [{} for _ in lengths])

    @staticmethod
    def written(lengths: Sequence[int]) -> Pieces:
        """Of which nothing is known but that it has been written."""
        found = Pieces.learning(lengths)
        found.write(found.whole, Value((None,) * len(found.lengths), None))
        return found

    @property
    def whole(self) -> Box:
        return tuple((0, length) for length in self.lengths)

    def indices(self, axis: int, low: int, high: int) -> Indices | None:
        """Those of an axis between two places; None where not all are known."""
        known = self.axes[axis]
        if (low, high) in known:
            return known[low, high]
        found: list[Indices] = []
        for (first, end), indices in sorted(known.items(), key=lambda item: item[0]):
            if first <= low < end:
                found.append(indices.part(low - first, min(end, high) - first))
                low = min(end, high)
        return joined(found) if found and low >= high else None

    def value(self, box: Box) -> Value:
        """What has been written to a box. Of sums that differ, one that is not complete."""
        axes = tuple(self.indices(axis, *side) for axis, side in enumerate(box))
        if len(self.pieces) == 1:
            return Value(axes, self.pieces[0].terms)
        sums = [piece.terms for piece in self.pieces if common(piece.box, box) is not None]
        terms = next((found for found in sums if found), None if None in sums else ())
        return Value(axes, terms)

    def in_box(self, box: Box) -> tuple[Piece, ...]:
        """What has been written, of which some is in a box."""
        return tuple(piece for piece in self.pieces if common(piece.box, box) is not None)

    def unwritten(self, box: Box) -> Box | None:
        """Some part of a box that nothing has been written to."""
        left = [] if is_empty(box) or any(piece.box == box for piece in self.pieces) else [box]
        for piece in self.pieces:
            rest: list[Box] = []
            for part in left:
                taken = common(part, piece.box)
                rest += [part] if taken is None else without(part, taken)
            left = rest
        return left[0] if left else None

    def write(self, box: Box, value: Value) -> None:
        """Take the place of what was there."""
        if is_empty(box):
            return
        for axis, ((low, high), indices) in enumerate(zip(box, value.axes, strict=True)):
            if not self.is_placed and indices is not None and len(indices) == high - low:
                self.axes[axis].setdefault((low, high), indices)
        kept: list[Piece] = []
        for piece in self.pieces:
            taken = common(piece.box, box)
            if taken is None:
                kept.append(piece)
            else:
                kept += (Piece(rest, piece.terms) for rest in without(piece.box, taken))
        self.pieces = [*_beside(kept, Piece(box, value.terms))]


def _beside(pieces: Sequence[Piece], new: Piece) -> Iterator[Piece]:
    """All of them, with what follows on another along one axis as one piece with it."""
    for piece in pieces:
        both = _as_one(piece, new)
        if both is None:
            yield piece
        else:
            new = both
    yield new


def _as_one(piece: Piece, other: Piece) -> Piece | None:
    sides = zip(piece.box, other.box, strict=True)
    axes = [axis for axis, (mine, theirs) in enumerate(sides) if mine != theirs]
    if len(axes) != 1 or piece.terms != other.terms:
        return None
    (low, high), (first, end) = piece.box[axes[0]], other.box[axes[0]]
    if high != first and end != low:
        return None
    side = (min(low, first), max(high, end))
    return Piece((*piece.box[: axes[0]], side, *piece.box[axes[0] + 1 :]), piece.terms)
