"""Verbs for what works element by element: scalar functions and casts."""

from __future__ import annotations

from collections.abc import Sequence

from meshfuse.base.dtypes import DataType, promote
from meshfuse.base.errors import UserError
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.build_shape import broadcast, set_
from meshfuse.ir.describe import describe_call
from meshfuse.ir.infer import (
    as_tensor,
    dtypes_after_promotion,
    infer,
    is_tensor,
    lookup_in,
    operand_dtype,
    values_of,
)
from meshfuse.ir.ops import Cast, Operand, Pointwise
from meshfuse.ir.pointwise import SCALAR_FUNCTIONS
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import append, define, fresh_scalar_name, fresh_tensor_name, new_tensor


def pointwise(
    program: Program, function: str, args: Sequence[Operand]
) -> tuple[Program, TensorName | ScalarName]:
    """Apply a row of SCALAR_FUNCTIONS; a tensor, or a scalar if no operand is a tensor.

    Shapes align at the last axis, and axes of size 1 stretch. Raises UserError for a wrong number
    of operands, unequal static sizes, a condition that is not Bool, or bool where torch takes none.
    """
    if function not in SCALAR_FUNCTIONS:
        call = describe_call(program, function, args)
        raise UserError(f"{call}: no such function; there are {', '.join(SCALAR_FUNCTIONS)}")
    if not any(is_tensor(program, arg) for arg in args):
        program, scalar = fresh_scalar_name(program)
        return define(program, Pointwise(scalar, function, tuple(args))), scalar
    # Inference on the operands as given: an error then restates the call without inserted axes.
    draft = Pointwise(TensorName(""), function, tuple(args))
    rank = max(len(result.axes) for result in infer(draft, program))
    program, args = _cast_zero_dim(program, function, args)
    aligned: list[Operand] = []
    for arg in args:
        tensor = as_tensor(program, arg)
        if tensor is not None:
            present = program.tensor(tensor).ndim
            flags = [True] * (rank - present) + [False] * present
            program, arg = broadcast(program, tensor, flags)
        aligned.append(arg)
    program, out = fresh_tensor_name(program)
    return define(program, Pointwise(out, function, tuple(aligned))), out


def _cast_zero_dim(
    program: Program, function: str, args: Sequence[Operand]
) -> tuple[Program, Sequence[Operand]]:
    """Cast the 0-dim tensors that promotion ranks below others, to the type it would then give.

    Reduced axes count as dimensions, as in nvFuser: the sum of all elements is not outranked.
    """
    values, lookup = values_of(function, args), lookup_in(program)
    tensors = [tensor for arg in values if (tensor := as_tensor(program, arg)) is not None]
    outranked = [tensor for tensor in tensors if not program.tensor(tensor).logical]
    if len(outranked) == len(tensors):
        return program, args
    promoted = promote(
        [program.tensor(tensor).dtype for tensor in tensors if tensor not in outranked],
        [program.tensor(tensor).dtype for tensor in outranked],
        [operand_dtype(arg, lookup)[0] for arg in values if not is_tensor(program, arg)],
    )
    dtype, _ = dtypes_after_promotion(function, promoted)
    casts: dict[Operand, TensorName] = {}
    for tensor in dict.fromkeys(outranked):
        if program.tensor(tensor).dtype is not promoted:
            program, casts[tensor] = cast(program, tensor, dtype)
    unchanged = len(args) - len(values)
    return program, [*args[:unchanged], *(casts.get(arg, arg) for arg in values)]


def cast(program: Program, src: TensorName, dtype: DataType) -> tuple[Program, TensorName]:
    """Convert to an element type; to its own type it is a copy."""
    definition = program.tensor(src)
    if definition.dtype is dtype:
        return set_(program, src)
    axes = [(axis.kind, axis.extent) for axis in definition.tensor_axes]
    program, out = new_tensor(program, dtype, axes)
    return append(program, Cast(out, src)), out
