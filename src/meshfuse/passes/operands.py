"""Give an expression other operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatch

from meshfuse.base.errors import InvariantError
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Expr, Linear, MatMul, Operand, Pointwise
from meshfuse.ir.ops_indexing import Cat, IndexSelect, TakeAlongAxis
from meshfuse.ir.rewrite import Name, map_names


@singledispatch
def with_operands(expr: Expr, operands: Sequence[Operand]) -> Expr:
    """`expr` reading `operands`, one for each of `expr.ins`.

    By position, so that a tensor that is read twice may become two. Expressions without a
    registration of their own change by name; InvariantError if that is not enough.
    """
    renamed: dict[Name, Name] = {}
    for old, new in zip(expr.ins, operands, strict=True):
        if isinstance(old, str) and isinstance(new, str) and renamed.setdefault(old, new) != new:
            raise InvariantError(f"{expr} reads {old} twice: register with_operands for its class")
    return map_names(expr, renamed)


@with_operands.register(Pointwise)
def _(expr: Pointwise, operands: Sequence[Operand]) -> Expr:
    return replace(expr, args=tuple(operands))


@with_operands.register(MatMul)
def _(expr: MatMul, operands: Sequence[Operand]) -> Expr:
    a, b = (TensorName(str(operand)) for operand in operands)
    return replace(expr, a=a, b=b)


@with_operands.register(Linear)
def _(expr: Linear, operands: Sequence[Operand]) -> Expr:
    src, weight, *bias = (TensorName(str(operand)) for operand in operands)
    return replace(expr, src=src, weight=weight, bias=bias[0] if bias else None)


@with_operands.register(Cat)
def _(expr: Cat, operands: Sequence[Operand]) -> Expr:
    return replace(expr, args=tuple(TensorName(str(operand)) for operand in operands))


@with_operands.register(IndexSelect)
@with_operands.register(TakeAlongAxis)
def _(expr: IndexSelect | TakeAlongAxis, operands: Sequence[Operand]) -> Expr:
    src, index = (TensorName(str(operand)) for operand in operands[:2])
    return replace(expr, src=src, index=index)
