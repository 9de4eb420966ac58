"""How many elements communications bring: always to the rank that receives most.

Counts are of numbers: symbolic sizes are taken as DIVISIBLE_SIZE, so that they depend on the
program alone. Where blocks are even no rank is visited: what parts have in common follows axis by
axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Final, final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, const
from meshfuse.facts.digits import Digit, Digits, Sharding
from meshfuse.facts.holdings import (
    Coordinates,
    Runs,
    held,
    rank_coordinates,
    run_length,
    runs_in_both,
)
from meshfuse.facts.nominal import nominal_value
from meshfuse.ir.mesh import DeviceMesh, ParallelType

DIVISIBLE_SIZE: Final = 15360
"""The size taken for one that is not known: 1024 * 15, so that most meshes divide it."""

_MOST_PLACES: Final = 2048
"""Places that are looked at one by one; beyond, only the first and last two of each mesh axis."""

_Radices = tuple[tuple[int, ParallelType | None], ...]


def nominal(extent: IntExpr) -> int:
    """The value of a size where each that is not known is the nominal one."""
    return nominal_value(extent, DIVISIBLE_SIZE)


def largest_part(axes: Sequence[Digits], sizes: Sequence[int]) -> int:
    """Elements of the largest part: the one of the first rank, as lower digits come first."""
    return math.prod(
        _count(_radices(digits), size, {}) for digits, size in zip(axes, sizes, strict=True)
    )


def gathered(
    before: Digits, after: Digits, mesh_axis: ParallelType, mesh: DeviceMesh, size: int
) -> int:
    """Indices of one axis that the first ranks lack, at most, before a gather along `mesh_axis`."""
    last = {mesh_axis: mesh.axis_size(mesh_axis) - 1}
    return _count(_radices(after), size, {}) - _count(_radices(before), size, last)


def exchanged(src: Sharding, dst: Sharding, sizes: Sequence[int]) -> int:
    """Elements of its part in `dst` that a rank lacks in `src`, at most.

    Where blocks are uneven, or both sides cut an axis in different ways, by looking at places on
    the mesh. For ranks on two meshes by looking at those on both; from 2048 on, none counts as
    having anything.
    """
    if src.mesh is None or dst.mesh is None:
        raise ValueError("a sharding without a mesh is not exchanged")
    if src.mesh != dst.mesh:
        return _between_meshes(src, src.mesh, dst, dst.mesh, sizes)
    cuts = zip(map(_radices, src.axes), map(_radices, dst.axes), sizes, strict=True)
    pairs = {(1, 1)}
    for group in _coupled([_Cut(have, want, size) for have, want, size in cuts]):
        found = _group_parts(group, src.mesh)
        pairs = _undominated({(d * wants, o * owns) for d, o in pairs for wants, owns in found})
    return max(wants - owns for wants, owns in pairs)


def _between_meshes(
    src: Sharding,
    src_mesh: DeviceMesh,
    dst: Sharding,
    dst_mesh: DeviceMesh,
    sizes: Sequence[int],
) -> int:
    if dst_mesh.size > _MOST_PLACES or set(src_mesh.ids).isdisjoint(dst_mesh.ids):
        return largest_part(dst.axes, sizes)
    senders = rank_coordinates(src_mesh)
    after, before = map(_nominal_digits, dst.axes), map(_nominal_digits, src.axes)
    ends, starts = tuple(zip(after, sizes, strict=True)), tuple(zip(before, sizes, strict=True))
    most = 0
    for rank, place in rank_coordinates(dst_mesh).items():
        wanted = [held(digits, n, place) for digits, n in ends]
        lacking = math.prod(map(run_length, wanted))
        if lacking > most and rank in senders:
            owned = [held(digits, n, senders[rank]) for digits, n in starts]
            both = (runs_in_both(a, b) for a, b in zip(wanted, owned, strict=True))
            lacking -= math.prod(map(run_length, both))
        most = max(most, lacking)
    return most


# Axis by axis.


@final
@frozen_dataclass
class _Cut:
    """How an axis is cut before and after: extents and owners of its digits."""

    have: _Radices
    want: _Radices
    size: int

    def owners(self) -> set[ParallelType]:
        """The mesh axes on whose coordinates it depends what a rank wants and has of that."""
        return set() if self.steady() is not None else _owners(self.have) | _owners(self.want)

    def steady(self) -> tuple[int, int] | None:
        """What every rank wants, and what each at least has of it; None where ranks differ.

        Where both sides own the same weights in different ways, their digits differ on some rank,
        which then has nothing. Not told for uneven parts, and for weights that do not divide.
        """
        sides = _spans(self.have), _spans(self.want)
        if any(spans[-1].high != self.size for spans in sides if spans):
            return None
        edges = sorted({1, self.size, *(span.low for spans in sides for span in spans)})
        wants = owns = 1
        for low, high in pairwise(edges):
            if low == 0 or high % low:
                return None
            have, want = (_span_at(low, spans) for spans in sides)
            owners = [span and span.owner for span in (have, want)]
            wants *= high // low if owners[1] is None else 1
            if owners == [None, None]:
                owns *= high // low
            elif have and want and None not in owners and have.part(low) != want.part(low):
                owns = 0
        return wants, owns


@final
@frozen_dataclass
class _Span:
    """A digit: it counts in steps of `low` and wraps at `high`."""

    low: int
    high: int
    owner: ParallelType | None

    def part(self, weight: int) -> tuple[ParallelType | None, int]:
        """Which part of the owner's coordinate stands at a weight."""
        return self.owner, weight // self.low


