"""The values that say which rank holds what: digits of axes, and shardings made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, const_value
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
    names the mesh axes along which ranks hold terms of a reduction, with the reduction's name.
    Canonical: neighbouring local digits are merged, mesh axes of size 1 dropped, so equal
    placements are equal values.
    """

    mesh: DeviceMesh | None
    axes: tuple[Digits, ...]
    partial: Mapping[ParallelType, str] = field(default_factory=dict[ParallelType, str], hash=False)


def remaining_digit(digits: Sequence[Digit]) -> int | None:
    """The place of the local digit that takes what the others leave of an axis, if there is one.

    That of symbolic extent; else the first, whose extent does not say how long pieces below it are:

        [2@x, n/2] -> n/2     [n/6, 2@x, 3] -> n/6     [2, 2@x, 3] over 7 -> 2
    """
    local = [k for k, digit in enumerate(digits) if digit.owner is None]
    symbolic = [k for k in local if const_value(digits[k].extent) is None]
    return symbolic[-1] if symbolic else next(iter(local), None)
