"""A Program: a Fusion with the Schedule of each tensor. Passes map Programs to Programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from typing import TypeVar, cast, final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import ceildiv
from meshfuse.ir.axes import AxisName, IterDomain, TensorName
from meshfuse.ir.fusion import Fusion, TensorDef
from meshfuse.ir.schedule import Merge, Schedule, Split, Step, Swizzle1d

_Answer = TypeVar("_Answer")


@final
@frozen_dataclass
class Program:
    """`serials` counts names per letter (T, c, a, i), so that equal definitions print alike."""

    fusion: Fusion = field(default_factory=Fusion)
    schedules: Mapping[TensorName, Schedule] = field(default_factory=dict[TensorName, Schedule])
    serials: Mapping[str, int] = field(default_factory=dict[str, int])

    def tensor(self, name: TensorName) -> TensorDef:
        return self.fusion.tensors[name]

    def schedule(self, name: TensorName) -> Schedule:
        return self.schedules[name]

    def with_schedule(self, name: TensorName, schedule: Schedule) -> Program:
        return replace(self, schedules={**self.schedules, name: schedule})

    def leaf_domains(self, name: TensorName) -> tuple[IterDomain, ...]:
        """The loop nest of a tensor: its leaves in order, with kinds and extents."""
        axes = self.all_axes(name)
        return tuple(axes[leaf] for leaf in self.schedules[name].leaves)

    def all_axes(self, name: TensorName) -> Mapping[AxisName, IterDomain]:
        """Every axis of a tensor by name: root, logical, and all that its steps derive."""
        return self.remember("all_axes", name, self._find_all_axes)

    def _find_all_axes(self, name: TensorName) -> Mapping[AxisName, IterDomain]:
        definition = self.fusion.tensors[name]
        axes = {axis.name: axis for axis in definition.root}
        _derive(definition.root_steps, axes)
        axes |= {axis.name: axis for axis in definition.logical}
        _derive(self.schedules[name].steps, axes)
        return axes

    def remember(
        self,
        question: str,
        name: TensorName,
        find: Callable[[TensorName], _Answer],
        given: object = None,
    ) -> _Answer:
        """What `find` derives from a tensor's definition and schedule, and `given`, alone.

        It is found once for the same objects, in whatever Programs they stand, and must not be
        changed. Passes ask the same of each tensor again and again, in thousands of Programs.
        """
        definition, answers = self.fusion.tensors[name], self.schedules[name].answers
        known = answers.get(question)
        if known is None or known[0] is not definition or known[1] is not given:
            known = answers[question] = (definition, given, find(name))
        return cast(_Answer, known[2])


def _derive(steps: Iterable[Step], axes: dict[AxisName, IterDomain]) -> None:
    """Add what the steps make of axes that are there."""
    for step in steps:
        axes.update((axis.name, axis) for axis in derived_axes(step, axes))


def derived_axes(step: Step, axes: Mapping[AxisName, IterDomain]) -> tuple[IterDomain, ...]:
    """The axes that one step makes, kinds inherited from their parents."""
    match step:
        case Split(source, outer, inner, factor, inner_split):
            parent = axes[source]
            quotient = ceildiv(parent.extent, factor)
            outer_extent, inner_extent = (quotient, factor) if inner_split else (factor, quotient)
            return (
                IterDomain(outer, parent.kind, outer_extent),
                IterDomain(inner, parent.kind, inner_extent),
            )
        case Merge(outer, inner, out):
            a, b = axes[outer], axes[inner]
            kind = b.kind if a.kind.value == "b" else a.kind
            return (IterDomain(out, kind, a.extent * b.extent),)
        case Swizzle1d(source, out):
            return (replace(axes[source], name=out),)


def fresh_name(program: Program, letter: str) -> tuple[Program, str]:
    """The next unused name of a letter, and the Program that has counted it."""
    serial = program.serials.get(letter, 0)
    return replace(program, serials={**program.serials, letter: serial + 1}), f"{letter}{serial}"
