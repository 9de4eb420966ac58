"""Which axes of a segment's tensors run together: the axes of its iteration space.

Axes that an expression maps to each other are one axis of the space, named by the first of them. A
broadcast axis joins the axis it stretches to, but does not tie two of those together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, const_value
from meshfuse.facts.axis_map import axis_pairs
from meshfuse.facts.facts import tensor_outputs
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, TensorName
from meshfuse.ir.ops import Expr, Reduction, Welford
from meshfuse.ir.program import Program

SpaceAxis = AxisName
"""An axis of the space: the name of its first tensor axis."""


@final
@frozen_dataclass
class IterationSpace:
    """`axis_of` maps tensor axes to axes of the space, `extents` gives the size of those."""

    program: Program
    axis_of: Mapping[AxisName, SpaceAxis]
    extents: Mapping[SpaceAxis, IntExpr]

    def spanned(self, axes: Iterable[IterDomain]) -> tuple[SpaceAxis, ...]:
        """The axes of the space that tensor axes run over; none for broadcast axes and size 1."""
        return tuple(
            self.axis_of[axis.name]
            for axis in axes
            if axis.kind is not AxisKind.broadcast
            and axis.name in self.axis_of
            and const_value(self.extents[self.axis_of[axis.name]]) != 1
        )

    def of_tensor(self, tensor: TensorName) -> tuple[SpaceAxis, ...]:
        """The axes of the space that the elements of a tensor run over."""
        return self.spanned(self.program.tensor(tensor).tensor_axes)

    def memory_order(self, tensor: TensorName) -> tuple[SpaceAxis, ...]:
        """As `of_tensor`, slowest axis in memory first."""
        definition = self.program.tensor(tensor)
        allocation = self.program.schedule(tensor).allocation
        if allocation is None:
            return self.of_tensor(tensor)
        axes = {axis.name: axis for axis in definition.tensor_axes}
        return self.spanned(axes[name] for name in allocation.order)

    def is_contiguous(self, tensor: TensorName) -> bool:
        allocation = self.program.schedule(tensor).allocation
        if allocation is None:
            return True
        axes = {axis.name: axis for axis in self.program.tensor(tensor).tensor_axes}
        return all(
            flag or axes[name].kind is AxisKind.broadcast
            for name, flag in zip(allocation.order, allocation.contiguity, strict=True)
        )

    def kept(self, expr: Reduction | Welford) -> frozenset[SpaceAxis]:
        """The axes of the space that a reduction keeps."""
        return frozenset(self.spanned(_root_axes(self.program, expr, reduced=False)))

    def reduced(self, expr: Reduction | Welford) -> frozenset[SpaceAxis]:
        """The axes of the space that a reduction reduces."""
        return frozenset(self.spanned(_root_axes(self.program, expr, reduced=True)))


def _root_axes(
    program: Program, expr: Reduction | Welford, *, reduced: bool
) -> tuple[IterDomain, ...]:
    axes = program.tensor(expr.outs[0]).maybe_root
    return tuple(axis for axis in axes if (axis.kind is AxisKind.reduction) == reduced)


def reductions_of(program: Program) -> tuple[Reduction | Welford, ...]:
    """The reductions of a segment, in program order."""
    return tuple(expr for expr in program.fusion.exprs if isinstance(expr, Reduction | Welford))


def iteration_space(program: Program) -> IterationSpace:
    """The iteration space of a segment. Linear in the number of its axes."""
    parents: dict[AxisName, AxisName] = {}

    def find(axis: AxisName) -> AxisName:
        while parents.setdefault(axis, axis) != axis:
            parents[axis] = parents[parents[axis]]
            axis = parents[axis]
        return axis

    stretched: list[tuple[AxisName, AxisName]] = []
    for expr in program.fusion.exprs:
        for source, target in _mapped_axes(program, expr):
            if source.kind is AxisKind.broadcast:
                stretched.append((source.name, target.name))
            elif find(source.name) != find(target.name):
                parents[find(target.name)] = find(source.name)
    axis_of: dict[AxisName, SpaceAxis] = {}
    extents: dict[SpaceAxis, IntExpr] = {}
    for definition in program.fusion.tensors.values():
        for axis in (*definition.root, *definition.logical):
            if axis.kind is not AxisKind.broadcast:
                axis_of[axis.name] = find(axis.name)
                extents.setdefault(find(axis.name), axis.extent)
    for source, target in reversed(stretched):
        if target in axis_of:
            axis_of.setdefault(source, axis_of[target])
    return IterationSpace(program, axis_of, extents)


def _mapped_axes(program: Program, expr: Expr) -> Iterator[tuple[IterDomain, IterDomain]]:
    """Pairs of an operand's axis and the output's axis that it becomes."""
    for position, places in axis_pairs(expr, program).items():
        source = program.tensor(TensorName(str(expr.ins[position])))
        for out in tensor_outputs(program, expr):
            target = program.tensor(out).maybe_root
            for axis, place in zip(source.tensor_axes, places, strict=True):
                if place is not None:
                    yield axis, target[place]
