"""A tiling of the iteration space, and how it is written into the schedule of every tensor.

One Tiling describes all tensors of a segment; each takes the part that concerns its own axes. So
their loop nests agree wherever they have the same axes, and later stages need no reference tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from meshfuse.base.errors import InvariantError
from meshfuse.expr import const
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Merge, Schedule, Split, Step
from meshfuse.schedulers.iteration_space import IterationSpace, SpaceAxis

LANES = 16
"""Lanes of a vector tile: one register of float32 with AVX-512, two with AVX2."""


@final
@dataclass(frozen=True, slots=True)
class Tiling:
    """How a segment's iteration space is run.

    `programs` are merged into one grid axis (grid_x), `loops` run serially, outermost first,
    `vector` are merged and split into chunks of LANES, whose lanes are the tile axis. The loop over
    chunks is serial; `chunk_groups` splits it into so many groups on grid_y, and 0 puts all of it
    there.
    """

    programs: tuple[SpaceAxis, ...]
    loops: tuple[SpaceAxis, ...]
    vector: tuple[SpaceAxis, ...]
    chunk_groups: int | None = None


def apply_tiling(program: Program, space: IterationSpace, tiling: Tiling) -> Program:
    """Extend the schedule of every tensor (law L4), whose loop nests must still be plain."""
    namer = _AxisNamer(program.serials.get("a", 0))
    schedules: dict[TensorName, Schedule] = {}
    for tensor, schedule in program.schedules.items():
        if schedule.steps or schedule.bindings:
            raise InvariantError(f"{tensor} is scheduled already: {schedule}")
        schedules[tensor] = _tiled(schedule, space, tiling, namer)
    serials = {**program.serials, "a": namer.following}
    return replace(program, schedules=schedules, serials=serials)


@final
@dataclass(slots=True)
class _AxisNamer:
    """Counts fresh axis names: mutable, private to one call of `apply_tiling`."""

    following: int

    def fresh(self) -> AxisName:
        self.following += 1
        return AxisName(f"a{self.following - 1}")


def _tiled(
    schedule: Schedule, space: IterationSpace, tiling: Tiling, namer: _AxisNamer
) -> Schedule:
    own: dict[SpaceAxis, AxisName] = {}
    for leaf in schedule.leaves:
        if leaf in space.axis_of:
            own.setdefault(space.axis_of[leaf], leaf)
    steps: list[Step] = []
    grid: dict[AxisName, ParallelType] = {}
    lanes: dict[AxisName, ParallelType] = {}
    serial = [own[axis] for axis in tiling.loops if axis in own]
    programs = _merged(tiling.programs, own, steps, namer)
    if programs is not None:
        grid[programs] = ParallelType.grid_x
    vector = _merged(tiling.vector, own, steps, namer)
    if vector is not None:
        chunk, lane = namer.fresh(), namer.fresh()
        steps.append(Split(vector, chunk, lane, const(LANES), inner_split=True))
        lanes[lane] = ParallelType.vectorize
        if tiling.chunk_groups is None:
            serial.append(chunk)
        elif tiling.chunk_groups == 0:
            grid[chunk] = ParallelType.grid_y
        else:
            group, member = namer.fresh(), namer.fresh()
            steps.append(Split(chunk, group, member, const(tiling.chunk_groups), inner_split=False))
            grid[group] = ParallelType.grid_y
            serial.append(member)
    used = {own[axis] for axis in (*tiling.programs, *tiling.loops, *tiling.vector) if axis in own}
    untiled = [leaf for leaf in schedule.leaves if leaf not in used]
    return replace(
        schedule,
        steps=tuple(steps),
        leaves=(*grid, *untiled, *serial, *lanes),
        bindings={**grid, **lanes},
    )


def _merged(
    axes: Sequence[SpaceAxis],
    own: Mapping[SpaceAxis, AxisName],
    steps: list[Step],
    namer: _AxisNamer,
) -> AxisName | None:
    """One axis of those among `axes` that the tensor has, outermost first; None if it has none."""
    result: AxisName | None = None
    for axis in axes:
        if axis not in own:
            continue
        if result is None:
            result = own[axis]
        else:
            merged = namer.fresh()
            steps.append(Merge(result, own[axis], merged))
            result = merged
    return result
