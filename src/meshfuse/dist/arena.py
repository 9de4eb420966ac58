"""Memory that the ranks of a team read from one another, and the flags that order their uses.

Every rank has the same window of memory, cut into slots. All ranks count the uses of slots alike,
for they run one program: a use has the same number and slot on all. Flags only grow: each holds the
number of the last use for which it was raised, and who waits, waits for that number or more. For
each slot there are two flags for each peer:

    ready   raised by the rank that has written the slot, in the memory of each of its readers
    done    raised by a reader, in the memory of the rank whose slot it has read

A slot is written again when all readers of its last use have raised `done`. As slots take turns,
that was some time ago, and no rank waits. Nothing here knows of GPUs: `Link` does what is to be
done, in the order of the caller's stream.

What is recorded once may be done again without the arena; a Course then keeps it up to date.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch

from meshfuse.base.errors import InvariantError

FIRST_SLOTS = 4
"""Uses that may be under way at once, before more are needed: beside those that last."""

_STEPS = 4
"""Slot sizes between two powers of two: few sizes, so that memory stays as it is after a while."""
_LEAST_BYTES = 1 << 20
_FAR = 1 << 30
_MOST_TENSORS = 1024
"""Views of windows that are kept for later uses."""


class Window(Protocol):
    """Memory of the same size on each rank of a team."""

    def part(self, place: int, start: int, length: int) -> torch.Tensor:
        """Bytes of the rank at `place`, as this rank reaches them."""
        ...


class Link(Protocol):
    """What an arena needs of the device that it is on. What is ordered goes onto the current
    stream: flags in rows, each at its `flush`."""

    def open_window(self, size: int) -> Window:
        """A window of `size` bytes on each rank; all ranks of the team open it together."""
        ...

    def raise_flag(self, place: int, flag: int, value: int) -> None:
        """Set a flag in the memory of the rank at `place` when all before it is done."""
        ...

    def await_flag(self, flag: int, value: int) -> None:
        """Go on when this rank's flag is `value` or more."""
        ...

    def flush(self, *, is_beside: bool = False) -> None:
        """Flags that were raised or awaited here are on the stream when this returns. `is_beside`:
        where the stream records, what comes next does not wait for flags that are only raised."""
        ...

    def forget(self) -> None:
        """Flags that were raised or awaited since the last flush were not meant."""
        ...

    def release(self, flags: int, value: int) -> None:
        """Raise this rank's first flags at once, whatever other threads are about to flush."""
        ...

    def settle(self) -> None:
        """Block the host until all that was issued is done."""
        ...

    def stream(self) -> Any:
        """The current stream."""
        ...

    def follow(self, stream: Any) -> None:
        """What comes next on the current stream begins after all that `stream` has so far."""
        ...


@final
@dataclass(slots=True, eq=False)
class Use:
    """A slot of a window for one chunk: the bytes from `start` on.

    `stream`: which it was taken on. `readers`: the places that are told to read it. `pins`: how
    often it will still be asked for; the slot is not used again before. `lasts`: it is pinned
    until the program gives it back, while others come and go.
    """

    number: int
    slot: int
    window: Window
    start: int
    stream: Any
    pins: int = 0
    lasts: bool = False
    readers: tuple[int, ...] = ()
    tensor: torch.Tensor | None = None


def slot_bytes(wanted: int) -> int:
    """The size of slots for chunks of `wanted` bytes."""
    size = _LEAST_BYTES
    while size < wanted:
        size *= 2
    step = size // (2 * _STEPS)
    while size > _LEAST_BYTES and size - step >= wanted:
        size -= step
    return size


