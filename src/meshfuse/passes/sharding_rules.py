"""What each expression lets a mesh axis do: a row per expression, on top of its axis map.

An axis of an operand may be sharded where the map carries it to an axis of the result: a kept axis
makes the result sharded, a reduced one makes it partial. Rows say the rest. An expression without a
row takes its operands whole.
"""

from __future__ import annotations

from functools import singledispatch
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.facts.axis_map import operand_axis_map
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.ops import (
    Broadcast,
    Cast,
    Expand,
    Expr,
    Linear,
    MatMul,
    Permute,
    Pointwise,
    Reduction,
    Reshape,
    Set,
    Squeeze,
    Welford,
)
from meshfuse.ir.ops_attention import SdpfaBwd, SdpfaFwd
from meshfuse.ir.ops_indexing import (
    Cat,
    IndexSelect,
    Iota,
    Pad,
    Scan,
    Slice,
    TakeAlongAxis,
    TopK,
)
from meshfuse.ir.ops_random import Random, RandomSource
from meshfuse.ir.program import Program
from meshfuse.ir.terms import Terms


@final
@frozen_dataclass
class ShardingRule:
    """`priority`: operand positions, those whose shardings a free result takes first in front.

    None: the most sharded first.
    """

    priority: tuple[int, ...] | None = None


@singledispatch
def sharding_rule(expr: Expr) -> ShardingRule | None:
    """The row of `expr`, None where there is none."""
    return None


@sharding_rule.register(Pointwise)
@sharding_rule.register(Cast)
@sharding_rule.register(Set)
@sharding_rule.register(Broadcast)
@sharding_rule.register(Expand)
@sharding_rule.register(Permute)
@sharding_rule.register(Squeeze)
@sharding_rule.register(Reshape)
@sharding_rule.register(Reduction)
@sharding_rule.register(Welford)
@sharding_rule.register(Slice)
@sharding_rule.register(Pad)
@sharding_rule.register(Cat)
@sharding_rule.register(IndexSelect)
@sharding_rule.register(TakeAlongAxis)
@sharding_rule.register(Scan)
@sharding_rule.register(Iota)
@sharding_rule.register(TopK)
@sharding_rule.register(SdpfaFwd)
@sharding_rule.register(SdpfaBwd)
@sharding_rule.register(RandomSource)
@sharding_rule.register(Random)
@sharding_rule.register(Terms)
def _(expr: Expr) -> ShardingRule | None:
    return ShardingRule()


@sharding_rule.register(Linear)
def _(expr: Linear) -> ShardingRule | None:
    """Weights are rarely worth moving: weight, bias, then the activation."""
    return ShardingRule((1, 2, 0))


@sharding_rule.register(MatMul)
def _(expr: MatMul) -> ShardingRule | None:
    return ShardingRule((1, 0))


def carried_axes(
    program: Program, expr: Expr, position: int, out: TensorName
) -> dict[AxisName, AxisName]:
    """Tensor axes of an operand -> (root) axes of `out` along which a sharding travels."""
    if sharding_rule(expr) is None:
        return {}
    return operand_axis_map(expr, program, position, out)
