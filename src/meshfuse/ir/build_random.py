"""Verbs that make random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshfuse.base.dtypes import DataType, is_floating
from meshfuse.base.errors import UserError
from meshfuse.expr import IntExpr, const_value
from meshfuse.ir.axes import AxisKind, ScalarName, TensorName
from meshfuse.ir.build_shape import requested_extent
from meshfuse.ir.describe import describe_call
from meshfuse.ir.infer import ONE
from meshfuse.ir.ops import Operand
from meshfuse.ir.ops_random import Random, RandomSource
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import append, define, fresh_scalar_name, new_tensor, replace_expr

Numbers = tuple[Operand, Operand, int]
"""Seed, offset, and which draw of the program: what random numbers are made of."""


def random(
    program: Program,
    distribution: str,
    first: Operand,
    second: Operand,
    shape: Sequence[int | IntExpr | ScalarName],
    dtype: DataType = DataType.Float,
    rng_seed: Operand | None = None,
    rng_offset: Operand | None = None,
) -> tuple[Program, TensorName]:
    """uniform on [first, second), or normal of mean `first` and standard deviation `second`.

    Seed and offset come together; without them each call draws from torch's generator. Raises
    UserError for one without the other, a type that is not floating, and a size below 0.
    """
    call = describe_call(program, distribution, [first, second], shape=list(shape))
    if not is_floating(dtype):
        raise UserError(
            f"{call}, dtype={dtype.value}: Random distributions only create floating point types! "
            "Choose one, and cast the result"
        )
    if (rng_seed is None) != (rng_offset is None):
        raise UserError(f"{call}: rng_seed and rng_offset must be given together")
    extents = [requested_extent(call, size) for size in shape]
    if rng_seed is None or rng_offset is None:
        program, (rng_seed, rng_offset, draw) = next_draw(program)
    else:
        draw = 0
    axes = [ONE if const_value(e) == 1 else (AxisKind.iteration, e) for e in extents]
    program, out = new_tensor(program, dtype, axes)
    numbers = Random(out, distribution, first, second, rng_seed, rng_offset, draw)
    return append(program, numbers), out


def next_draw(program: Program) -> tuple[Program, Numbers]:
    """One draw more from the program's source, which is entered at the first."""
    source = next((e for e in program.fusion.exprs if isinstance(e, RandomSource)), None)
    if source is None:
        program, seed = fresh_scalar_name(program)
        program, offset = fresh_scalar_name(program)
        return define(program, RandomSource(seed, offset, 1)), (seed, offset, 0)
    more = replace(source, draws=source.draws + 1)
    return replace_expr(program, source, [more]), (source.seed, source.offset, source.draws)
