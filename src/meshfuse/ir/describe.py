"""How error messages name operands: `T3 f32[i0, 64]`, with the sizes of the tensor axes."""

from __future__ import annotations

from collections.abc import Sequence

from meshfuse.expr import IntExpr
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.ops import Literal, Operand
from meshfuse.ir.program import Program


def describe(program: Program, operand: Operand) -> str:
    """An operand with its type and, for a tensor, its shape."""
    if isinstance(operand, Literal):
        return str(operand.value)
    if isinstance(operand, IntExpr):
        return f"({operand})"
    if operand in program.fusion.scalars:
        return f"{operand} {program.fusion.scalars[ScalarName(operand)].dtype.value}"
    definition = program.tensor(TensorName(operand))
    sizes = ", ".join(str(axis.extent) for axis in definition.tensor_axes)
    return f"{operand} {definition.dtype.value}[{sizes}]"


def describe_call(
    program: Program, function: str, operands: Sequence[Operand], **arguments: object
) -> str:
    """The call as the user might have written it, operands with their shapes."""
    parts = [describe(program, operand) for operand in operands]
    parts += [f"{name}={value}" for name, value in arguments.items()]
    return f"{function}({', '.join(parts)})"
