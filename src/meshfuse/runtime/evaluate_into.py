"""Run an expression through torch into an existing tensor, for who runs it by itself."""

from __future__ import annotations

import torch

from meshfuse.base.errors import UserError
from meshfuse.ir.ops import Expr, Linear, MatMul, Pointwise, Reduction, Set
from meshfuse.ir.printer import op_name
from meshfuse.runtime.bound_exprs import Scope, bind_into
from meshfuse.runtime.evaluate_ops import Environment


def evaluate_into(expr: Expr, env: Environment, out: torch.Tensor) -> None:
    """Leave the expression's one output in `out`, which has its shape and type.

    For operations that torch has an out form of: matmul, linear, binary ones, reductions, copies.
    Raises UserError naming any other.
    """
    is_binary = isinstance(expr, Pointwise) and len(expr.args) == 2
    if not is_binary and not isinstance(expr, Linear | MatMul | Reduction | Set):
        raise UserError(
            f"{op_name(expr)} makes {', '.join(expr.outs)} as a new tensor and takes no "
            "pre-allocated output; matmul, linear, binary operations, reductions and copies do"
        )
    names = (name for name in (*expr.ins, *expr.outs) if isinstance(name, str))
    bind_into(expr, Scope({name: name for name in names}, env))(env.values, out)
