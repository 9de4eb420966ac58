"""Indices of axes from those of the loops derived from them, and bounds for ragged splits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshfuse.base.errors import InvariantError
from meshfuse.expr import (
    IntExpr,
    const,
    const_value,
    free_symbols,
    known_equal,
    known_less,
    known_multiple,
)
from meshfuse.ir.axes import AxisName, IterDomain
from meshfuse.ir.schedule import Merge, Split, Step, Swizzle1d
from meshfuse.kernel.nodes import Bound


def source_indices(
    steps: Sequence[Step],
    axes: Mapping[AxisName, IterDomain],
    leaves: Mapping[AxisName, IntExpr],
) -> dict[AxisName, IntExpr]:
    """The index of every axis that `leaves` derive from, walking the steps back.

    An axis one of whose derived leaves has no index gets none either.
    """
    indices = dict(leaves)
    for step in reversed(steps):
        match step:
            case Split(source, outer, inner):
                if outer in indices and inner in indices:
                    indices[source] = indices[outer] * axes[inner].extent + indices[inner]
            case Merge(outer, inner, out):
                if out in indices:
                    indices[outer], indices[inner] = _unmerged(
                        indices[out], axes[outer].extent, axes[inner].extent
                    )
            case Swizzle1d():
                raise InvariantError(f"{step} in a kernel: a kernel does not know its rank")
    return indices


def _unmerged(index: IntExpr, outer: IntExpr, inner: IntExpr) -> tuple[IntExpr, IntExpr]:
    """The two indices of a merged axis. Axes of size 1 are told apart from their neighbour here."""
    if const_value(inner) == 1:
        return index, const(0)
    if const_value(outer) == 1:
        return const(0), index
    if const_value(inner) == 0:
        return const(0), const(0)
    return index // inner, index % inner


def ragged_bounds(
    steps: Sequence[Step],
    axes: Mapping[AxisName, IterDomain],
    indices: Mapping[AxisName, IntExpr],
) -> tuple[Bound, ...]:
    """The bounds that keep iterations past the end of an axis idle, one per ragged split.

    A bound on the outer part of a split is stated on the split axis itself: outer < ceil(n / f)
    follows from outer * f + inner < n.
    """
    split_of = {step.outer: step.source for step in steps if isinstance(step, Split)}
    ragged: dict[AxisName, None] = {}
    for step in steps:
        if isinstance(step, Split) and not _divides(step, axes):
            source = step.source
            while source in split_of:
                source = split_of[source]
            ragged[source] = None
    return tuple(
        Bound(indices[axis], axes[axis].extent)
        for axis in ragged
        if axis in indices and not known_less(indices[axis], axes[axis].extent)
    )


def _divides(split: Split, axes: Mapping[AxisName, IterDomain]) -> bool:
    """Whether the parts of a split cover its axis exactly, for all sizes."""
    extent, factor = axes[split.source].extent, const_value(split.factor)
    if factor is not None and known_multiple(extent, factor):
        return True
    return known_equal(axes[split.outer].extent * axes[split.inner].extent, extent)


def bounds_within(bounds: Iterable[Bound], names: frozenset[str]) -> tuple[Bound, ...]:
    """The bounds that speak of any of these loops and tile axes."""
    return tuple(bound for bound in bounds if names & symbol_names((bound.index,)))


def symbol_names(expressions: Iterable[IntExpr]) -> frozenset[str]:
    """The names of all symbols in some expressions."""
    return frozenset(found.name for e in expressions for found in free_symbols(e))
