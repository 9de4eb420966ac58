"""Random numbers through torch: each rank computes those of the global indices that it holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshfuse.base.dtypes import Scalar
from meshfuse.expr import IntExpr
from meshfuse.expr import evaluate as evaluate_int
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Literal, Operand
from meshfuse.ir.ops_random import Random, RandomSource
from meshfuse.runtime.evaluate_ops import Environment, Value, evaluate
from meshfuse.runtime.random import RandomState, between, draw_state, random_numbers
from meshfuse.runtime.torch_types import to_torch_dtype


def scalar_value(operand: Operand, env: Environment) -> Scalar:
    """The value of an operand that is no tensor."""
    match operand:
        case Literal():
            return operand.value
        case IntExpr():
            return evaluate_int(operand, env.sizes)
        case name:
            value = env.values[name]
            assert not isinstance(value, torch.Tensor)
            return value


def state_of(seed: Operand, offset: Operand, draw: int, env: Environment) -> RandomState:
    return RandomState(
        int(scalar_value(seed, env)),
        int(scalar_value(offset, env)) + draw,
    )


def whole_sizes(tensor: TensorName, env: Environment) -> Sequence[int]:
    """The global sizes of a tensor."""
    placed = env.placed.get(tensor)
    extents = env.shapes[tensor] if placed is None else placed.extents
    return [evaluate_int(extent, env.sizes) for extent in extents]


@evaluate.register
def _(expr: RandomSource, env: Environment) -> tuple[Value, ...]:
    """Without a driver that draws for all ranks: as one device."""
    state = draw_state(env.device, expr.draws)
    return (state.seed, state.offset)


@evaluate.register
def _(expr: Random, env: Environment) -> tuple[Value, ...]:
    dtype = to_torch_dtype(env.dtypes[expr.out])
    sizes = whole_sizes(expr.out, env)
    held = [env.held(expr.out, axis) for axis in range(len(sizes))]
    state = state_of(expr.seed, expr.offset, expr.draw, env)
    numbers = random_numbers(expr.distribution, sizes, held, state, dtype, env.device)
    first, second = (float(scalar_value(x, env)) for x in (expr.first, expr.second))
    if expr.distribution == "uniform":
        return (between(numbers, first, second, dtype),)
    return ((numbers * second).add_(first).to(dtype),)
