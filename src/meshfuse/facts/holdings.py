"""Which indices a rank holds of an axis, and how many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from zlib import crc32

from meshfuse.base.errors import InvariantError
from meshfuse.expr import (
    IntExpr,
    Symbol,
    const,
    const_value,
    evaluate,
    floordiv,
    known_equal,
    maximum,
    minimum,
    mod,
    mul,
    symbol,
)
from meshfuse.facts.digits import Digit, Digits, is_whole, local_extent
from meshfuse.ir.mesh import DeviceMesh, ParallelType

Runs = tuple[range, ...]
"""Indices in increasing order: maximal runs of step 1, or one range of a larger step."""

Coordinates = Mapping[ParallelType, int]
"""Where a rank stands along each axis of its mesh."""


# Counting.


def is_even(digits: Sequence[Digit], extent: IntExpr) -> bool:
    """Whether ranks are known to hold equally many indices: the digits make up exactly the axis."""
    return is_whole(digits) or known_equal(_weight(digits), extent)


def held_count(
    digits: Sequence[Digit], extent: IntExpr, coordinates: Mapping[ParallelType, IntExpr]
) -> IntExpr:
    """How many indices of an axis the rank at `coordinates` holds; the local digits where even.

    [2@x, 4] over 7  ->  min(4, max(0, 7 - 4*x))     [4, 2@x] over 7  ->  3 + min(1, max(0, 1 - x))
    """
    if is_whole(digits):
        return extent
    if is_even(digits, extent):
        return local_extent(digits)
    count, rest = const(0), extent
    for position, digit in enumerate(digits):
        below = digits[position + 1 :]
        weight = _weight(below)
        if digit.owner is None:
            period = maximum(weight, 1)  # An axis of size 0 may have digits of extent 0.
            count += floordiv(rest, period) * local_extent(below)
            rest = mod(rest, period)
        else:
            first = mul(coordinates[digit.owner], weight)
            rest = minimum(maximum(rest - first, 0), weight)
    return count + rest


def coordinate_symbol(mesh: DeviceMesh, mesh_axis: ParallelType) -> Symbol:
    """The running rank's place along a mesh axis: `x_2x4_0` on a mesh of 2 x 4 ranks from 0 on.

    The name is a function of ids, shape and axis; meshes whose ids do not count up have a checksum.
    """
    letter = mesh_axis.name.removeprefix("mesh_")
    shape = "x".join(map(str, mesh.shape))
    first = mesh.ids[0]
    name = f"{letter if letter.isalpha() else 'm' + letter}_{shape}_{first}"
    if mesh.ids != tuple(range(first, first + mesh.size)):
        name += f"_{crc32(repr(mesh.ids).encode()):08x}"
    return symbol(name, 0, mesh.axis_size(mesh_axis) - 1)


def value_at(
    expression: IntExpr,
    mesh: DeviceMesh,
    mesh_axis: ParallelType,
    place: int,
    sizes: Mapping[str, int],
) -> int:
    """What an expression is on the rank that stands at `place` along a mesh axis, and elsewhere
    where `sizes` say."""
    return evaluate(expression, {**sizes, coordinate_symbol(mesh, mesh_axis).name: place})


@lru_cache(16)
def rank_coordinates(mesh: DeviceMesh) -> Mapping[int, Coordinates]:
    """Each rank of a mesh, in order, with its place along each mesh axis."""
    owners = mesh.parallel_types()
    places = product(*map(range, mesh.shape))
    return {
        rank: dict(zip(owners, place, strict=True))
        for rank, place in zip(mesh.ids, places, strict=True)
    }


def _weight(digits: Sequence[Digit]) -> IntExpr:
    return mul(const(1), *(digit.extent for digit in digits))


# Listing.


def shape_outside(axes: int) -> tuple[int, ...]:
    """What a rank outside its mesh has of a tensor: nothing. No axes would be one element."""
    return (0,) * max(axes, 1)


def held(digits: Digits, size: int, coordinates: Coordinates) -> Runs:
    """The indices of an axis of `size` that the rank at `coordinates` holds.

    [2@x, 4] over 7, x = 1  ->  4..6        [4, 2@x] over 7, x = 1  ->  1, 3, 5

    Raises InvariantError for digits whose extents are not constant.
    """
    places = tuple(None if d.owner is None else coordinates[d.owner] for d in digits)
    return _listed(tuple(map(_constant, digits)), places, size)


def runs_in_both(left: Runs, right: Runs) -> Runs:
    """The indices that stand in both."""
    if len(left) == len(right) == 1:
        return _joined((_in_both(left[0], right[0]),))
    if all(run.step == 1 for run in left + right):
        return _overlaps(left, right)
    found = (_in_both(a, b) for a in left for b in right)
    return _joined(sorted(found, key=lambda run: run.start))


def runs_of(indices: Iterable[int]) -> Runs:
    """Increasing indices as runs."""
    return _joined(range(index, index + 1) for index in indices)


def run_length(runs: Runs) -> int:
    """The number of indices."""
    return sum(map(len, runs))


def _constant(digit: Digit) -> int:
    value = const_value(digit.extent)
    if value is None:
        raise InvariantError(f"indices of a digit of {digit.extent} cannot be listed")
    return value


@lru_cache(1 << 12)
def _listed(radices: tuple[int, ...], places: tuple[int | None, ...], size: int) -> Runs:
    """The indices below `size` whose digits are `places`, where those are not None."""
    if size <= 0:
        return ()
    if all(place is None for place in places):
        return (range(size),) if places else (range(1),)
    weight, place = math.prod(radices[1:]), places[0]
    if place is not None:
        below = _listed(radices[1:], places[1:], min(size - place * weight, weight))
        return tuple(_shifted(run, place * weight) for run in below)
    below = _listed(radices[1:], places[1:], weight)
    if run_length(below) == 1:
        return _joined((range(below[0].start, size, weight),))
    return _joined(
        _shifted(run, first)
        for first in range(0, size, weight)
        for run in _listed(radices[1:], places[1:], min(weight, size - first))
    )


def _shifted(run: range, offset: int) -> range:
    return range(run.start + offset, run.stop + offset, run.step)


def _joined(runs: Iterable[range]) -> Runs:
    """Increasing runs in normal form."""
    found: list[range] = []
    pieces = list(runs)
    if len(pieces) == 1 and len(pieces[0]) > 1:
        return tuple(pieces)
    for run in pieces:
        for part in (run,) if run.step == 1 else (range(k, k + 1) for k in run):
            if part and found and found[-1].stop == part.start:
                found[-1] = range(found[-1].start, part.stop)
            elif part:
                found.append(part)
    if len(found) < 2 or any(len(run) > 1 for run in found):
        return tuple(found)
    strided = range(found[0].start, found[-1].stop, found[1].start - found[0].start)
    is_regular = all(run.start == k for run, k in zip(found, strided, strict=False))
    return (strided,) if is_regular and len(strided) == len(found) else tuple(found)


def _in_both(left: range, right: range) -> range:
    """The numbers that stand in both of two increasing ranges."""
    common = math.gcd(left.step, right.step)
    if (right.start - left.start) % common:
        return range(0)
    step = left.step * right.step // common
    first = left.start
    if step > 1:
        period = right.step // common
        steps = (right.start - left.start) // common * pow(left.step // common, -1, period)
        first += steps % period * left.step
    low = max(left.start, right.start)
    return range(first + -(-(low - first) // step) * step, min(left.stop, right.stop), step)


def _overlaps(left: Runs, right: Runs) -> Runs:
    """As `runs_in_both`, for runs of step 1 in one walk along both."""
    found: list[range] = []
    i = j = 0
    while i < len(left) and j < len(right):
        found.append(_in_both(left[i], right[j]))
        if left[i].stop < right[j].stop:
            i += 1
        else:
            j += 1
    return _joined(found)
