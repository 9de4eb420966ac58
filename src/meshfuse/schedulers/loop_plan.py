"""A loop nest over the axes of an iteration space, and how a tensor takes its part of it.

Schedulers make plans of tilings, users of the loops of a tensor that they have scheduled. Either
way the loop nests of all tensors agree wherever they have the same axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr
from meshfuse.ir.axes import AxisName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.schedule import (
    Merge,
    Schedule,
    Split,
    Step,
    Swizzle1d,
    step_results,
    step_sources,
)

PlanAxis = AxisName
"""An axis of a plan: one of the space, or one that the plan's steps derive."""


@final
@frozen_dataclass
class LoopPlan:
    """`steps` derive `leaves`, outermost first, from axes of the space.

    Axes of a tensor that the plan says nothing of have their loops behind the first `outer` leaves.
    """

    steps: tuple[Step, ...]
    leaves: tuple[PlanAxis, ...]
    bindings: Mapping[PlanAxis, ParallelType] = field(default_factory=dict[PlanAxis, ParallelType])
    outer: int = 0


@final
@dataclass(slots=True, eq=False, repr=False)
class AxisNamer:
    """Counts fresh axis names: mutable, private to one application of a plan."""

    following: int

    def fresh(self) -> AxisName:
        self.following += 1
        return AxisName(f"a{self.following - 1}")


@final
@dataclass(slots=True, eq=False, repr=False)
class Follower:
    """One tensor on its way through a plan: mutable, private to one application.

    `found` maps axes of the plan to the tensor's; `missing` are those that the tensor has nothing
    of. The rest are axes whose loops cannot become the plan's. A leaf in `fixed` stays whole.
    """

    schedule: Schedule
    own_steps: Mapping[tuple[AxisName, ...], Step]
    reduced: set[AxisName]
    fixed: frozenset[AxisName]
    found: dict[PlanAxis, AxisName]
    missing: set[PlanAxis]
    namer: AxisNamer | None

    def follow(self, step: Step) -> None:
        """Do what `step` does, or find where the tensor did so already.

        A step on an axis that is missing passes the other one on: rows of a merged axis are rows
        of what is there of it.
        """
        made = step_results(step)
        if all(axis in self.found for axis in made):
            return
        sources = [self.found[axis] for axis in step_sources(step) if axis in self.found]
        absent = [axis for axis in step_sources(step) if axis in self.missing]
        if len(absent) == len(step_sources(step)):
            self.missing.update(axis for axis in made if axis not in self.found)
        elif len(sources) + len(absent) < len(step_sources(step)):
            return
        elif absent:
            self.found[made[0]] = sources[0]
        else:
            results = self._results(step, tuple(sources))
            self.found.update(zip(made, results, strict=False))

    def _results(self, step: Step, sources: tuple[AxisName, ...]) -> tuple[AxisName, ...]:
        """What the tensor has, or gets, in place of the results of `step`; () if nothing."""
        own = self.own_steps.get(sources)
        if own is not None and _is_like(own, step):
            return step_results(own)
        leaves = self.schedule.leaves
        if self.namer is None or any(a not in leaves or a in self.fixed for a in sources):
            return ()
        if len({axis in self.reduced for axis in sources}) > 1:
            return ()
        names = tuple(self.namer.fresh() for _ in step_results(step))
        if sources[0] in self.reduced:
            self.reduced.update(names)
        self.schedule = replace(
            self.schedule,
            steps=(*self.schedule.steps, _renamed(step, sources, names)),
            leaves=_substituted(leaves, sources, names),
        )
        return names

    def reorder(self, plan: LoopPlan) -> None:
        """Put the loops in the plan's order, those that it does not mention at their place."""
        wanted = [self.found.get(leaf) for leaf in plan.leaves]
        leaves = self.schedule.leaves
        front = [leaf for leaf in wanted[: plan.outer] if leaf in leaves]
        back = [leaf for leaf in wanted[plan.outer :] if leaf in leaves]
        others = [leaf for leaf in leaves if leaf not in wanted]
        order = dict.fromkeys(leaf for leaf in (*front, *others, *back) if leaf is not None)
        self.schedule = replace(self.schedule, leaves=tuple(order))


def _is_like(own: Step, step: Step) -> bool:
    match own, step:
        case Split(), Split():
            return _halves(own) == _halves(step)
        case Swizzle1d(), Swizzle1d():
            return (own.mesh_axis, own.offset) == (step.mesh_axis, step.offset)
        case _:
            return isinstance(own, Merge) and isinstance(step, Merge)


def _halves(step: Split) -> tuple[IntExpr, bool]:
    return step.factor, step.inner_split


def _renamed(step: Step, sources: Sequence[AxisName], names: Sequence[AxisName]) -> Step:
    match step:
        case Split():
            return replace(step, source=sources[0], outer=names[0], inner=names[1])
        case Merge():
            return Merge(sources[0], sources[1], names[0])
        case Swizzle1d():
            return replace(step, source=sources[0], out=names[0])


def _substituted(
    leaves: Sequence[AxisName], sources: Sequence[AxisName], names: Sequence[AxisName]
) -> tuple[AxisName, ...]:
    """`leaves` with `names` in the place of the first of `sources`."""
    changed: list[AxisName] = []
    for leaf in leaves:
        if leaf == sources[0]:
            changed += names
        elif leaf not in sources:
            changed.append(leaf)
    return tuple(changed)


def follower(
    schedule: Schedule,
    own: Mapping[PlanAxis, AxisName],
    plan: LoopPlan,
    *,
    reduced: set[AxisName],
    root_steps: Sequence[Step] = (),
    namer: AxisNamer | None = None,
) -> Follower:
    """A tensor that has taken the plan's steps, with its loops in the plan's order.

    `own`: its axes by axis of the space. `root_steps` lead to its logical axes. Without a `namer`
    nothing is added: the follower only finds which of its loops are the plan's.
    """
    steps = (*root_steps, *schedule.steps)
    inlined = schedule.leaves[: schedule.inline_depth]
    following = Follower(
        schedule,
        {step_sources(step): step for step in steps},
        reduced,
        frozenset((*schedule.bindings, *inlined)),
        dict(own),
        {axis for step in plan.steps for axis in step_sources(step)}.difference(own),
        namer,
    )
    for step in plan.steps:
        following.missing.difference_update(step_results(step))
    for step in plan.steps:
        following.follow(step)
    if namer is not None and not inlined:
        following.reorder(plan)
    return following
