"""Parts of a tensor that are no single piece of memory: packed to be sent, unpacked on arrival.

What a rank sends to another, or gets from it, is a region of its local tensor: all combinations of
some places along each axis. A packed collective moves regions one after the other in flat memory,
padded to equal lengths where the collective wants equal blocks. Packing says where everything is;
it depends on sizes alone and is made once for them.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.facts.holdings import Runs, run_length, runs_of, shape_outside


@final
class Region:
    """All combinations of places along each axis of a tensor.

    Axes with one range of places are sliced, without a copy; others need their places as a list,
    kept on the device.
    """

    __slots__ = ("_lists", "_slices", "shape")

    def __init__(self, places: Sequence[Runs], device: torch.device) -> None:
        self.shape = tuple(map(run_length, places))
        self._slices = tuple(_slice(runs) for runs in places)
        self._lists = tuple(
            (axis, torch.tensor(list(itertools.chain(*runs)), dtype=torch.int64, device=device))
            for axis, runs in enumerate(places)
            if len(runs) > 1
        )

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_sliced(self) -> bool:
        """Whether `read` gives a view."""
        return not self._lists

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The region of a tensor, in its shape; a view if it is sliced."""
        part = tensor[self._slices]
        for axis, places in self._lists:
            part = part.index_select(axis, places)
        return part

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Set the region of a tensor to values of its shape."""
        target = tensor[self._slices]
        if not self._lists:
            target.copy_(values)
        elif len(self._lists) == 1:
            ((axis, places),) = self._lists
            target.index_copy_(axis, places, values)
        else:
            target[self._combinations()] = values

    def _combinations(self) -> tuple[torch.Tensor, ...]:
        """Lists for all axes that broadcast against one another."""
        lists, (_, first) = dict(self._lists), self._lists[0]
        ndim = len(self.shape)
        return tuple(
            lists.get(axis, torch.arange(size, device=first.device)).view(
                [-1 if dim == axis else 1 for dim in range(ndim)]
            )
            for axis, size in enumerate(self.shape)
        )


def _slice(runs: Runs) -> slice:
    if not runs:
        return slice(0, 0)
    return slice(runs[0].start, runs[0].stop, runs[0].step) if len(runs) == 1 else slice(None)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Flat memory of so many `elements`, from where the tensor `begin` does; the last ones, as many
    as `padding`, belong to no region."""

    begin: torch.Tensor
    elements: int
    padding: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Regions of a tensor of `shape`, one after the other in flat memory; None for nothing.

    Each takes `lengths` elements there, at least as many as it has, and lies in it by `order`:
    axes, slowest first.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    regions: tuple[Region | None, ...]
    lengths: tuple[int, ...]

    @property
    def elements(self) -> int:
        """What all take in flat memory."""
        return sum(self.lengths)

    @property
    def padding(self) -> int:
        """What they take in flat memory beside their elements."""
        regions = (region for region in self.regions if region is not None)
        return self.elements - sum(region.elements for region in regions)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The regions of a tensor as flat memory: its own, if they lie there like that."""
        memory = self.memory_in(tensor, room_behind(tensor))
        if memory is not None:
            return memory
        memory = tensor.new_empty(self.elements)
        for region, block in self._pairs(memory):
            block.copy_(region.read(tensor))
        return memory

    def unpack(self, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        """Put the regions from flat memory where they belong in a tensor."""
        for region, block in self._pairs(memory):
            region.write(tensor, block)

    def memory_in(self, tensor: torch.Tensor, room: int = 0) -> torch.Tensor | None:
        """The part of a tensor's memory that is as the flat memory would be; None without one.

        Padding at the end may lie behind the tensor, where there is `room` for so many elements.
        """
        if self.elements == 0:
            return tensor.new_empty(0)
        piece = self._piece_of(tensor)
        if piece is None or piece.padding > room:
            return None
        return piece.begin.as_strided((piece.elements,), (1,))

    def padding_behind(self, tensor: torch.Tensor) -> int | None:
        """How many elements of padding come behind a tensor that is all the rest of the flat
        memory, as it lies; None if it is not."""
        if tensor.numel() == 0:
            return self.elements
        piece = self._piece_of(tensor)
        if piece is None or piece.begin.storage_offset() != tensor.storage_offset():
            return None
        return piece.padding if piece.elements == tensor.numel() + piece.padding else None

    def _piece_of(self, tensor: torch.Tensor) -> _Piece | None:
        """Where the regions of a tensor lie as in the flat memory, if they do."""
        first: torch.Tensor | None = None
        begin = place = filled = 0
        for region, length in zip(self.regions, self.lengths, strict=True):
            if region is not None and region.elements:
                if not region.is_sliced:
                    return None
                part = region.read(tensor).permute(self.order)
                if first is None:
                    first, begin = part, int(part.storage_offset())
                    place += begin
                if part.storage_offset() != place or not part.is_contiguous():
                    return None
                filled = place + region.elements
            place += length
        if first is None:
            return None
        return _Piece(first, place - begin, place - filled)

    def _pairs(self, memory: torch.Tensor) -> Iterator[tuple[Region, torch.Tensor]]:
        """Each region that has elements, and its block of the memory in its shape."""
        back = [self.order.index(axis) for axis in range(len(self.order))]
        for region, block in zip(self.regions, memory.split(self.lengths), strict=True):
            if region is not None and region.elements:
                shape = [region.shape[axis] for axis in self.order]
                yield region, block[: region.elements].view(shape).permute(back)


def room_behind(tensor: torch.Tensor) -> int:
    """Elements that there are in memory behind a dense tensor, whatever they are."""
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    return int(whole - tensor.storage_offset() - tensor.numel())


@final
@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Where what a rank sends lies in `src`, and what it receives in `out`.

    One block goes to, or comes from, each rank of the team, in its order. Where all get the same,
    or get it reduced, there is one block only. `kept` are equal regions of `src` and `out` that the
    rank does not send to itself but copies. `has_room`: the memory of `out` goes on as far as the
    padding of what is received.
    """

    sends: Blocks
    receives: Blocks
    kept: tuple[Region, Region] | None = None
    has_room: bool = False

    def received_in(self, out: torch.Tensor) -> torch.Tensor | None:
        """The memory of `out`, if that is as what is received; else None."""
        return self.receives.memory_in(out, self.receives.padding if self.has_room else 0)

    def keep(self, src: torch.Tensor, out: torch.Tensor) -> None:
        """Copy what the rank has already."""
        if self.kept is not None:
            source, target = self.kept
            target.write(out, source.read(src))


