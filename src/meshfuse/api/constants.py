"""Constants of a program: Python scalars rounded to an element type."""

from __future__ import annotations

import math
import sys

from meshfuse.base.dtypes import DataType, Scalar, is_floating, is_integral
from meshfuse.base.errors import UserTypeError, UserValueError
from meshfuse.base.rounding import round_number
from meshfuse.ir import build
from meshfuse.ir.ops import Literal

_INTEGER_BITS = {DataType.Int: 64, DataType.Int32: 32}


def constant(value: Scalar, dtype: DataType, call: object) -> Literal:
    """`value` as an element of `dtype`: floats round to nearest even, float to integer truncates.

    `call` restates the call in errors. UserValueError for what an integer type cannot hold.
    """
    if not isinstance(value, bool | int | float):
        raise UserTypeError(f"{call}: a constant is a bool, int or float, got {value!r}")
    if dtype is DataType.Bool:
        return build.literal(bool(value), dtype)
    if is_integral(dtype):
        return build.literal(_truncate(value, dtype, call), dtype)
    if is_floating(dtype):
        if not isinstance(value, float) and abs(value) >= 1 << sys.float_info.max_exp:
            raise UserValueError(
                f"{call}: {value} does not fit into {dtype!r}; it holds numbers up to 1.8e308"
            )
        return build.literal(round_number(float(value), dtype), dtype)
    raise UserTypeError(f"{call}: no constant has type {dtype!r}")


def _truncate(value: Scalar, dtype: DataType, call: object) -> int:
    bits = _INTEGER_BITS[dtype] - 1
    limit = 1 << bits
    if not math.isfinite(value) or not -limit <= int(value) < limit:
        raise UserValueError(
            f"{call}: {value} does not fit into {dtype!r}; it holds -2**{bits} to 2**{bits} - 1"
        )
    return int(value)
