"""Elements of tensors, and which elements of its operands an expression reads for one of its own.

Views do nothing else: they change the index.
"""

from __future__ import annotations

from functools import singledispatch
from typing import final

from meshfuse.base.errors import ScheduleError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, const
from meshfuse.facts.facts import tensor_operands
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.ops import (
    Broadcast,
    Cast,
    Expand,
    Expr,
    Permute,
    Pointwise,
    Reduction,
    Reshape,
    Set,
    Squeeze,
    Welford,
)
from meshfuse.ir.program import Program
from meshfuse.ir.terms import Terms
from meshfuse.kernel.index import bounds_within, ragged_bounds, source_indices, symbol_names
from meshfuse.kernel.nodes import Mask

Index = tuple[IntExpr, ...]


@final
@frozen_dataclass
class Element:
    """One element of a tensor, by its index on each tensor axis, wanted where `bounds` hold."""

    tensor: TensorName
    index: Index
    bounds: Mask

    @property
    def mask(self) -> Mask:
        """The bounds that matter to this element."""
        return bounds_within(self.bounds, symbol_names(self.index))


@singledispatch
def operand_elements(expr: Expr, program: Program, element: Element) -> tuple[Element, ...]:
    """One element of each tensor operand, for an element of the output by its root axes.

    Reductions take the index of one term: their root axes, reduced ones included.
    """
    raise ScheduleError(
        "operation",
        element.tensor,
        None,
        f"{type(expr).__name__} has no form inside a kernel",
        "Give it a segment of its own.",
    )


@operand_elements.register(Pointwise)
@operand_elements.register(Cast)
@operand_elements.register(Set)
@operand_elements.register(Expand)
@operand_elements.register(Reshape)
@operand_elements.register(Reduction)
@operand_elements.register(Welford)
def _(expr: Expr, program: Program, element: Element) -> tuple[Element, ...]:
    """Axis by axis; index 0 on the axes that the operand has as broadcast."""
    return tuple(
        Element(operand, _stretched(program, operand, element.index), element.bounds)
        for operand in tensor_operands(program, expr)
    )


def _stretched(program: Program, operand: TensorName, index: Index) -> Index:
    axes = program.tensor(operand).tensor_axes
    return tuple(
        const(0) if axis.kind is AxisKind.broadcast else position
        for axis, position in zip(axes, index, strict=True)
    )


@operand_elements.register
def _(expr: Broadcast, program: Program, element: Element) -> tuple[Element, ...]:
    kept = zip(element.index, expr.inserted, strict=True)
    index = tuple(position for position, inserted in kept if not inserted)
    return (Element(expr.src, index, element.bounds),)


@operand_elements.register
def _(expr: Terms, program: Program, element: Element) -> tuple[Element, ...]:
    return (Element(expr.src, element.index[:-1], element.bounds),)


@operand_elements.register
def _(expr: Permute, program: Program, element: Element) -> tuple[Element, ...]:
    index = tuple(element.index[expr.dims.index(k)] for k in range(len(expr.dims)))
    return (Element(expr.src, index, element.bounds),)


@operand_elements.register
def _(expr: Squeeze, program: Program, element: Element) -> tuple[Element, ...]:
    kept = iter(element.index)
    rank = program.tensor(expr.src).ndim
    index = tuple(const(0) if k in expr.dims else next(kept) for k in range(rank))
    return (Element(expr.src, index, element.bounds),)


def root_element(program: Program, element: Element) -> Element:
    """The same element by the axes that the defining expression speaks of.

    The steps of a reshape are exact; others may leave iterations idle, which bounds then tell.
    """
    definition = program.tensor(element.tensor)
    if not definition.root:
        return element
    axes = program.all_axes(element.tensor)
    leaves = {
        axis.name: index for axis, index in zip(definition.tensor_axes, element.index, strict=True)
    }
    indices = source_indices(definition.root_steps, axes, leaves)
    exact = all(axis.kind.is_tensor_axis for axis in definition.root)
    bounds = () if exact else ragged_bounds(definition.root_steps, axes, indices)
    root = tuple(indices[axis.name] for axis in definition.root if axis.kind.is_tensor_axis)
    return Element(element.tensor, root, (*element.bounds, *bounds))
