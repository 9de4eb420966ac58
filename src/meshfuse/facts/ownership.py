"""A tensor cut into the cells that ranks hold whole: what pictures of a sharding show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from itertools import islice, product
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.facts.digits import Digits, Sharding
from meshfuse.facts.holdings import held, rank_coordinates
from meshfuse.ir.mesh import DeviceMesh, ParallelType

Place = tuple[tuple[ParallelType, int], ...]
"""Coordinates along some mesh axes."""

Holders = tuple[tuple[int, ...], ...]
"""The ranks of a cell: a tuple for each replica, with the rank of each term of a reduction."""


@final
@frozen_dataclass
class Piece:
    """Consecutive indices of an axis that the ranks at `place` hold, and no others."""

    start: int
    stop: int
    place: Place = ()

    def __str__(self) -> str:
        return str(self.start) if self.stop - self.start == 1 else f"{self.start}:{self.stop}"


@final
@frozen_dataclass
class Ownership:
    """Each axis in pieces, in order; a cell is one piece of each axis.

    `is_cut` says for each axis whether there are more pieces than are listed.
    """

    sharding: Sharding
    sizes: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    is_cut: tuple[bool, ...]
    holders: Mapping[Place, Holders]

    def holders_of(self, cell: Sequence[Piece]) -> Holders:
        """The ranks that hold a cell, replicas and terms in the order of the mesh."""
        return self.holders[_in_order(pair for piece in cell for pair in piece.place)]


def ownership_of(sharding: Sharding, sizes: Sequence[int], most: int) -> Ownership:
    """Who holds which cells of a tensor of `sizes`, at most `most` pieces of each axis listed.

    Digits must be constant. Without a mesh the only cell has no holders.
    """
    mesh = sharding.mesh
    if mesh is None:
        whole = tuple((Piece(0, size),) for size in sizes)
        return Ownership(sharding, tuple(sizes), whole, (False,) * len(whole), {(): ()})
    found = [
        tuple(islice(_pieces_of(digits, size, mesh), most + 1))
        for digits, size in zip(sharding.axes, sizes, strict=True)
    ]
    return Ownership(
        sharding,
        tuple(sizes),
        tuple(pieces[:most] for pieces in found),
        tuple(len(pieces) > most for pieces in found),
        _holders_by_place(sharding, mesh),
    )


def idle_ranks(ownership: Ownership) -> tuple[int, ...]:
    """Ranks of the mesh that hold no element."""
    sharding, mesh = ownership.sharding, ownership.sharding.mesh
    if mesh is None:
        return ()
    axes = tuple(zip(sharding.axes, ownership.sizes, strict=True))
    return tuple(
        rank
        for rank, place in rank_coordinates(mesh).items()
        if not all(held(digits, size, place) for digits, size in axes)
    )


def _pieces_of(digits: Digits, size: int, mesh: DeviceMesh) -> Iterator[Piece]:
    """The pieces of an axis in order; one empty piece for an axis of size 0."""
    owners = tuple(digit.owner for digit in digits if digit.owner is not None)
    if not owners or not size:
        yield Piece(0, size, tuple((owner, 0) for owner in owners))
        return
    places = product(*(range(mesh.axis_size(owner)) for owner in owners))
    streams = (_pieces_at(digits, size, tuple(zip(owners, at, strict=True))) for at in places)
    yield from merge(*streams, key=lambda piece: piece.start)


def _pieces_at(digits: Digits, size: int, place: Place) -> Iterator[Piece]:
    for run in held(digits, size, dict(place)):
        if run.step == 1:
            yield Piece(run.start, run.stop, place)
        else:
            yield from (Piece(index, index + 1, place) for index in run)


def _holders_by_place(sharding: Sharding, mesh: DeviceMesh) -> dict[Place, Holders]:
    owners = {digit.owner for digits in sharding.axes for digit in digits}
    cells: dict[Place, dict[Place, list[int]]] = {}
    for rank, at in rank_coordinates(mesh).items():
        cell = _in_order((owner, k) for owner, k in at.items() if owner in owners)
        replica = tuple(
            (owner, k)
            for owner, k in at.items()
            if owner not in owners and owner not in sharding.partial
        )
        cells.setdefault(cell, {}).setdefault(replica, []).append(rank)
    return {cell: tuple(map(tuple, replicas.values())) for cell, replicas in cells.items()}


def _in_order(pairs: Iterator[tuple[ParallelType, int]]) -> Place:
    return tuple(sorted(pairs, key=lambda pair: pair[0].name))
