"""Values of tensors at an element: loads and arithmetic, made where they are first needed.

A value is asked for by tensor and index, and asks its operands in turn; views only change the
index. What a block already has is shared, everything else is computed again: loads and arithmetic
are cheap next to memory. A reduction is the exception: its value stands where its loop ended, or it
is not available.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import final

from meshfuse.base.dtypes import REDUCED_FLOATS, DataType, Scalar, compute_dtype, is_floating
from meshfuse.base.errors import InvariantError, ScheduleError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr
from meshfuse.facts.facts import Facts
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.infer import as_tensor, pointwise_dtypes
from meshfuse.ir.ops import Cast, Literal, Operand, Pointwise, Reduction, Welford
from meshfuse.ir.pointwise import SCALAR_FUNCTIONS, ResultRule
from meshfuse.ir.program import Program
from meshfuse.kernel.blocks import BodyBuilder, Value
from meshfuse.kernel.elements import Element, Index, operand_elements, root_element
from meshfuse.kernel.index import symbol_names
from meshfuse.kernel.nodes import (
    BufferName,
    Compute,
    Convert,
    KernelOperand,
    Load,
    Size,
    ValueName,
)


@final
@frozen_dataclass
class Emitter:
    """What emitting values needs: the program, who defines what, the body, and the reads so far."""

    program: Program
    facts: Facts
    body: BodyBuilder
    loaded: dict[TensorName, None] = field(default_factory=dict[TensorName, None])
    scalars: dict[ScalarName, None] = field(default_factory=dict[ScalarName, None])


def value_at(emitter: Emitter, element: Element) -> Value:
    """The value of one element, from an open block or computed now.

    Works on a list of what is still to be computed, as chains of operations can be long. Raises
    ScheduleError if it needs a reduction that has not ended where its loops can be seen from here.
    """
    pending = [element]
    while True:
        found = _find(emitter, pending[-1])
        if found is not None:
            pending.pop()
            if not pending:
                return found
            continue
        missing = _missing_operands(emitter, pending[-1])
        if missing:
            pending += missing
        else:
            _keep(emitter, pending[-1], _compute(emitter, pending[-1]))


def _find(emitter: Emitter, element: Element) -> Value | None:
    expr = emitter.facts.definitions.get(element.tensor)
    if isinstance(expr, Reduction | Welford):
        return _reduced_value(emitter, element)
    return emitter.body.find((element.tensor, element.index, element.mask))


def _keep(emitter: Emitter, element: Element, value: Value) -> None:
    emitter.body.keep((element.tensor, element.index, element.mask), value)


def keep_reduced(emitter: Emitter, tensor: TensorName, index: Index, value: Value) -> None:
    """Make the result of a reduction available at its kept index."""
    emitter.body.keep((tensor, index, ()), value)


def _reduced_value(emitter: Emitter, element: Element) -> Value:
    found = emitter.body.find((element.tensor, element.index, ()))
    if found is None:
        index = ", ".join(map(str, element.index))
        raise ScheduleError(
            "value-and-loop",
            element.tensor,
            None,
            f"its value at [{index}] is needed outside its own loops",
            "Give the reduction and its consumers the same outer loops, or store it first.",
        )
    return found


def _operands(emitter: Emitter, element: Element) -> tuple[Element, ...]:
    expr = emitter.facts.definitions.get(element.tensor)
    if expr is None:
        return ()
    return operand_elements(expr, emitter.program, root_element(emitter.program, element))


def _missing_operands(emitter: Emitter, element: Element) -> list[Element]:
    """The operands to compute first, the first one last."""
    operands = _operands(emitter, element)
    return [each for each in reversed(operands) if _find(emitter, each) is None]


def _compute(emitter: Emitter, element: Element) -> Value:
    """A value all of whose operands are there. Of a view it is the operand's."""
    expr = emitter.facts.definitions.get(element.tensor)
    if expr is None:
        return _load(emitter, element)
    operands = _operands(emitter, element)
    found = {each.tensor: _find(emitter, each) for each in operands}
    values = {tensor: value for tensor, value in found.items() if value is not None}
    dtype = emitter.program.tensor(element.tensor).dtype
    if isinstance(expr, Pointwise):
        return _apply(expr, emitter, values, dtype)
    (value,) = values.values()
    return cast_value(emitter, value, dtype) if isinstance(expr, Cast) else value


def _load(emitter: Emitter, element: Element) -> Value:
    body, out, mask = emitter.body, emitter.body.fresh_value(), element.mask
    used = (*element.index, *(e for bound in mask for e in (bound.index, bound.limit)))
    depth = body.depth_of(symbol_names(used))
    body.emit(Load(out, BufferName(element.tensor), element.index, mask), depth)
    emitter.loaded[element.tensor] = None
    return Value(out, emitter.program.tensor(element.tensor).dtype, depth)


# Arithmetic.


def _apply(
    expr: Pointwise, emitter: Emitter, tensors: Mapping[TensorName, Value], result: DataType
) -> Value:
    """`tensors` has the value of each tensor operand."""
    operands, _ = pointwise_dtypes(emitter.program, expr.function, expr.args)
    select = SCALAR_FUNCTIONS[expr.function].rule is ResultRule.select
    args: list[Value] = []
    for position, arg in enumerate(expr.args):
        tensor = as_tensor(emitter.program, arg)
        value = _scalar_operand(emitter, arg) if tensor is None else tensors[tensor]
        condition = select and position == 0
        args.append(convert(emitter, value, DataType.Bool if condition else operands))
    depth = max((arg.depth for arg in args), default=0)
    out = emitter.body.fresh_value()
    function, cheapest = _cheapest(expr.function, tuple(arg.operand for arg in args))
    emitter.body.emit(Compute(out, function, result, cheapest), depth)
    return Value(out, result, depth)


def _cheapest(
    function: str, args: tuple[KernelOperand, ...]
) -> tuple[str, tuple[KernelOperand, ...]]:
    """pow(x, 2)  ->  mul(x, x), which is no less exact."""
    if function == "pow" and isinstance(args[1], Literal) and args[1].value == 2:
        return "mul", (args[0], args[0])
    return function, args


def _scalar_operand(emitter: Emitter, operand: Operand) -> Value:
    match operand:
        case Literal():
            return Value(operand, operand.dtype, 0)
        case IntExpr():
            return _size_value(emitter, operand)
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
    return emitter.body.keep(key, _apply(expr, emitter, {}, dtype))


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
