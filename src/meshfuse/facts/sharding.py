"""Shardings: which rank holds what, derived from the loop nest and compared structurally (law L10)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from meshfuse.expr.nodes import IntExpr
from meshfuse.ir.mesh import DeviceMesh, ParallelType


@final
@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of a tensor axis' index, and who owns it: a mesh axis, or None for the local memory."""

    extent: IntExpr
    owner: ParallelType | None = None


@final
@dataclass(frozen=True, slots=True)
class Sharding:
    """Mesh, and per tensor axis its digits, most significant first; the product of their extents covers the axis.

    A leading mesh digit is a block sharding, a trailing one cyclic, a middle one strided. `partial` names
    the mesh axes along which ranks hold terms of a reduction, with the reduction's name. Canonical: neighbouring local digits
    are merged, mesh axes of size 1 dropped, so equal placements are equal values.
    """

    mesh: DeviceMesh | None
    axes: tuple[tuple[Digit, ...], ...]
    partial: Mapping[ParallelType, str] = field(default_factory=dict)
