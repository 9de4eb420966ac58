"""Exact quotients of expressions."""

from meshfuse.expr import const, symbol
from meshfuse.expr.polynomial import quotient_if_exact


def test_quotients_are_exact_or_none() -> None:
    size = symbol("i0")
    assert quotient_if_exact(size * 6, const(3)) is size * 2
    assert quotient_if_exact(size * 6, size) is const(6)
    assert quotient_if_exact(size + 1, const(2)) is None
    assert quotient_if_exact(size, const(0)) is None
    assert quotient_if_exact(const(0), const(0)) is None
