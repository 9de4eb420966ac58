"""A reduction of one element crosses no ranks: each that computes it reads that element.

T1 = sum(T0, [0]), T0 [1, n], a2:r{1} of T1 split by 2, bound to mesh_x   ->   a2 whole
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from meshfuse.base.trace import Note
from meshfuse.expr import const
from meshfuse.facts.sharding import reduced_mesh_axes
from meshfuse.ir.axes import AxisName
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Schedule, Step, step_results, step_sources

STAGE = "forget_single"


def forget_single(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Make reduced axes of one element whole where a mesh axis is bound to their loops.

    Without that each rank would have the one term: operands have axes of 1 as a whole everywhere.
    """
    notes: list[Note] = []
    for tensor in program.fusion.tensors:
        for owner, axis in reduced_mesh_axes(program, tensor):
            domains = {a.name: a for a in program.tensor(tensor).logical}
            schedule = program.schedule(tensor)
            below = _descendants(schedule.steps, axis)
            if domains[axis].extent is not const(1) or below.isdisjoint(schedule.bindings):
                continue  # The second owner of the axis finds that the first did.
            program = program.with_schedule(tensor, _with_whole(schedule, axis, below))
            reason = f"{domains[axis]} is one element, which {owner} does not share"
            notes.append(Note(STAGE, tensor, "forgotten", reason))
    return program, tuple(notes)


def _with_whole(schedule: Schedule, axis: AxisName, below: AbstractSet[AxisName]) -> Schedule:
    """The schedule without the loops `below` that `axis` is split into."""
    place = next(k for k, leaf in enumerate(schedule.leaves) if leaf in below)
    leaves = [leaf for leaf in schedule.leaves if leaf not in below]
    leaves.insert(place, axis)
    return replace(
        schedule,
        leaves=tuple(leaves),
        steps=tuple(step for step in schedule.steps if below.isdisjoint(step_results(step))),
        bindings={leaf: bound for leaf, bound in schedule.bindings.items() if leaf not in below},
    )


def _descendants(steps: Sequence[Step], axis: AxisName) -> set[AxisName]:
    """`axis` and what its splits make; a merge with other axes makes nothing of its own."""
    found = {axis}
    for step in steps:
        if found.issuperset(step_sources(step)):
            found.update(step_results(step))
    return found
