"""Running values of reductions: how they start, take an element, and bring lanes together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshfuse.base.dtypes import REDUCED_FLOATS, DataType, compute_dtype
from meshfuse.ir.ops import Literal, Reduction, Welford
from meshfuse.ir.pointwise import REDUCTION_FUNCTIONS
from meshfuse.ir.program import Program
from meshfuse.kernel.blocks import BodyBuilder, Value
from meshfuse.kernel.nodes import (
    Combine,
    Compute,
    Convert,
    IndexName,
    KernelOperand,
    Mask,
    Reduce,
    ValueName,
    WelfordReduce,
    WelfordStep,
)
from meshfuse.kernel.values import identity_literal

Reducing = Reduction | Welford


def accumulator_dtypes(program: Program, expr: Reducing) -> tuple[DataType, ...]:
    """The types reductions run in: one, or those of mean, m2 and count."""
    return tuple(compute_dtype(program.tensor(out).dtype) for out in expr.outs)


def identities(program: Program, expr: Reducing) -> tuple[Literal, ...]:
    """The values of a reduction of nothing."""
    dtypes = accumulator_dtypes(program, expr)
    match expr:
        case Reduction():
            identity = REDUCTION_FUNCTIONS[expr.function].identity
            return (identity_literal(identity, dtypes[0]),)
        case Welford():
            return tuple(identity_literal(0, dtype) for dtype in dtypes)


def emit_step(
    body: BodyBuilder,
    expr: Reducing,
    running: Sequence[ValueName],
    src: Sequence[KernelOperand],
    mask: Mask,
) -> tuple[ValueName, ...]:
    """Take one element into the running values: of each operand, in the accumulator's type."""
    outs = tuple(body.fresh_value() for _ in running)
    match expr:
        case Reduction():
            body.emit(Combine(outs[0], expr.function, running[0], src[0], mask))
        case Welford():
            mean, m2, count = outs
            old_mean, old_m2, old_count = running
            body.emit(
                WelfordStep(mean, m2, count, old_mean, old_m2, old_count, src[0], mask, *src[1:])
            )
    return outs


def emit_end(
    body: BodyBuilder,
    program: Program,
    expr: Reducing,
    running: Sequence[ValueName],
    tiles: tuple[IndexName, ...],
    *,
    may_be_empty: bool,
) -> tuple[Value, ...]:
    """The results after the last loop: lanes along `tiles` combined, 16-bit floats rounded."""
    if tiles:
        outs = tuple(body.fresh_value() for _ in running)
        match expr:
            case Reduction():
                body.emit(Reduce(outs[0], expr.function, running[0], tiles))
            case Welford():
                mean, m2, count = outs
                src_mean, src_m2, src_count = running
                body.emit(WelfordReduce(mean, m2, count, src_mean, src_m2, src_count, tiles))
        running = outs
    if isinstance(expr, Welford) and may_be_empty:
        dtype = program.tensor(expr.mean).dtype
        running = (_mean_or_nan(body, running[0], running[2], dtype), *running[1:])
    return tuple(
        _rounded(body, name, program.tensor(out).dtype)
        for name, out in zip(running, expr.outs, strict=True)
    )


def _mean_or_nan(
    body: BodyBuilder, mean: ValueName, count: ValueName, dtype: DataType
) -> ValueName:
    """The mean of nothing is NaN."""
    empty, out = body.fresh_value(), body.fresh_value()
    body.emit(Compute(empty, "lt", DataType.Bool, (count, Literal(1, DataType.Int))))
    nan = Literal(math.nan, compute_dtype(dtype))
    body.emit(Compute(out, "where", compute_dtype(dtype), (empty, nan, mean)))
    return out


def _rounded(body: BodyBuilder, name: ValueName, dtype: DataType) -> Value:
    if dtype not in REDUCED_FLOATS:
        return Value(name, dtype, body.depth)
    out = body.fresh_value()
    body.emit(Convert(out, dtype, name))
    return Value(out, dtype, body.depth)