@final
@dataclass(slots=True, eq=False, repr=False)
class Arena:
    """The slots of one rank, at `place` of a team of `ranks`. `most_slots`: there are flags for."""

    place: int
    ranks: int
    link: Link
    most_slots: int
    _window: Window | None = None
    _size: int = 0
    _count: int = 0
    _last: int = -1  # the slot that was taken last
    _enlarged: int = 0
    _uses: list[Use | None] = field(default_factory=lambda: [None] * FIRST_SLOTS)
    _tensors: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)

    def take(self, most_bytes: int, pins: int = 0, *, lasts: bool = False) -> Use:
        """A slot for a chunk of up to `most_bytes`, which all ranks take alike.

        What was in it has been read, by the readers and by this rank. `pins`, `lasts`: see Use.
        Raises MemoryError where there are no flags for more slots.
        """
        slot, slots = self._free_slot(), self._slots_wanted(lasts)
        if slot is None:
            slots = max(slots, 2 * len(self._uses))
        if self._window is None or most_bytes > self._size or slots > len(self._uses):
            self._enlarge(most_bytes, slots)
            slot = self._free_slot()
        assert self._window is not None and slot is not None
        self._await_readers(self._uses[slot])
        self._count += 1
        self._last = slot
        start = slot * self._size
        use = Use(self._count, slot, self._window, start, self.link.stream(), pins, lasts)
        self._uses[slot] = use
        return use

    def _free_slot(self) -> int | None:
        """The next slot in turn that no use is pinned to. Counted from the last one: by numbers of
        uses a slot behind a pinned one would come twice in a row, and wait for its readers."""
        slots = len(self._uses)
        for step in range(slots):
            slot = (self._last + 1 + step) % slots
            use = self._uses[slot]
            if use is None or not use.pins:
                return slot
        return None

    def _await_readers(self, last: Use | None) -> None:
        if last is None:
            return
        if last.stream != self.link.stream():
            self.link.follow(last.stream)
        for reader in last.readers:
            self.link.await_flag(self._flag(last, reader, is_done=True), last.number)

    def _slots_wanted(self, lasts: bool) -> int:
        """So many that one more use, and as many as before beside those that last, find theirs."""
        if not lasts:
            return len(self._uses)
        lasting = sum(use is not None and use.lasts and use.pins > 0 for use in self._uses)
        return max(len(self._uses), FIRST_SLOTS + lasting + 1)

    def _enlarge(self, most_bytes: int, slots: int) -> None:
        """Rare, as sizes only grow. A pinned use keeps its old window, which is read yet."""
        for last in self._uses:
            if last is not None and not last.pins:
                self._await_readers(last)
        self.flush()
        self.link.settle()
        if slots > self.most_slots:
            raise MemoryError(f"{slots} chunks of {most_bytes} bytes are under way at once")
        self._uses = [use if use is not None and use.pins else None for use in self._uses]
        self._uses += [None] * (slots - len(self._uses))
        self._size = max(self._size, slot_bytes(most_bytes))
        self._window = self.link.open_window(slots * self._size)
        self._enlarged += 1
        self._tensors.clear()  # and with them the old window

    def hold(
        self, use: Use, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """This rank's memory of a use, as a dense tensor that is to be written."""
        self.flush()
        use.tensor = self._memory(use, self.place, tuple(shape), tuple(strides), dtype)
        return use.tensor

    def _memory(
        self,
        use: Use,
        place: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Memory of a use as a dense tensor, the same one each time: slots are few, and views take
        long to make."""
        key = (use.window, place, use.start, shape, strides, dtype)
        found = self._tensors.get(key)
        if found is None:
            if len(self._tensors) == _MOST_TENSORS:
                self._tensors.clear()
            length = math.prod(shape) * dtype.itemsize
            flat = use.window.part(place, use.start, length).view(dtype)
            found = self._tensors[key] = flat.as_strided(shape, strides)
        return found

    def find(self, tensor: torch.Tensor) -> Use | None:
        """The use that `hold` gave this very tensor for, while it lasts."""
        return next((use for use in self._uses if use is not None and use.tensor is tensor), None)

    def publish(self, use: Use, readers: tuple[int, ...]) -> None:
        """This rank has written its memory of a use; each of `readers` pulls it once. They are told
        at the next `flush`."""
        use.readers = readers
        for reader in readers:
            self.link.raise_flag(reader, self._flag(use, self.place, is_done=False), use.number)

    def pull(self, use: Use, owner: int, out: torch.Tensor) -> None:
        """Copy what the rank at place `owner` has published for a use into a dense tensor. It is
        told at the next `flush`."""
        self.link.await_flag(self._flag(use, owner, is_done=False), use.number)
        self.flush()
        if out.numel():
            memory = self._memory(use, owner, out.shape, out.stride(), out.dtype)
            out.copy_(memory, non_blocking=True)
        self.link.raise_flag(owner, self._flag(use, self.place, is_done=True), use.number)

    def flush(self, *, is_beside: bool = False) -> None:
        """Put the flags on the stream that were raised or awaited since the last time: see
        Link.flush."""
        self.link.flush(is_beside=is_beside)

    def _flag(self, use: Use, place: int, *, is_done: bool) -> int:
        """The flag of a slot that the rank at `place` raises."""
        return (2 * use.slot + is_done) * self.ranks + place

    def release(self) -> None:
        """Let all that waits here go on, for what will not come; what is read then has no worth."""
        self.link.release(2 * len(self._uses) * self.ranks, self._count + _FAR)

    def state(self) -> tuple[object, ...]:
        """All that the next uses depend on: those that begin alike have the same slots, memory and
        flags, and differ in their numbers. First, how often there was a new window: what depends on
        an earlier one will not come again."""
        readers = [None if use is None else (use.readers, use.pins) for use in self._uses]
        return self._enlarged, self._last, *readers


@final
class Course:
    """The uses of one call, recorded from here on; also of others that begin in this state.

    `end` it or `undo` it, before anything else is done with the arena: as yet it was not made.
    From `_begun` to `_ended` slots took turns, `_left` is what they then have.
    """

    __slots__ = ("_arena", "_base", "_before", "_begun", "_ended", "_left", "_length")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._base = arena._count
        self._begun = self._ended = arena._last
        self._before = list(arena._uses)
        self._left: tuple[tuple[int, Use], ...] = ()
        self._length = 0

    def undo(self) -> None:
        """Leave the arena as it was; of what was not flushed, nothing comes to a stream."""
        self._arena.link.forget()
        self._arena._count, self._arena._uses = self._base, list(self._before)
        self._arena._last = self._begun

    def end(self) -> None:
        """All is recorded; the arena is as it was. Raises InvariantError if a use will be asked for
        yet."""
        uses = [use for use in self._arena._uses if use is not None and use.number > self._base]
        if any(use.pins for use in uses):
            raise InvariantError("a call ends before all have come that ask for its chunks")
        self._left = tuple((use.number - self._base, use) for use in uses)
        self._length = self._arena._count - self._base
        self._ended = self._arena._last
        self.undo()

    def source(self, value: int) -> int:
        """Where the value of a flag comes from: of which use of the call, from 1; or -1 - k for the
        use that had slot k before."""
        if value > self._base:
            return value - self._base
        numbers = [None if use is None else use.number for use in self._before]
        return -1 - numbers.index(value)

    def repeat(self, sources: Sequence[int]) -> list[int]:
        """Count the call as made, on the current stream, by what has recorded it: the values that
        flags from these sources have this time."""
        arena = self._arena
        base, uses, stream = arena._count, arena._uses, arena.link.stream()
        values = [base + source if source > 0 else _number(uses[-1 - source]) for source in sources]
        for step, use in self._left:
            last = uses[use.slot]
            if last is not None and last.stream != stream:
                arena.link.follow(last.stream)
            number, readers = base + step, use.readers
            uses[use.slot] = Use(number, use.slot, use.window, use.start, stream, readers=readers)
        arena._count, arena._last = base + self._length, self._ended
        return values


def _number(use: Use | None) -> int:
    assert use is not None
    return use.number
