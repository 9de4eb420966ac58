"""Shardings as DTensor's placements, and back: what happens on each mesh axis, in mesh order.

A Sharding says more than placements can in one place: the order of several mesh axes on one tensor
axis. In placements that order shows as strided shards, read from the first mesh axis to the last.
They say more than a Sharding where an axis does not divide: DTensor cuts every block anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple, final

from meshfuse.base.errors import Unsupported, UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.shard import number_digits
from meshfuse.expr import ceildiv, const, const_value
from meshfuse.facts.digits import digits_above
from meshfuse.facts.holdings import held
from meshfuse.facts.sharding import (
    Digit,
    Digits,
    Sharding,
    axis_sharded_on,
    describe,
)
from meshfuse.ir.mesh import DeviceMesh, ParallelType


@final
@frozen_dataclass
class Replicate:
    """All ranks along the mesh axis hold the same."""


@final
@frozen_dataclass
class Shard:
    """The k-th rank holds the k-th block of tensor axis `dim`."""

    dim: int


@final
@frozen_dataclass
class StridedShard:
    """Tensor axis `dim` is cut into `split_factor` equal pieces; the k-th rank holds the k-th
    block of each."""

    dim: int
    split_factor: int


@final
@frozen_dataclass
class Partial:
    """Each rank holds one term of a reduction, a row of REDUCTION_FUNCTIONS."""

    reduce_op: str


Placement = Replicate | Shard | StridedShard | Partial


def describe_placements(placements: Sequence[Placement]) -> str:
    """For messages, as torch writes them: `[Shard(0), Replicate()]`."""
    return f"[{', '.join(map(_describe, placements))}]"


def _describe(placement: Placement) -> str:
    match placement:
        case Replicate():
            return "Replicate()"
        case Shard(dim):
            return f"Shard({dim})"
        case StridedShard(dim, split_factor):
            return f"_StridedShard({dim}, split_factor={split_factor})"
        case Partial(reduce_op):
            return f"Partial({reduce_op})"


# From shardings.


def placements_of(sharding: Sharding, shape: Sequence[int] | None = None) -> tuple[Placement, ...]:
    """One placement for each axis of the sharding's mesh; none without a mesh.

    With `shape`, the tensor's global shape, a symbolic extent gets its number from it, and blocks
    are compared: Unsupported where DTensor would cut other ones. Without, Unsupported for a
    symbolic extent above a mesh axis.
    """
    if shape is not None:
        sharding = number_digits(sharding, shape)
    mesh = sharding.mesh
    if mesh is None:
        return ()
    types = mesh.parallel_types()
    found = tuple(_place(sharding, mesh, types[:k], axis) for k, axis in enumerate(types))
    for dim, size in enumerate(() if shape is None else shape):
        if not _cuts_alike(sharding.axes[dim], size, mesh, found, dim):
            raise Unsupported(
                f"{describe(sharding)} of a tensor of shape {tuple(shape or ())}: no placements of "
                f"DTensor say this; of axis {dim}, {describe_placements(found)} cuts other blocks, "
                "as the axis does not divide. Nearest is a block for each rank of one mesh axis; "
                "full_tensor() works for all shardings"
            )
    return found


def _place(
    sharding: Sharding, mesh: DeviceMesh, earlier: tuple[ParallelType, ...], axis: ParallelType
) -> Placement:
    if axis in sharding.partial:
        return Partial(sharding.partial[axis])
    dim = axis_sharded_on(sharding, axis)
    if dim < 0:
        return Replicate()
    pieces = 1
    for digit in digits_above(sharding.axes[dim], axis):
        if digit.owner in earlier:
            continue  # each rank sees one value of it
        extent = const_value(digit.extent) if digit.owner is None else mesh.axis_size(digit.owner)
        if extent is None:
            raise Unsupported(
                f"placements of {describe(sharding)}: {digit.extent} above {axis} must be a number"
            )
        pieces *= extent
    return Shard(dim) if pieces == 1 else StridedShard(dim, pieces)


# From placements.


def sharding_from_placements(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Sharding:
    """What DTensor's placements on `mesh` say of a tensor of this global shape.

    Mesh axes of one rank stay. Raises UserError for another number of placements than the mesh has
    axes, or an axis that the tensor lacks; Unsupported where DTensor cuts blocks that no digits
    describe.
    """
    call = f"{describe_placements(placements)} on {mesh} of a tensor of shape {tuple(shape)}"
    if len(placements) != mesh.ndim:
        raise UserError(f"{call}: takes one placement for each of {mesh.ndim} mesh axes")
    axes: list[Digits] = [(Digit(const(size)),) for size in shape]
    partial: dict[ParallelType, str] = {}
    for owner, placement in zip(mesh.parallel_types(), placements, strict=True):
        match placement:
            case Replicate():
                continue
            case Partial(reduce_op):
                partial[owner] = reduce_op
            case Shard(dim) | StridedShard(dim):
                if not 0 <= dim < len(shape):
                    raise UserError(f"{call}: the tensor has no axis {dim}")
                digit = Digit(const(mesh.axis_size(owner)), owner)
                axes[dim] = _insert(axes[dim], digit, _pieces(placement), call)
    found = tuple(map(_without_ones, axes, shape))
    for dim, size in enumerate(shape):
        if not _cuts_alike(found[dim], size, mesh, placements, dim):
            raise Unsupported(
                f"{call}: axis {dim} does not divide, and {describe(Sharding(mesh, found))} would "
                "cut other blocks of it. Shard it along one mesh axis, or redistribute() it first"
            )
    return Sharding(mesh, found, partial)


def _insert(digits: Digits, owner: Digit, pieces: int, call: str) -> Digits:
    """Cut what a rank holds of an axis into `pieces`, and each of them into a block for each rank.

    The last digit is local and takes the rest, rounded up; the others are exact.
    """
    before: list[Digit] = []
    wanted, ranks = pieces, _number(owner)
    for position, digit in enumerate(digits):
        after = digits[position + 1 :]
        extent = _number(digit)
        if digit.owner is not None or (after and extent == 1):
            before.append(digit)
            continue
        if not after:
            rest = ceildiv(const(extent), const(wanted * ranks))
            return (*before, Digit(const(wanted)), owner, Digit(rest))
        if wanted == 1 and extent % ranks == 0:
            return (*before, owner, Digit(const(extent // ranks)), *after)
        if wanted > 1 and wanted % extent == 0:
            before.append(digit)
            wanted //= extent
            continue
        if extent % (wanted * ranks):
            break
        inner = const(extent // (wanted * ranks))
        return (*before, Digit(const(wanted)), owner, Digit(inner), *after)
    raise Unsupported(
        f"{call}: the blocks along {owner.owner} straddle those of a mesh axis that comes before "
        "it; shard the tensor axes in mesh order, or redistribute() it first"
    )


def _without_ones(digits: Digits, size: int) -> Digits:
    kept = tuple(digit for digit in digits if digit.owner is not None or _number(digit) != 1)
    return kept or (Digit(const(size)),)


def _pieces(placement: Shard | StridedShard) -> int:
    return placement.split_factor if isinstance(placement, StridedShard) else 1


def _number(digit: Digit) -> int:
    number = const_value(digit.extent)
    assert number is not None
    return number


# Comparing blocks.


class _Block(NamedTuple):
    """How one mesh axis cuts what is left of an axis: into `pieces`, each for all `ranks`."""

    owner: ParallelType
    pieces: int
    ranks: int


def _cuts_alike(
    digits: Digits, size: int, mesh: DeviceMesh, placements: Sequence[Placement], dim: int
) -> bool:
    """Whether every rank holds of an axis by its digits what DTensor gives it."""
    extents = [const_value(digit.extent) for digit in digits]
    owners = [digit.owner for digit in digits if digit.owner is not None]
    is_block = len(owners) == 1 and digits[0].owner is not None
    if not owners or is_block or math.prod(extent or 0 for extent in extents) == size:
        return True
    blocks = [
        _Block(owner, _pieces(placement), mesh.axis_size(owner))
        for owner, placement in zip(mesh.parallel_types(), placements, strict=True)
        if isinstance(placement, Shard | StridedShard) and placement.dim == dim
    ]
    places = product(*(range(mesh.axis_size(owner)) for owner in owners))
    return all(
        _join(held(digits, size, at)) == _join(_cut(blocks, size, at))
        for at in (dict(zip(owners, place, strict=True)) for place in places)
    )


def _cut(
    blocks: Sequence[_Block], size: int, coordinates: Mapping[ParallelType, int]
) -> list[range]:
    """What DTensor gives to one rank: each mesh axis cuts anew what those before it have left."""
    runs = [range(size)]
    for block in blocks:
        count = sum(map(len, runs))
        piece = -(-count // block.pieces)
        starts = [min(k * piece, count) for k in range(block.pieces + 1)]
        runs = [
            run
            for low, high in pairwise(starts)
            for run in _chunk(runs, low, high, block.ranks, coordinates[block.owner])
        ]
    return runs


def _chunk(runs: Sequence[range], low: int, high: int, count: int, number: int) -> Iterator[range]:
    """Of the indices at positions [low, high) of `runs`, block `number` of `count`."""
    length = -(-(high - low) // count)
    first = min(low + number * length, high)
    last = min(first + length, high)
    for run in runs:
        part = run[max(first, 0) : max(last, 0)]
        if part:
            yield part
        first, last = first - len(run), last - len(run)


def _join(runs: Sequence[range]) -> list[tuple[int, int]]:
    """Maximal runs of step 1, as (start, stop)."""
    joined: list[tuple[int, int]] = []
    for run in runs:
        singles = [run] if run.step == 1 else [range(k, k + 1) for k in run]
        for start, stop in ((part.start, part.stop) for part in singles if part):
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((start, stop))
    return joined
