"""Verbs for products of matrices."""

from __future__ import annotations

from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Linear, MatMul
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import define, fresh_tensor_name


def matmul(program: Program, a: TensorName, b: TensorName) -> tuple[Program, TensorName]:
    """torch.matmul. Raises UserError for 0-dim operands, unequal types or sizes that do not fit."""
    program, out = fresh_tensor_name(program)
    return define(program, MatMul(out, a, b)), out


def linear(
    program: Program, src: TensorName, weight: TensorName, bias: TensorName | None = None
) -> tuple[Program, TensorName]:
    """src [*batch, k], weight [*d, n, k], bias [*d, n]  ->  [*d, *batch, n].

    Raises UserError for unequal types, ranks or sizes that do not fit.
    """
    program, out = fresh_tensor_name(program)
    return define(program, Linear(out, src, weight, bias)), out
