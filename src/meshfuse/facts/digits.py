"""Which rank holds what: digits of axes, shardings made of them, and what can be read off them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, const, const_value, mul
from meshfuse.ir.mesh import DeviceMesh, ParallelType


@final
@frozen_dataclass
class Digit:
    """One digit of an axis' index, and who owns it: a mesh axis, or None for local memory."""

    extent: IntExpr
    owner: ParallelType | None = None


Digits = tuple[Digit, ...]
"""The digits of one axis, most significant first.

An index is the mixed-radix number of its digits. Their product covers the axis and may exceed it:
then the last blocks are shorter, or empty.
"""


@final
@dataclass(frozen=True, slots=True)
class Sharding:
    """Mesh, and per tensor axis its digits, the product of whose extents covers the axis.

    A leading mesh digit is a block sharding, a trailing one cyclic, a middle one strided. `partial`
    names the mesh axes along which ranks hold terms of a reduction, with the reduction's name, in
    the order of the mesh. Canonical: neighbouring local digits are merged, mesh axes of size 1
    dropped, so equal placements are equal values.
    """

    mesh: DeviceMesh | None
    axes: tuple[Digits, ...]
    partial: Mapping[ParallelType, str] = field(default_factory=dict[ParallelType, str], hash=False)

    def __post_init__(self) -> None:
        """Equal values must be read alike: plans are kept by value, and ranks agree on them."""
        if len(self.partial) > 1:
            order = sorted(self.partial, key=lambda owner: -owner.mesh_position)
            object.__setattr__(self, "partial", {owner: self.partial[owner] for owner in order})


def is_whole(digits: Sequence[Digit]) -> bool:
    """Whether no mesh axis owns a digit, so that every rank holds all of the axis."""
    return all(digit.owner is None for digit in digits)


def local_extent(digits: Sequence[Digit]) -> IntExpr:
    """The product of the local digits."""
    return mul(const(1), *(digit.extent for digit in digits if digit.owner is None))


def weights(digits: Sequence[Digit]) -> dict[ParallelType, IntExpr]:
    """By how many indices the parts of each mesh axis are apart: the product of what is below.

    [2@x, 3, 4@y] -> {y: 1, x: 12}
    """
    found: dict[ParallelType, IntExpr] = {}
    weight: IntExpr = const(1)
    for digit in reversed(digits):
        if digit.owner is not None:
            found[digit.owner] = weight
        weight = weight * digit.extent
    return found


def digits_above(digits: Sequence[Digit], mesh_axis: ParallelType) -> Sequence[Digit]:
    """The digits that are more significant than that of `mesh_axis`, which has one."""
    return digits[: next(k for k, digit in enumerate(digits) if digit.owner == mesh_axis)]


def is_one_block(digits: Sequence[Digit], mesh_axis: ParallelType) -> bool:
    """Whether a rank's part follows on that of the rank before it: no local digit stands above."""
    return all(digit.owner is not None for digit in digits_above(digits, mesh_axis))


def is_every_nth(digits: Sequence[Digit], mesh_axis: ParallelType) -> bool:
    """Whether a rank has every n-th index of what the team has: no local digit stands below."""
    below = digits[len(digits_above(digits, mesh_axis)) :]
    return all(digit.owner is not None for digit in below)


def in_blocks(digits: Sequence[Digit]) -> bool:
    """Whether no local digit stands above one of a mesh axis: ranks hold consecutive indices."""
    owned = [digit.owner is not None for digit in digits]
    return owned == sorted(owned, reverse=True)


def gathered_from(digits: Digits, mesh_axes: Sequence[ParallelType]) -> Digits:
    """The digits with those of `mesh_axes` gathered, and mesh digits below them.

    What is left is in blocks if `digits` are: without y, [2@y, 2@x, n/4] would become strided.
    """
    first = next((k for k, digit in enumerate(digits) if digit.owner in mesh_axes), len(digits))
    return (*digits[:first], *(Digit(digit.extent) for digit in digits[first:]))


def remaining_digit(digits: Sequence[Digit]) -> int | None:
    """The place of the local digit that takes what the others leave of an axis, if there is one.

    That of symbolic extent; else the first, whose extent does not say how long pieces below it are:

        [2@x, n/2] -> n/2     [n/6, 2@x, 3] -> n/6     [2, 2@x, 3] over 7 -> 2
    """
    local = [k for k, digit in enumerate(digits) if digit.owner is None]
    symbolic = [k for k in local if const_value(digits[k].extent) is None]
    return symbolic[-1] if symbolic else next(iter(local), None)
