"""The table of scalar functions behind the `Pointwise` expression."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import final


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
@dataclass(frozen=True, slots=True)
class ScalarFunction:
    """One row: how many operands, which type comes out, and the meaning (torch's unless said)."""

    name: str
    arity: int
    rule: ResultRule
    meaning: str
    takes_bool: bool = True
    """False where torch refuses bool operands, or gives another type than our rule."""


_ROWS = (
    ScalarFunction("neg", 1, ResultRule.default, "-x", takes_bool=False),
    ScalarFunction("exp", 1, ResultRule.floating, "e to the x"),
    ScalarFunction("rsqrt", 1, ResultRule.floating, "1 / sqrt(x)"),
    ScalarFunction("tanh", 1, ResultRule.floating, "hyperbolic tangent"),
    ScalarFunction("erf", 1, ResultRule.floating, "error function"),
    ScalarFunction("relu", 1, ResultRule.keep, "max(x, 0); NaN stays", takes_bool=False),
    ScalarFunction("gelu", 1, ResultRule.floating, "x / 2 * (1 + erf(x / sqrt(2)))"),
    ScalarFunction("add", 2, ResultRule.default, "x + y; for bool, or"),
    ScalarFunction("sub", 2, ResultRule.default, "x - y", takes_bool=False),
    ScalarFunction("mul", 2, ResultRule.default, "x * y; for bool, and"),
    ScalarFunction(
        "div", 2, ResultRule.default, "x / y; integers truncate toward zero", takes_bool=False
    ),
    ScalarFunction("lt", 2, ResultRule.comparison, "x < y"),
    ScalarFunction("where", 3, ResultRule.select, "condition ? x : y"),
)

SCALAR_FUNCTIONS: dict[str, ScalarFunction] = {row.name: row for row in _ROWS}


@final
@dataclass(frozen=True, slots=True)
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
        ReductionFunction("max", "lowest", "the larger; NaN wins"),
    )
}
