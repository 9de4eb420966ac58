"""Arithmetic on sizes: it stays an expression in sizes, so that its result may be a shape."""

from __future__ import annotations

from collections.abc import Sequence

from meshfuse.base.dtypes import DataType
from meshfuse.expr.nodes import IntExpr
from meshfuse.expr.simplify import as_expr, const
from meshfuse.ir.ops import Literal


def fold_sizes(function: str, operands: Sequence[object]) -> IntExpr | None:
    """The scalar function of these operands as a size.

    None where no operand is a size, where one is neither that nor an integer, and for a function
    that sizes do not have.
    """
    if not any(isinstance(operand, IntExpr) for operand in operands):
        return None
    terms = [_as_size(operand) for operand in operands]
    match function, terms:
        case "add", [IntExpr() as a, IntExpr() as b]:
            return a + b
        case "sub", [IntExpr() as a, IntExpr() as b]:
            return a - b
        case "mul", [IntExpr() as a, IntExpr() as b]:
            return a * b
        case "neg", [IntExpr() as a]:
            return -a
        case "div", [IntExpr() as a, IntExpr() as b] if _is_count(a) and _is_count(b):
            return a // b
        case _:
            return None


def _is_count(size: IntExpr) -> bool:
    """Whether it is known not to be negative, so that rounding down is truncating."""
    return size.low is not None and size.low >= 0 and size is not const(0)


def _as_size(operand: object) -> IntExpr | None:
    match operand:
        case IntExpr():
            return operand
        case Literal(int() as value, DataType.Int):
            return as_expr(value)
        case int() if not isinstance(operand, bool):
            return as_expr(operand)
        case _:
            return None
