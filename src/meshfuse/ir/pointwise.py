"""The table of scalar functions behind the `Pointwise` expression."""

from __future__ import annotations

from enum import Enum
from typing import final

from meshfuse.base.frozen import frozen_dataclass


class ResultRule(Enum):
    """How the element type of a result follows from the promoted type of the operands."""

    default = "default"
    """The promoted type; 16-bit floats widen to Float."""
    floating = "floating"
    """As default, but integers and bool give Float."""
    keep = "keep"
    """The operand's own type."""
    comparison = "comparison"
    """Bool."""
    select = "select"
    """`where`: the promoted type of the two values, not widened."""


@final
@frozen_dataclass
class ScalarFunction:
    """One row: how many operands, which type comes out, and the meaning (torch's unless said)."""

    name: str
    arity: int
    rule: ResultRule
    meaning: str
    takes_bool: bool = True
    """False where torch refuses bool operands, or gives another type than our rule."""
    takes_integers: bool = True
    """False where torch refuses integers and no rule gives them a type."""


_DEFAULT, _FLOATING, _KEEP = ResultRule.default, ResultRule.floating, ResultRule.keep
_COMPARISON, _SELECT = ResultRule.comparison, ResultRule.select

_ROWS = (
    ScalarFunction("abs", 1, _KEEP, "x without its sign", takes_bool=False),
    ScalarFunction("neg", 1, _DEFAULT, "-x", takes_bool=False),
    ScalarFunction("exp", 1, _FLOATING, "e to the x"),
    ScalarFunction("log", 1, _FLOATING, "natural logarithm; -inf at 0, NaN below"),
    ScalarFunction("sqrt", 1, _FLOATING, "square root; -0 at -0, NaN below"),
    ScalarFunction("rsqrt", 1, _FLOATING, "1 / sqrt(x)"),
    ScalarFunction("reciprocal", 1, _FLOATING, "1 / x"),
    ScalarFunction("sin", 1, _FLOATING, "sine of radians"),
    ScalarFunction("cos", 1, _FLOATING, "cosine of radians"),
    ScalarFunction("tanh", 1, _FLOATING, "hyperbolic tangent"),
    ScalarFunction("erf", 1, _FLOATING, "error function"),
    ScalarFunction("sigmoid", 1, _FLOATING, "1 / (1 + exp(-x))"),
    ScalarFunction("relu", 1, _KEEP, "max(x, 0); NaN stays", takes_bool=False),
    ScalarFunction(
        "silu",
        1,
        _KEEP,
        "x / (1 + exp(-x)); NaN at -inf",
        takes_bool=False,
        takes_integers=False,
    ),
    ScalarFunction("gelu", 1, _FLOATING, "x / 2 * (1 + erf(x / sqrt(2)))"),
    ScalarFunction("add", 2, _DEFAULT, "x + y; for bool, or"),
    ScalarFunction("sub", 2, _DEFAULT, "x - y", takes_bool=False),
    ScalarFunction("mul", 2, _DEFAULT, "x * y; for bool, and"),
    ScalarFunction("div", 2, _DEFAULT, "x / y; integers truncate toward zero", takes_bool=False),
    ScalarFunction(
        "pow",
        2,
        _DEFAULT,
        "x to the y, 1 where y is 0; for integers and y < 0 the truncated power, 0 at x = 0",
        takes_bool=False,
    ),
    ScalarFunction("maximum", 2, _DEFAULT, "the larger; NaN wins"),
    ScalarFunction("minimum", 2, _DEFAULT, "the smaller; NaN wins"),
    ScalarFunction("eq", 2, _COMPARISON, "x == y; false for NaN"),
    ScalarFunction("ne", 2, _COMPARISON, "x != y; true for NaN"),
    ScalarFunction("lt", 2, _COMPARISON, "x < y"),
    ScalarFunction("le", 2, _COMPARISON, "x <= y"),
    ScalarFunction("gt", 2, _COMPARISON, "x > y"),
    ScalarFunction("ge", 2, _COMPARISON, "x >= y"),
    ScalarFunction("where", 3, _SELECT, "condition ? x : y"),
)

SCALAR_FUNCTIONS: dict[str, ScalarFunction] = {row.name: row for row in _ROWS}


@final
@frozen_dataclass
class ReductionFunction:
    """A commutative, associative combine with the value of an empty reduction.

    `identity` is a number, or "lowest"/"highest": the smallest/largest value of the element type
    (-inf/+inf for floats).
    """

    name: str
    identity: int | str
    meaning: str


REDUCTION_FUNCTIONS: dict[str, ReductionFunction] = {
    row.name: row
    for row in (
        ReductionFunction("sum", 0, "x + y"),
        ReductionFunction("prod", 1, "x * y"),
        ReductionFunction("max", "lowest", "the larger; NaN wins"),
        ReductionFunction("min", "highest", "the smaller; NaN wins"),
    )
}
