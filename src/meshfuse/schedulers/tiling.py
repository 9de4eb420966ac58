"""A tiling of the iteration space, and how it is written into the schedule of every tensor.

One Tiling describes all tensors of a segment; each takes the part that concerns its own axes. So
their loop nests agree wherever they have the same axes, and later stages need no reference tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import const
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Merge, Schedule, Split, Step
from meshfuse.schedulers.iteration_space import IterationSpace, SpaceAxis
from meshfuse.schedulers.loop_plan import AxisNamer, LoopPlan, follower

LANES = 16
"""Lanes of a vector tile: one register of float32 with AVX-512, two with AVX2."""


@final
@frozen_dataclass
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
    """Extend the schedule of every tensor (law 4), whose loop nests must still be plain."""
    plan, namer = _plan_of(tiling), AxisNamer(program.serials.get("a", 0))
    schedules: dict[TensorName, Schedule] = {}
    for tensor, schedule in program.schedules.items():
        if schedule.steps or schedule.bindings:
            raise InvariantError(f"{tensor} is scheduled already: {schedule}")
        own: dict[SpaceAxis, AxisName] = {}
        for leaf in schedule.leaves:
            if leaf in space.axis_of:
                own.setdefault(space.axis_of[leaf], leaf)
        followed = follower(schedule, own, plan, reduced=set(), namer=namer)
        bindings = {
            followed.found[leaf]: bound
            for leaf, bound in plan.bindings.items()
            if leaf in followed.found
        }
        schedules[tensor] = replace(followed.schedule, bindings=bindings)
    serials = {**program.serials, "a": namer.following}
    return replace(program, schedules=schedules, serials=serials)


def _plan_of(tiling: Tiling) -> LoopPlan:
    """The tiling as loops: programs on the grid, serial loops, lanes."""
    steps: list[Step] = []
    grid: dict[AxisName, ParallelType] = {}
    lanes: dict[AxisName, ParallelType] = {}
    serial = list(tiling.loops)
    if tiling.programs:
        grid[_merged(tiling.programs, "programs", steps)] = ParallelType.grid_x
    if tiling.vector:
        vector = _merged(tiling.vector, "vector", steps)
        chunk, lane = AxisName("chunk"), AxisName("lane")
        steps.append(Split(vector, chunk, lane, const(LANES), inner_split=True))
        lanes[lane] = ParallelType.vectorize
        if tiling.chunk_groups is None:
            serial.append(chunk)
        elif tiling.chunk_groups == 0:
            grid[chunk] = ParallelType.grid_y
        else:
            group, member = AxisName("group"), AxisName("member")
            steps.append(Split(chunk, group, member, const(tiling.chunk_groups), inner_split=False))
            grid[group] = ParallelType.grid_y
            serial.append(member)
    return LoopPlan(tuple(steps), (*grid, *serial, *lanes), {**grid, **lanes}, outer=len(grid))


def _merged(axes: Sequence[SpaceAxis], name: str, steps: list[Step]) -> AxisName:
    """One axis of them all, outermost first."""
    result, *others = axes
    for number, axis in enumerate(others):
        merged = AxisName(f"{name}{number}")
        steps.append(Merge(result, axis, merged))
        result = merged
    return result
