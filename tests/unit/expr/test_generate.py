"""Generated functions give what walking the trees gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfuse.expr import IntExpr, MissingSymbolError, const, evaluate, maximum, minimum, symbol
from meshfuse.expr.generate import compile_expressions

X, Y, Z = symbol("i0"), symbol("c1.saved", low=1), symbol("v0", low=1)
EXPRESSIONS: tuple[IntExpr, ...] = (
    const(7),
    X,
    3 * X - Y,
    (X + 5) // 4 + X % Y,
    minimum(X, 8) * maximum(Y, Z),
    (X + Y - 1) // Y * Y,
)


@given(st.integers(0, 100), st.integers(1, 9), st.integers(1, 9))
def test_values_are_those_of_the_trees(i: int, j: int, other: int) -> None:
    function = compile_expressions(EXPRESSIONS, ("i0", "c1.saved", "v0"))
    environment = {"i0": i, "c1.saved": j, "v0": other}
    assert function(i, j, other) == tuple(evaluate(e, environment) for e in EXPRESSIONS)


def test_nothing_to_evaluate() -> None:
    assert compile_expressions((), ())() == ()
    assert compile_expressions((const(3),), ("i0",))(9) == (3,)


def test_a_symbol_that_is_not_given() -> None:
    with pytest.raises(MissingSymbolError, match=r"no value for symbol c1\.saved; given: i0"):
        compile_expressions((X + Y,), ("i0",))
