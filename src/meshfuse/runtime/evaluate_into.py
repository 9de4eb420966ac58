"""Run an expression through torch into an existing tensor."""

from __future__ import annotations

import math
from functools import singledispatch

import torch

from meshfuse.base.errors import UserError
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Expr, Linear, MatMul, Pointwise, Reduction, Set
from meshfuse.ir.printer import op_name
from meshfuse.runtime.evaluate_ops import Environment, evaluate


@singledispatch
def evaluate_into(expr: Expr, env: Environment, out: torch.Tensor) -> None:
    """Leave the expression's one output in `out`, which has its shape and type.

    For operations that torch has an out form of: matmul, linear, binary ones, reductions, copies.
    Raises UserError naming any other.
    """
    raise _no_out_form(expr, op_name(expr))


def _no_out_form(expr: Expr, name: str) -> UserError:
    return UserError(
        f"{name} makes {', '.join(expr.outs)} as a new tensor and takes no pre-allocated output; "
        "matmul, linear, binary operations, reductions and copies do"
    )


@evaluate_into.register
def _(expr: MatMul, env: Environment, out: torch.Tensor) -> None:
    torch.matmul(env.tensor(expr.a), env.tensor(expr.b), out=out)


@evaluate_into.register
def _(expr: Linear, env: Environment, out: torch.Tensor) -> None:
    """Rounded once, as torch's linear does: the product and the bias are one operation."""
    src, weight = env.tensor(expr.src), env.tensor(expr.weight)
    if weight.dim() != 2 or not out.is_contiguous():
        _copy_result(expr, env, out)
        return
    count = math.prod(src.shape[:-1])
    rows, columns = src.reshape(count, src.shape[-1]), weight.mT
    into = out.view(count, weight.shape[0])
    if expr.bias is None:
        torch.mm(rows, columns, out=into)
    else:
        torch.addmm(env.tensor(expr.bias), rows, columns, out=into)


@evaluate_into.register
def _(expr: Pointwise, env: Environment, out: torch.Tensor) -> None:
    if len(expr.args) != 2:
        raise _no_out_form(expr, expr.function)
    terms = [env.values.get(TensorName(str(name))) for name in expr.args]
    if expr.function == "add" and all(_is_like(term, out) for term in terms):
        first, second = (env.tensor(TensorName(str(name))) for name in expr.args)
        torch.add(first, second, out=out)  # what loops add up: nothing lies between
    else:
        _copy_result(expr, env, out)


def _is_like(value: object, out: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return value.shape == out.shape and value.dtype == out.dtype and value.is_floating_point()


@evaluate_into.register
def _(expr: Reduction, env: Environment, out: torch.Tensor) -> None:
    _copy_result(expr, env, out)


@evaluate_into.register
def _(expr: Set, env: Environment, out: torch.Tensor) -> None:
    out.copy_(env.tensor(expr.src))


def _copy_result(expr: Expr, env: Environment, out: torch.Tensor) -> None:
    (result,) = evaluate(expr, env)
    assert isinstance(result, torch.Tensor)
    out.copy_(result)
