"""Types, constants and functions of the tile program as C++ spells them with the prelude."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from meshfuse.base.dtypes import DataType, Scalar, compute_dtype, is_floating, is_integral
from meshfuse.base.errors import Unsupported
from meshfuse.base.rounding import round_number

STORAGE_TYPES: dict[DataType, str] = {
    DataType.Double: "double",
    DataType.Float: "float",
    DataType.Half: "mf_half",
    DataType.BFloat16: "mf_bfloat16",
    DataType.Int: "int64_t",
    DataType.Int32: "int32_t",
    DataType.Bool: "mf_bool",
}
"""The element type of a buffer."""

SCALAR_TYPES: dict[DataType, str] = {
    DataType.Double: "double",
    DataType.Float: "float",
    DataType.Half: "float",
    DataType.BFloat16: "float",
    DataType.Int: "int64_t",
    DataType.Int32: "int32_t",
    DataType.Bool: "bool",
}
"""The type of a value that varies over no tile axis."""

_ROUNDINGS = {DataType.Half: "mf_round_half", DataType.BFloat16: "mf_round_bfloat16"}
_LOWEST_INT = {DataType.Int: -(2**63), DataType.Int32: -(2**31)}


def value_type(dtype: DataType, lanes: int) -> str:
    """The C++ type of a value. A tile's lanes of bool are masks of 32 bits."""
    scalar = SCALAR_TYPES[dtype]
    if lanes == 1:
        return scalar
    return f"mf_tile<{'int32_t' if dtype is DataType.Bool else scalar}, {lanes}>"


def spread(text: str, dtype: DataType, lanes: int) -> str:
    """A scalar repeated in each lane."""
    if lanes == 1:
        return text
    if dtype is DataType.Bool:
        return f"mf_spread_mask<{lanes}>({text})"
    return f"mf_spread<{SCALAR_TYPES[dtype]}, {lanes}>({text})"


def literal(value: Scalar, dtype: DataType) -> str:
    """A constant, rounded to `dtype` first, so that it is the number torch would hold."""
    if dtype is DataType.Bool:
        return "true" if value else "false"
    if is_integral(dtype):
        return _integer_literal(int(value), dtype)
    number = round_number(float(value), dtype)
    suffix = "" if dtype is DataType.Double else "f"
    if math.isnan(number):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(number):
        text = f"__builtin_inf{suffix}()"
        return f"(-{text})" if number < 0 else text
    text = f"{number!r}{suffix}"
    return f"({text})" if text.startswith("-") else text


def _integer_literal(value: int, dtype: DataType) -> str:
    suffix = "L" if dtype is DataType.Int else ""
    if value == _LOWEST_INT[dtype]:
        return f"(-{-(value + 1)}{suffix} - 1)"
    return f"({value}{suffix})" if value < 0 else f"{value}{suffix}"


def round_value(text: str, dtype: DataType) -> str:
    """Lose the precision that a 16-bit float lacks; other types are held as they are."""
    rounding = _ROUNDINGS.get(dtype)
    return text if rounding is None else f"{rounding}({text})"


def convert(text: str, source: DataType, target: DataType, lanes: int) -> str:
    """The value in another element type, rounded to it."""
    held, wanted = compute_dtype(source), compute_dtype(target)
    if held is wanted:
        return text if source is target else round_value(text, target)
    if target is DataType.Bool:
        return f"mf_nonzero({text})"
    if source is DataType.Bool and lanes > 1:
        text = f"(-{text})"  # the lanes of a mask are 0 and -1
        if wanted is DataType.Int32:
            return text
    return round_value(f"mf_convert<{SCALAR_TYPES[target]}>({text})", target)


Emit = Callable[[Sequence[str], DataType], str]
"""The expression of a function of operands that have the given type; lanes are all alike."""


def _infix(operator: str, of_bool: str | None) -> Emit:
    def emit(args: Sequence[str], dtype: DataType) -> str:
        symbol = of_bool if dtype is DataType.Bool else operator
        if symbol is None:
            raise Unsupported(f"C++ kernels have no {operator} of bool; convert the operands first")
        return f"{args[0]} {symbol} {args[1]}"

    return emit


