"""What a name shows of a memory: a box, or a piece of each of several blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.host.indices import ZERO, Indices, cut_row, in_a_row, joined
from meshfuse.host.pieces import Box, Pieces, Value

_Side = TypeVar("_Side")


@final
@frozen_dataclass
class Blocks:
    """A chunk of each of `count` equal blocks of an axis, where each of them begins at `start`."""

    axis: int
    count: int
    start: int
    length: int


@final
@frozen_dataclass
class Held:
    """A box of a memory; with `blocks` what these leave of it, and the name has an axis more: the
    block."""

    memory: Pieces
    box: Box
    blocks: Blocks | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the axes of the name."""
        found = tuple(high - low for low, high in self.box)
        if self.blocks is None:
            return found
        return _replaced(found, self.blocks.axis, (self.blocks.count, self.blocks.length))

    @property
    def boxes(self) -> tuple[Box, ...]:
        """What it shows, in the order of the blocks."""
        if self.blocks is None:
            return (self.box,)
        axis, count = self.blocks.axis, self.blocks.count
        low, high = self.box[axis]
        firsts = (low + k * ((high - low) // count) + self.blocks.start for k in range(count))
        sides = ((first, first + self.blocks.length) for first in firsts)
        return tuple(_replaced(self.box, axis, (side,)) for side in sides)

    def cut(self, axis: int, start: int, length: int, count: int | None) -> Held:
        """A chunk along an axis of the name, as far as there is something; with `count`, of each of
        so many blocks."""
        if self.blocks is not None:
            # What is cut twice is not followed: all of it counts as written.
            self.memory.write(self.box, Value((None,) * len(self.box), None))
            made = (length,) if count is None else (count, length)
            lengths = _replaced(self.lengths, axis, made)
            memory = Pieces.written(lengths)
            return Held(memory, memory.whole)
        low, high = self.box[axis]
        if count is not None:
            return Held(self.memory, self.box, Blocks(axis, count, start, length))
        side = (min(low + start, high), min(low + start + max(length, 0), high))
        return Held(self.memory, _replaced(self.box, axis, (side,)))

    def is_where(self, other: Held) -> bool:
        """Whether both names show the same places of one memory."""
        return self.memory is other.memory and self.boxes == other.boxes

    def has_terms_in_part(self) -> bool:
        """Whether something has been added to a part, and nothing to another that was cleared."""
        sums = [piece.terms for box in self.boxes for piece in self.memory.in_box(box)]
        return ZERO in sums and any(found != ZERO for found in sums)

    def unwritten(self) -> tuple[Box, Box] | None:
        """Some part that nothing has been written to, with the box in which it is."""
        found = ((self.memory.unwritten(box), box) for box in self.boxes)
        return next(((part, box) for part, box in found if part is not None), None)

    def wanted(self) -> tuple[Indices | None, ...]:
        """The indices of the axes of the memory that are there, as far as is known."""
        boxes = self.boxes or (self.box,)
        axes = [self.memory.indices(axis, *side) for axis, side in enumerate(boxes[0])]
        if self.blocks is not None:
            cut = self.blocks.axis
            parts = [self.memory.indices(cut, *box[cut]) for box in boxes]
            known = [part for part in parts if part is not None]
            axes[cut] = joined(known) if known and len(known) == len(parts) else None
        return tuple(axes)

    def extent(self, axis: int) -> int | None:
        """How many indices there are of which an axis of the name has some, as far as is known."""
        indices = self.wanted()[axis] if self.blocks is None else None
        return None if indices is None else indices.extent

    def value(self) -> Value:
        """What has been written there."""
        sums = [self.memory.value(box).terms for box in self.boxes]
        terms = next((found for found in sums if found), None if None in sums else ())
        axes = self.wanted()
        if self.blocks is not None:
            row = axes[self.blocks.axis]
            pair = cut_row(row, (self.blocks.count, self.blocks.length))
            axes = _replaced(axes, self.blocks.axis, pair)
        return Value(axes, terms)

    def in_memory(self, value: Value) -> Value:
        """The value of the name's axes as one of the memory's: blocks are one axis there."""
        if self.blocks is None:
            return value
        axis = self.blocks.axis
        row = in_a_row(value.axes[axis : axis + 2])
        return Value((*value.axes[:axis], row, *value.axes[axis + 2 :]), value.terms)

    def write(self, value: Value) -> None:
        """A value of the memory's axes."""
        first = 0
        for box in self.boxes:
            axes = value.axes
            if self.blocks is not None:
                row = axes[self.blocks.axis]
                part = None if row is None else row.part(first, first + self.blocks.length)
                axes = _replaced(axes, self.blocks.axis, (part,))
                first += self.blocks.length
            self.memory.write(box, Value(axes, value.terms))


def _replaced(sides: Sequence[_Side], axis: int, by: Sequence[_Side]) -> tuple[_Side, ...]:
    return (*sides[:axis], *by, *sides[axis + 1 :])
