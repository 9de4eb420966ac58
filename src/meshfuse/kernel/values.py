"""Values of tensors at an element: loads and arithmetic, made where they are first needed.

A value is asked for by tensor and index, and asks its operands in turn; views only change the
index. What a block already has is shared, everything else is computed again: loads and arithmetic
are cheap next to memory. A reduction is the exception: its value stands where its loop ended, or it
is not available.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import singledispatch
from typing import final

from meshfuse.base.dtypes import REDUCED_FLOATS, DataType, Scalar, compute_dtype, is_floating
from meshfuse.base.errors import InvariantError, ScheduleError
from meshfuse.expr import IntExpr, const
from meshfuse.facts.facts import Facts
from meshfuse.ir.axes import AxisKind, ScalarName, TensorName
from meshfuse.ir.infer import is_tensor, pointwise_dtypes
from meshfuse.ir.ops import (
    Broadcast,
    Cast,
    Expand,
    Expr,
    Literal,
    Operand,
    Permute,
    Pointwise,
    Reduction,
    Set,
    Squeeze,
    Welford,
)
from meshfuse.ir.pointwise import SCALAR_FUNCTIONS, ResultRule
from meshfuse.ir.program import Program
from meshfuse.kernel.blocks import BodyBuilder, Value
from meshfuse.kernel.index import bounds_within, ragged_bounds, source_indices, symbol_names
from meshfuse.kernel.nodes import BufferName, Compute, Convert, Load, Mask, Size, ValueName

Index = tuple[IntExpr, ...]


@final
@dataclass(frozen=True, slots=True)
class Emitter:
    """What emitting values needs: the program, who defines what, the body, and the reads so far."""

    program: Program
    facts: Facts
    body: BodyBuilder
    loaded: dict[TensorName, None] = field(default_factory=dict[TensorName, None])
    scalars: dict[ScalarName, None] = field(default_factory=dict[ScalarName, None])


@final
@dataclass(frozen=True, slots=True)
class Element:
    """One element of a tensor, by its index on each tensor axis, wanted where `bounds` hold."""

    index: Index
    bounds: Mask

    def at(self, index: Index) -> Element:
        return Element(index, self.bounds)

    @property
    def mask(self) -> Mask:
        """The bounds that matter to this element."""
        return bounds_within(self.bounds, symbol_names(self.index))


def value_at(emitter: Emitter, tensor: TensorName, element: Element) -> Value:
    """The value of one element, from an open block or computed now.

    Raises ScheduleError if it needs a reduction that has not ended where its loops can be seen from
    here.
    """
    body = emitter.body
    expr = emitter.facts.definitions.get(tensor)
    if isinstance(expr, Reduction | Welford):
        return _reduced_value(emitter, tensor, element)
    key = (tensor, element.index, element.mask)
    found = body.find(key)
    if found is not None:
        return found
    if expr is None:
        return body.keep(key, _load(emitter, tensor, element))
    return body.keep(
        key, lower_value(expr, emitter, tensor, root_element(emitter, tensor, element))
    )


def keep_reduced(emitter: Emitter, tensor: TensorName, index: Index, value: Value) -> None:
    """Make the result of a reduction available at its kept index."""
    emitter.body.keep((tensor, index, ()), value)


def _reduced_value(emitter: Emitter, tensor: TensorName, element: Element) -> Value:
    found = emitter.body.find((tensor, element.index, ()))
    if found is None:
        raise ScheduleError(
            "value-and-loop",
            tensor,
            None,
            f"its value at [{', '.join(map(str, element.index))}] is needed outside its own loops",
            "Give the reduction and its consumers the same outer loops, or store it first.",
        )
    return found


def root_element(emitter: Emitter, tensor: TensorName, element: Element) -> Element:
    """The same element by the axes that the defining expression speaks of."""
    definition = emitter.program.tensor(tensor)
    if not definition.root:
        return element
    axes = {axis.name: axis for axis in (*definition.root, *definition.logical)}
    leaves = {
        axis.name: index for axis, index in zip(definition.tensor_axes, element.index, strict=True)
    }
    indices = source_indices(definition.root_steps, axes, leaves)
    bounds = ragged_bounds(definition.root_steps, axes, indices)
    root = tuple(indices[axis.name] for axis in definition.root if axis.kind.is_tensor_axis)
    return Element(root, (*element.bounds, *bounds))


def _load(emitter: Emitter, tensor: TensorName, element: Element) -> Value:
    body, out = emitter.body, emitter.body.fresh_value()
    mask = element.mask
    used = (*element.index, *(e for bound in mask for e in (bound.index, bound.limit)))
    depth = body.depth_of(symbol_names(used))
    body.emit(Load(out, BufferName(tensor), element.index, mask), depth)
    emitter.loaded[tensor] = None
    return Value(out, emitter.program.tensor(tensor).dtype, depth)


# Expressions.


@singledispatch
def lower_value(expr: Expr, emitter: Emitter, out: TensorName, element: Element) -> Value:
    """The value of `out`, which `expr` defines, at an element by its root axes."""
    raise ScheduleError(
        "operation",
        out,
        None,
        f"{type(expr).__name__} has no form inside a kernel",
        "Give it a segment of its own.",
    )


@lower_value.register
def _(expr: Pointwise, emitter: Emitter, out: TensorName, element: Element) -> Value:
    return _apply(expr, emitter, element, emitter.program.tensor(out).dtype)


@lower_value.register
def _(expr: Cast, emitter: Emitter, out: TensorName, element: Element) -> Value:
    value = value_at(emitter, expr.src, operand_element(emitter, expr.src, element))
    return cast_value(emitter, value, emitter.program.tensor(out).dtype)


@lower_value.register(Set)
@lower_value.register(Expand)
def _(expr: Set | Expand, emitter: Emitter, out: TensorName, element: Element) -> Value:
    return value_at(emitter, expr.src, operand_element(emitter, expr.src, element))


@lower_value.register
def _(expr: Broadcast, emitter: Emitter, out: TensorName, element: Element) -> Value:
    kept = zip(element.index, expr.inserted, strict=True)
    index = tuple(position for position, inserted in kept if not inserted)
    return value_at(emitter, expr.src, element.at(index))


@lower_value.register
def _(expr: Permute, emitter: Emitter, out: TensorName, element: Element) -> Value:
    index = tuple(element.index[expr.dims.index(k)] for k in range(len(expr.dims)))
    return value_at(emitter, expr.src, element.at(index))


@lower_value.register
def _(expr: Squeeze, emitter: Emitter, out: TensorName, element: Element) -> Value:
    kept = iter(element.index)
    rank = emitter.program.tensor(expr.src).ndim
    index = tuple(const(0) if k in expr.dims else next(kept) for k in range(rank))
    return value_at(emitter, expr.src, element.at(index))


def operand_element(emitter: Emitter, operand: TensorName, element: Element) -> Element:
    """The element of an operand of equal rank: index 0 on the axes that it has as broadcast."""
    axes = emitter.program.tensor(operand).tensor_axes
    index = tuple(
        const(0) if axis.kind is AxisKind.broadcast else position
        for axis, position in zip(axes, element.index, strict=True)
    )
    return element.at(index)


# Arithmetic.


def _apply(expr: Pointwise, emitter: Emitter, element: Element, result: DataType) -> Value:
    operands, _ = pointwise_dtypes(emitter.program, expr.function, expr.args)
    select = SCALAR_FUNCTIONS[expr.function].rule is ResultRule.select
    args: list[Value] = []
    for position, arg in enumerate(expr.args):
        value = _operand_value(emitter, arg, element)
        condition = select and position == 0
        args.append(convert(emitter, value, DataType.Bool if condition else operands))
    depth = max((arg.depth for arg in args), default=0)
    out = emitter.body.fresh_value()
    emitter.body.emit(
        Compute(out, expr.function, result, tuple(arg.operand for arg in args)), depth
    )
    return Value(out, result, depth)


def _operand_value(emitter: Emitter, operand: Operand, element: Element) -> Value:
    match operand:
        case Literal():
            return Value(operand, operand.dtype, 0)
        case IntExpr():
            return _size_value(emitter, operand)
        case _ if is_tensor(emitter.program, operand):
            tensor = TensorName(operand)
            return value_at(emitter, tensor, operand_element(emitter, tensor, element))
        case _:
            return _scalar_value(emitter, ScalarName(operand))


def _size_value(emitter: Emitter, size: IntExpr) -> Value:
    key = ("", (size,), ())
    found = emitter.body.find(key)
    if found is None:
        out = emitter.body.fresh_value()
        emitter.body.emit(Size(out, size), 0)
        found = emitter.body.keep(key, Value(out, DataType.Int, 0))
    return found


def _scalar_value(emitter: Emitter, name: ScalarName) -> Value:
    key = (name, (), ())
    found = emitter.body.find(key)
    if found is not None:
        return found
    dtype = emitter.program.fusion.scalars[name].dtype
    expr = emitter.facts.definitions.get(name)
    if expr is None:
        emitter.scalars[name] = None
        return emitter.body.keep(key, Value(ValueName(name), dtype, 0))
    if not isinstance(expr, Pointwise):
        raise InvariantError(f"scalar {name} is defined by {expr}")
    return emitter.body.keep(key, _apply(expr, emitter, Element((), ()), dtype))


def convert(emitter: Emitter, value: Value, dtype: DataType) -> Value:
    """The value in the type that arithmetic on `dtype` runs in; 16-bit floats are not rounded."""
    wanted = compute_dtype(dtype)
    if isinstance(value.operand, Literal):
        folded = fold_literal(value.operand, wanted)
        if folded is not None:
            return Value(folded, wanted, 0)
    elif compute_dtype(value.dtype) is wanted:
        return Value(value.operand, wanted, value.depth)
    return _converted(emitter, value, wanted)


def cast_value(emitter: Emitter, value: Value, dtype: DataType) -> Value:
    """The value as an element of type `dtype`, rounded. Widening a 16-bit float is free."""
    same = value.dtype is dtype
    widening = value.dtype in REDUCED_FLOATS and dtype is DataType.Float
    if (same or widening) and not isinstance(value.operand, Literal):
        return Value(value.operand, dtype, value.depth)
    return _converted(emitter, value, dtype)


def _converted(emitter: Emitter, value: Value, dtype: DataType) -> Value:
    key = (f"{value.operand} as {dtype.value}", (), ())
    found = emitter.body.find(key)
    if found is None:
        out = emitter.body.fresh_value()
        emitter.body.emit(Convert(out, dtype, value.operand), value.depth)
        found = emitter.body.keep(key, Value(out, dtype, value.depth))
    return found


def fold_literal(literal: Literal, dtype: DataType) -> Literal | None:
    """The literal in another type; None if that depends on the target (inf to an integer)."""
    value: Scalar = literal.value
    if is_floating(dtype):
        return Literal(float(value), dtype)
    if dtype is DataType.Bool:
        return Literal(bool(value), dtype)
    return Literal(int(value), dtype) if math.isfinite(value) else None


def identity_literal(identity: int | str, dtype: DataType) -> Literal:
    """The value of an empty reduction in an element type that arithmetic runs in."""
    if identity not in ("lowest", "highest"):
        return Literal(float(identity) if is_floating(dtype) else int(identity), dtype)
    low, high = _RANGES[dtype]
    return Literal(low if identity == "lowest" else high, dtype)


_RANGES: Mapping[DataType, tuple[Scalar, Scalar]] = {
    DataType.Double: (-math.inf, math.inf),
    DataType.Float: (-math.inf, math.inf),
    DataType.Int: (-(2**63), 2**63 - 1),
    DataType.Int32: (-(2**31), 2**31 - 1),
    DataType.Bool: (False, True),
}