def places_of(part: Runs, whole: Runs) -> Runs:
    """Where the indices of `part` stand among those of `whole`, from 0; one range if they can be.

    Raises InvariantError for an index that does not stand there.
    """
    if len(whole) == 1:
        return tuple(_places_in_range(run, whole[0]) for run in part)
    if any(run.step != 1 for run in part):
        numbers = {index: place for place, index in enumerate(itertools.chain(*whole))}
        try:
            return runs_of(numbers[index] for run in part for index in run)
        except KeyError as missing:
            raise _not_within(part, whole) from missing
    starts = [run.start for run in whole]
    firsts = [0, *itertools.accumulate(map(len, whole))]
    places: list[range] = []
    for run in part:
        number = bisect_right(starts, run.start) - 1
        if number < 0 or run.stop > whole[number].stop:
            raise _not_within(part, whole)
        first = firsts[number] + run.start - starts[number]
        if places and places[-1].stop == first:
            places[-1] = range(places[-1].start, first + len(run))
        else:
            places.append(range(first, first + len(run)))
    return tuple(places)


def _places_in_range(part: range, whole: range) -> range:
    if part[0] not in whole or part[-1] not in whole or (len(part) > 1 and part.step % whole.step):
        raise _not_within((part,), (whole,))
    first = whole.index(part[0])
    step = max(part.step // whole.step, 1)
    return range(first, first + step * (len(part) - 1) + 1, step)


def _not_within(part: Runs, whole: Runs) -> InvariantError:
    return InvariantError(f"a rank is to move indices {part} of an axis, but it has {whole}")


@final
@frozen_dataclass
class Holding:
    """The indices that a rank holds of each axis of a tensor, or a part of them; `is_outside`:
    nothing, as it is not in the tensor's mesh."""

    axes: tuple[Runs, ...]
    is_outside: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        if self.is_outside:
            return shape_outside(len(self.axes))
        return tuple(map(run_length, self.axes))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def region(self, part: Sequence[Runs], device: torch.device) -> Region:
        """Where the indices of a part stand in the local tensor of this holding."""
        return Region(list(map(places_of, part, self.axes)), device)


def pack_gather(
    parts: Sequence[Holding], own: int, whole: Holding, order: Sequence[int], device: torch.device
) -> Packing:
    """Of an all-gather: `parts` of the team, of which the rank has the one numbered `own`."""
    length = max(part.elements for part in parts)
    sends = _blocks(parts[own], [parts[own]], [length], order, device)
    receives = _blocks(whole, parts, [length] * len(parts), order, device)
    return Packing(sends, receives)


def pack_scatter(
    parts: Sequence[Holding], own: int, whole: Holding, order: Sequence[int], device: torch.device
) -> Packing:
    """Of a reduce-scatter: all have a term of the whole, and the rank gets part `own`, reduced."""
    length = max(part.elements for part in parts)
    sends = _blocks(whole, parts, [length] * len(parts), order, device)
    receives = _blocks(parts[own], [parts[own]], [length], order, device)
    return Packing(sends, receives)


@final
@frozen_dataclass
class RankExchange:
    """An exchange as one rank sees it: the global indices sent and received, by the other rank.

    What it has and keeps stands under its own number on both sides.
    """

    rank: int
    sent: Mapping[int, Sequence[Runs]]
    received: Mapping[int, Sequence[Runs]]


def pack_exchange(
    exchange: RankExchange,
    have: Holding,
    want: Holding,
    team: Sequence[int],
    order: Sequence[int],
    device: torch.device,
) -> Packing:
    """Of an exchange, for the rank that has and wants this."""
    kept = exchange.sent.get(exchange.rank)

    def of_team(parts: Mapping[int, Sequence[Runs]]) -> list[Holding | None]:
        found = {
            rank: Holding(tuple(part)) for rank, part in parts.items() if rank != exchange.rank
        }
        return [found.get(member) for member in team]

    def blocks(held: Holding, parts: Sequence[Holding | None]) -> Blocks:
        lengths = [0 if part is None else part.elements for part in parts]
        return _blocks(held, parts, lengths, order, device)

    return Packing(
        blocks(have, of_team(exchange.sent)),
        blocks(want, of_team(exchange.received)),
        None if kept is None else (have.region(kept, device), want.region(kept, device)),
    )


def _blocks(
    held: Holding,
    parts: Sequence[Holding | None],
    lengths: Sequence[int],
    order: Sequence[int],
    device: torch.device,
) -> Blocks:
    regions = tuple(None if part is None else held.region(part.axes, device) for part in parts)
    return Blocks(held.shape, tuple(order), regions, tuple(lengths))