def _spans(radices: _Radices) -> list[_Span]:
    found: list[_Span] = []
    weight = 1
    for extent, owner in reversed(radices):
        found.append(_Span(weight, weight * extent, owner))
        weight *= extent
    return found


def _span_at(weight: int, spans: Sequence[_Span]) -> _Span | None:
    return next((span for span in spans if span.low <= weight < span.high), None)


def _coupled(cuts: Sequence[_Cut]) -> list[list[_Cut]]:
    """Axes in groups, of which each depends on coordinates of its own."""
    groups: list[tuple[set[ParallelType], list[_Cut]]] = []
    for cut in cuts:
        owners, members = cut.owners(), [cut]
        apart: list[tuple[set[ParallelType], list[_Cut]]] = []
        for known, group in groups:
            if known & owners:
                owners, members = owners | known, group + members
            else:
                apart.append((known, group))
        groups = [*apart, (owners, members)]
    return [members for _, members in groups]


def _deciding_places(group: Sequence[_Cut], mesh: DeviceMesh) -> Iterator[Coordinates]:
    """The coordinates at which a group of axes may be the one that lacks most."""
    owners = sorted(set[ParallelType]().union(*(cut.owners() for cut in group)), key=str)
    if len(group) == 1 and (group[0].have == group[0].want or not _owners(group[0].have)):
        yield {}  # Nothing of the axis is lacking: what counts is the largest part of it.
        return
    if len(group) == 1 and not _owners(group[0].want):
        yield {owner: mesh.axis_size(owner) - 1 for owner in owners}
        return
    ranges: list[Sequence[int]] = [range(mesh.axis_size(owner)) for owner in owners]
    if math.prod(map(len, ranges)) > _MOST_PLACES:
        ranges = [sorted({*numbers[:2], *numbers[-2:]}) for numbers in ranges]
    for numbers in product(*ranges):
        yield dict(zip(owners, numbers, strict=True))


def _group_parts(group: Sequence[_Cut], mesh: DeviceMesh) -> set[tuple[int, int]]:
    """What ranks want of a group of axes, and what they have of that; not if never decisive."""
    steady = group[0].steady() if len(group) == 1 else None
    if steady is not None:
        return {steady}
    return {_parts(group, place) for place in _deciding_places(group, mesh)}


def _parts(group: Sequence[_Cut], place: Coordinates) -> tuple[int, int]:
    """What a rank wants of a group of axes, and what it has of that. Missing coordinates are 0."""
    wants = owns = 1
    for cut in group:
        wants *= _count(cut.want, cut.size, place)
        owns *= _count_both(cut, place)
    return wants, owns


def _undominated(pairs: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Without those than which another wants no less and has no more."""
    kept: set[tuple[int, int]] = set()
    least: int | None = None
    for wants, owns in sorted(pairs, key=lambda pair: (-pair[0], pair[1])):
        if least is None or owns < least:
            kept.add((wants, owns))
            least = owns
    return kept


def _count_both(cut: _Cut, place: Coordinates) -> int:
    if cut.have == cut.want or not _owners(cut.have):
        return _count(cut.want, cut.size, place)
    if not _owners(cut.want):
        return _count(cut.have, cut.size, place)
    runs = (_runs(radices, cut.size, place) for radices in (cut.have, cut.want))
    return run_length(runs_in_both(*runs))


def _runs(radices: _Radices, size: int, place: Coordinates) -> Runs:
    places = {owner: place.get(owner, 0) for _, owner in radices if owner is not None}
    return held(tuple(Digit(const(extent), owner) for extent, owner in radices), size, places)


def _count(radices: _Radices, size: int, place: Coordinates) -> int:
    """As `held_count`, on numbers. Missing coordinates are 0."""
    count, rest = 0, size
    if size == 0:
        return 0
    weight = math.prod(extent for extent, _ in radices)
    local = math.prod(extent for extent, owner in radices if owner is None)
    for extent, owner in radices:
        weight //= extent
        if owner is None:
            local //= extent
            count += rest // weight * local
            rest %= weight
        else:
            rest = min(max(rest - place.get(owner, 0) * weight, 0), weight)
    return count + rest


def _owners(radices: _Radices) -> set[ParallelType]:
    return {owner for _, owner in radices if owner is not None}


def _nominal_digits(digits: Digits) -> Digits:
    return tuple(Digit(const(nominal(digit.extent)), digit.owner) for digit in digits)


def _radices(digits: Digits) -> _Radices:
    return tuple((nominal(digit.extent), digit.owner) for digit in digits)
