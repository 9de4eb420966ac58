"""Loop nests: what the scheduled leaves of a tensor ask of a kernel, checked against the legal
forms.

Grid leaves stand outermost, then serial loops, then tile axes; a run of adjacent tile leaves of the
same logical axes is one tile axis. Serial loops over reduced axes run inside those over kept axes,
in whatever order the leaves stand, because an accumulator has no room for the elements of a kept
loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

from meshfuse.base.errors import ScheduleError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, const, const_value
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Merge, Split, Step, Swizzle1d

_TILE_TYPES = ("block_x", "block_y", "block_z", "vectorize", "unroll")


@final
@frozen_dataclass
class SerialLoop:
    """A plain loop over `leaf`; without one, the one iteration of a reduction that has no loop."""

    leaf: AxisName | None
    extent: IntExpr
    reduced: bool


@final
@frozen_dataclass
class TileGroup:
    """Adjacent leaves, outermost first, whose iterations are the lanes of one tile axis."""

    leaves: tuple[AxisName, ...]
    extents: tuple[int, ...]
    reduced: bool

    @property
    def size(self) -> int:
        return math.prod(self.extents)


@final
@frozen_dataclass
class Nest:
    """The loops of one tensor. Leaves of size 1 (`fixed`) have index 0 and no loop.

    `axes` are all axes of the tensor, `steps` lead from its root axes to its leaves.
    """

    tensor: TensorName
    axes: Mapping[AxisName, IterDomain]
    steps: tuple[Step, ...]
    fixed: tuple[AxisName, ...]
    grid: tuple[tuple[AxisName, ParallelType], ...]
    serial: tuple[SerialLoop, ...]
    tiles: tuple[TileGroup, ...]

    def extent(self, axis: AxisName) -> IntExpr:
        return self.axes[axis].extent


def nest_of(program: Program, tensor: TensorName, *, reducing: bool) -> Nest:
    """The loop nest that computes `tensor`, or that stores it: then without its reduced axes.

    Raises ScheduleError for a schedule that is no legal form.
    """
    axes, schedule = program.all_axes(tensor), program.schedule(tensor)
    steps = (*program.tensor(tensor).root_steps, *schedule.steps) if reducing else schedule.steps
    _check_merges(tensor, steps, axes)
    fixed: list[AxisName] = []
    grid: list[tuple[AxisName, ParallelType]] = []
    serial: list[SerialLoop] = []
    tiled: list[AxisName] = []
    for leaf in schedule.leaves:
        axis, bound = axes[leaf], schedule.binding(leaf)
        reduced = axis.kind is AxisKind.reduction
        if reduced and not reducing:
            continue
        if axis.kind is AxisKind.broadcast or const_value(axis.extent) == 1:
            fixed.append(leaf)
        elif bound.is_grid:
            if reduced:
                raise _grid_reduction(tensor, leaf, bound)
            if serial or tiled:
                raise _misplaced(tensor, leaf, bound, "outside all serial and tile loops")
            grid.append((leaf, bound))
        elif bound.name in _TILE_TYPES:
            tiled.append(leaf)
        elif bound == ParallelType.serial:
            if tiled:
                raise _misplaced(tensor, leaf, bound, "outside the tile axes")
            serial.append(SerialLoop(leaf, axis.extent, reduced))
        else:
            raise _not_in_a_kernel(tensor, leaf, bound)
    if reducing and not any(loop.reduced for loop in serial):
        serial.append(SerialLoop(None, const(1), reduced=True))
    serial.sort(key=lambda loop: loop.reduced)
    tiles = _tile_groups(tensor, tiled, axes, _origins(steps, axes))
    return Nest(tensor, axes, steps, tuple(fixed), tuple(grid), tuple(serial), tuple(tiles))


def _check_merges(
    tensor: TensorName, steps: Sequence[Step], axes: Mapping[AxisName, IterDomain]
) -> None:
    for step in steps:
        if isinstance(step, Merge):
            reduced = {
                axes[part].kind is AxisKind.reduction
                for part in (step.outer, step.inner)
                if axes[part].kind is not AxisKind.broadcast
            }
            if len(reduced) > 1:
                raise ScheduleError(
                    "mixed-merge",
                    tensor,
                    step.out,
                    f"merges {step.outer} and {step.inner}, of which one is reduced",
                    "Merge kept axes with kept axes and reduced axes with reduced axes.",
                )


def _origins(
    steps: Sequence[Step], axes: Mapping[AxisName, IterDomain]
) -> dict[AxisName, frozenset[AxisName]]:
    """The underived axes that each axis comes from."""
    origins = {name: frozenset((name,)) for name in axes}
    for step in steps:
        match step:
            case Split(source, outer, inner):
                origins[outer] = origins[inner] = origins[source]
            case Merge(outer, inner, out):
                origins[out] = origins[outer] | origins[inner]
            case Swizzle1d(source, out):
                origins[out] = origins[source]
    return origins


def _tile_groups(
    tensor: TensorName,
    leaves: Sequence[AxisName],
    axes: Mapping[AxisName, IterDomain],
    origins: Mapping[AxisName, frozenset[AxisName]],
) -> list[TileGroup]:
    groups: list[list[AxisName]] = []
    for leaf in leaves:
        if groups and origins[groups[-1][0]] == origins[leaf]:
            groups[-1].append(leaf)
        elif any(origins[group[0]] & origins[leaf] for group in groups):
            raise ScheduleError(
                "tile-order",
                tensor,
                leaf,
                "tile leaves of one axis stand apart",
                "Reorder so that the tile leaves of each axis are neighbours.",
            )
        else:
            groups.append([leaf])
    return [
        TileGroup(
            tuple(group),
            tuple(_tile_extent(tensor, axes[leaf]) for leaf in group),
            axes[group[0]].kind is AxisKind.reduction,
        )
        for group in groups
    ]


def _tile_extent(tensor: TensorName, axis: IterDomain) -> int:
    extent = const_value(axis.extent)
    if extent is None:
        raise ScheduleError(
            "tile-extent",
            tensor,
            axis.name,
            f"a tile axis of size {axis.extent}, which is not known",
            "Split it by a constant and bind the inner part.",
        )
    return extent


def _misplaced(
    tensor: TensorName, leaf: AxisName, bound: ParallelType, where: str
) -> ScheduleError:
    return ScheduleError(
        "leaf-order", tensor, leaf, f"a {bound} leaf must stand {where}", "Reorder the leaves."
    )


def _grid_reduction(tensor: TensorName, leaf: AxisName, bound: ParallelType) -> ScheduleError:
    return ScheduleError(
        "grid-reduction",
        tensor,
        leaf,
        f"{bound} on a reduced axis: programs of a grid cannot add to one element",
        "Use rfactor to make two kernels, or bind a kept axis.",
    )


def _not_in_a_kernel(tensor: TensorName, leaf: AxisName, bound: ParallelType) -> ScheduleError:
    local = bound.is_mesh or bound == ParallelType.stream
    return ScheduleError(
        "not-local" if local else "parallel-type",
        tensor,
        leaf,
        f"{bound} has no meaning inside a kernel",
        "Localize the program first." if local else "Use grid, block, vectorize, unroll or serial.",
    )
