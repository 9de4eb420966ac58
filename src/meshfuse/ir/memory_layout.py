"""Verbs that say how and where a tensor lies in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from meshfuse.base.errors import UserError
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import (
    Allocation,
    MemoryType,
    Merge,
    Schedule,
    Split,
    Step,
    Swizzle1d,
    step_results,
    step_sources,
)

Flag = bool | None
"""Contiguity of an axis; None for one that is broadcast or expanded."""


def set_allocation_domain(
    program: Program,
    tensor: TensorName,
    order: Sequence[AxisName],
    contiguity: Sequence[Flag] | bool,
) -> Program:
    """Lay a tensor out: its axes, slowest first, and a contiguity flag for each.

    `order` names tensor axes or what they were split and merged into. Leaves bound to a mesh axis
    or stream, and reduced ones, are dropped with their flags; the parts of a split axis must stand
    side by side, all of them contiguous but the last. A bool flag holds for all axes but broadcast
    and expanded ones. Raises UserError, naming the axis, if `order` then is no permutation of the
    tensor's axes, or if the flags do not fit.
    """
    names = ", ".join(order)
    call = f"set_allocation_domain({tensor}, [{names}], contiguity={contiguity})"
    flags = [contiguity] * len(order) if isinstance(contiguity, bool) else list(contiguity)
    if len(flags) != len(order):
        raise UserError(f"{call}: got {len(flags)} contiguity flags for {len(order)} axes")
    memory = _memory_of(program, tensor, list(zip(order, flags, strict=True)), call)
    for step in reversed(program.schedule(tensor).steps):
        memory.undo(step)
    uniform = isinstance(contiguity, bool)
    allocation = _checked(program, tensor, memory.places, call, uniform=uniform)
    return program.with_schedule(tensor, replace(program.schedule(tensor), allocation=allocation))


def set_allocation_as_loop(program: Program, tensor: TensorName) -> Program:
    """Lay a tensor out in the order of its loops, without gaps.

    Mesh, stream and reduced leaves have no memory. Raises UserError, naming the axis, if the other
    leaves are in no order that the tensor's axes can have: the parts of a split axis stand apart.
    """
    return set_allocation_domain(program, tensor, program.schedule(tensor).leaves, True)


def set_memory_type(program: Program, tensor: TensorName, memory: MemoryType) -> Program:
    """Say where a tensor lives. Raises UserError for an input or output that others cannot see."""
    fusion = program.fusion
    outside = tensor in fusion.inputs or any(o.tensor == tensor for o in fusion.outputs)
    if outside and memory not in (MemoryType.global_, MemoryType.symmetric):
        which = "an input" if tensor in fusion.inputs else "an output"
        raise UserError(
            f"set_memory_type({tensor}, {memory.value}): {tensor} is {which} of the program; "
            "it lives in global or symmetric memory"
        )
    return program.with_schedule(tensor, replace(program.schedule(tensor), memory=memory))


# From an order of derived axes to one of tensor axes.


@final
@dataclass(slots=True, eq=False, repr=False)
class _Memory:
    """Axes in memory order with their flags, while steps are undone one by one.

    `away` are the axes that lie on other ranks or in other chunks: here they are one long.
    """

    axes: Mapping[AxisName, IterDomain]
    away: set[AxisName]
    places: list[tuple[AxisName, Flag]]
    call: str

    def undo(self, step: Step) -> None:
        """Put what `step` consumes in the place of what it makes."""
        if all(made in self.away for made in step_results(step)):
            self.away.update(step_sources(step))
            return
        names = [axis for axis, _ in self.places]
        if not any(made in names for made in step_results(step)):
            return
        match step:
            case Split(source, outer, inner):
                self._join(source, outer, inner)
            case Merge(outer, inner, out):
                place = names.index(out)
                flag = self.places[place][1]
                self.places[place : place + 1] = [(outer, True), (inner, flag)]
            case Swizzle1d(source, out):
                place = names.index(out)
                self.places[place] = (source, self.places[place][1])

    def _join(self, source: AxisName, outer: AxisName, inner: AxisName) -> None:
        names = [axis for axis, _ in self.places]
        parts = [part for part in (outer, inner) if part not in self.away]
        for part in parts:
            if part not in names:
                raise UserError(
                    f"{self.call}: {self.axes[source]} was split, and its part {self.axes[part]} "
                    "is missing"
                )
        first = names.index(parts[0])
        if names[first : first + len(parts)] != parts:
            raise UserError(
                f"{self.call}: {self.axes[parts[-1]]} is only a part of {self.axes[source]}; it "
                f"must follow the other part, {self.axes[parts[0]]}"
            )
        flags = [flag for _, flag in self.places[first : first + len(parts)]]
        if len(parts) == 2 and flags[0] is False and flags[1] is True:
            raise UserError(
                f"{self.call}: {self.axes[outer]} and {self.axes[inner]} are parts of one axis; "
                "there is no gap between them, so the outer one is contiguous"
            )
        self.places[first : first + len(parts)] = [(source, flags[-1])]


def _memory_of(
    program: Program, tensor: TensorName, order: list[tuple[AxisName, Flag]], call: str
) -> _Memory:
    """`order` without the axes that have no memory here."""
    axes, schedule = program.all_axes(tensor), program.schedule(tensor)
    # A whole axis on the mesh has its place in memory: it is one long.
    logical = {domain.name for domain in program.tensor(tensor).tensor_axes}
    away = {leaf for leaf in schedule.leaves if _is_elsewhere(schedule, leaf)} - logical
    places: list[tuple[AxisName, Flag]] = []
    for axis, flag in order:
        if axis not in axes:
            leaves = ", ".join(map(str, program.leaf_domains(tensor)))
            raise UserError(f"{call}: {axis} is no axis of {tensor}; its loop axes are [{leaves}]")
        if axes[axis].kind.is_tensor_axis and axis not in away:
            places.append((axis, flag))
    return _Memory(axes, away, places, call)


def _checked(
    program: Program,
    tensor: TensorName,
    places: Sequence[tuple[AxisName, Flag]],
    call: str,
    *,
    uniform: bool,
) -> Allocation:
    """The allocation, if `places` are all the tensor's axes and their flags fit.

    `uniform`: one flag was given for all axes that have one.
    """
    logical = {domain.name: domain for domain in program.tensor(tensor).tensor_axes}
    placed: dict[AxisName, Flag] = {}
    for axis, flag in places:
        domain = logical.get(axis)
        if domain is None:
            raise UserError(f"{call}: {program.all_axes(tensor)[axis]} is no axis of {tensor}")
        if axis in placed:
            raise UserError(f"{call}: axis {domain} stands twice")
        flagless = _has_no_flag(program.schedule(tensor), domain)
        kept = None if flagless and uniform else flag
        if flagless != (kept is None):
            wanted = "None: it is broadcast or expanded" if flagless else "True or False"
            raise UserError(f"{call}: the contiguity flag of axis {domain} must be {wanted}")
        placed[axis] = kept
    for domain in logical.values():
        if domain.name not in placed:
            raise UserError(f"{call}: axis {domain} of {tensor} is missing")
    return Allocation(tuple(placed), tuple(placed.values()))


def _has_no_flag(schedule: Schedule, axis: IterDomain) -> bool:
    """Whether a tensor axis is broadcast, or expanded according to its present allocation."""
    allocation = schedule.allocation
    if axis.kind is AxisKind.broadcast or allocation is None:
        return axis.kind is AxisKind.broadcast
    return allocation.contiguity[allocation.order.index(axis.name)] is None


def _is_elsewhere(schedule: Schedule, axis: AxisName) -> bool:
    """Whether a leaf's iterations lie on other ranks or in other chunks."""
    bound = schedule.binding(axis)
    return bound.is_mesh or bound == ParallelType.stream
