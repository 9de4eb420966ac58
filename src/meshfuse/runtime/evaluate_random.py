"""Random numbers through torch: each rank computes those of the global indices that it holds."""

from __future__ import annotations

from meshfuse.ir.ops import Operand
from meshfuse.ir.ops_random import Random, RandomSource
from meshfuse.runtime.evaluate_ops import Environment, Value, evaluate
from meshfuse.runtime.random import RandomState, between, draw_state, random_numbers
from meshfuse.runtime.torch_types import to_torch_dtype


def state_of(seed: Operand, offset: Operand, draw: int, env: Environment) -> RandomState:
    return RandomState(int(env.scalar(seed)), int(env.scalar(offset)) + draw)


@evaluate.register
def _(expr: RandomSource, env: Environment) -> tuple[Value, ...]:
    """Without a driver that draws for all ranks: as one device."""
    state = draw_state(env.device, expr.draws)
    return (state.seed, state.offset)


@evaluate.register
def _(expr: Random, env: Environment) -> tuple[Value, ...]:
    dtype = to_torch_dtype(env.dtypes[expr.out])
    sizes = env.whole_sizes(expr.out)
    held = [env.held(expr.out, axis) for axis in range(len(sizes))]
    state = state_of(expr.seed, expr.offset, expr.draw, env)
    numbers = random_numbers(expr.distribution, sizes, held, state, dtype, env.device)
    first, second = (float(env.scalar(x)) for x in (expr.first, expr.second))
    if expr.distribution == "uniform":
        return (between(numbers, first, second, dtype),)
    return ((numbers * second).add_(first).to(dtype),)