def _floats_only(name: str) -> Emit:
    def emit(args: Sequence[str], dtype: DataType) -> str:
        if not is_floating(dtype):
            raise Unsupported(f"C++ kernels have no {name} of {dtype}; convert the operand first")
        return f"mf_{name}({args[0]})"

    return emit


def _negate(args: Sequence[str], dtype: DataType) -> str:
    if dtype is DataType.Bool:
        raise Unsupported("C++ kernels have no neg of bool; convert the operand first")
    return f"-{args[0]}"


def _divide(args: Sequence[str], dtype: DataType) -> str:
    if is_integral(dtype):
        return f"mf_divide({args[0]}, {args[1]})"
    return _infix("/", None)(args, dtype)


def _comparison(name: str, of_bool: str, *, swap: bool = False) -> Emit:
    """`of_bool` is a pattern of the operands: true is -1 in the lanes of a mask, 1 in a scalar."""

    def emit(args: Sequence[str], dtype: DataType) -> str:
        if dtype is DataType.Bool:
            return of_bool.format(*args)
        a, b = reversed(args) if swap else args
        return f"mf_{name}({a}, {b})"

    return emit


def _extremum(functor: str, of_bool: str) -> Emit:
    def emit(args: Sequence[str], dtype: DataType) -> str:
        name = of_bool if dtype is DataType.Bool else functor
        return f"{name}{{}}({args[0]}, {args[1]})"

    return emit


def _absolute(args: Sequence[str], dtype: DataType) -> str:
    if dtype is DataType.Bool:
        raise Unsupported("C++ kernels have no abs of bool; convert the operand first")
    return f"mf_absolute({args[0]})"


def _power(args: Sequence[str], dtype: DataType) -> str:
    if dtype is DataType.Bool:
        raise Unsupported("C++ kernels have no pow of bool; convert the operands first")
    return f"mf_pow({args[0]}, {args[1]})"


def _relu(args: Sequence[str], dtype: DataType) -> str:
    return args[0] if dtype is DataType.Bool else f"mf_relu({args[0]})"


SCALAR_EMITTERS: dict[str, Emit] = {
    "abs": _absolute,
    "neg": _negate,
    "exp": _floats_only("exp"),
    "log": _floats_only("log"),
    "sqrt": _floats_only("sqrt"),
    "rsqrt": _floats_only("rsqrt"),
    "reciprocal": _floats_only("reciprocal"),
    "sin": _floats_only("sin"),
    "cos": _floats_only("cos"),
    "tanh": _floats_only("tanh"),
    "erf": _floats_only("erf"),
    "sigmoid": _floats_only("sigmoid"),
    "relu": _relu,
    "silu": _floats_only("silu"),
    "gelu": _floats_only("gelu"),
    "add": _infix("+", "|"),
    "sub": _infix("-", None),
    "mul": _infix("*", "&"),
    "div": _divide,
    "pow": _power,
    "maximum": _extremum("mf_maximum", "mf_any"),
    "minimum": _extremum("mf_minimum", "mf_all_true"),
    "eq": _comparison("equal", "mf_equal({0}, {1})"),
    "ne": _comparison("differ", "mf_differ({0}, {1})"),
    "lt": _comparison("less", "mf_not({0}) & {1}"),
    "le": _comparison("less_equal", "mf_not({0}) | {1}"),
    "gt": _comparison("less", "mf_not({1}) & {0}", swap=True),
    "ge": _comparison("less_equal", "mf_not({1}) | {0}", swap=True),
    "where": lambda args, dtype: f"mf_select({', '.join(args)})",
}
"""One entry per row of SCALAR_FUNCTIONS."""

REDUCTION_FUNCTORS: dict[str, str] = {
    "sum": "mf_sum",
    "prod": "mf_product",
    "max": "mf_maximum",
    "min": "mf_minimum",
}
"""One functor per row of REDUCTION_FUNCTIONS. Bool has its own, see `reduction_functor`."""

_BOOL_FUNCTORS = {"sum": "mf_any", "prod": "mf_all_true", "max": "mf_any", "min": "mf_all_true"}


def reduction_functor(function: str, dtype: DataType) -> str:
    """The prelude's functor that combines two values; for bool, `or` or `and`."""
    return (_BOOL_FUNCTORS if dtype is DataType.Bool else REDUCTION_FUNCTORS)[function]
