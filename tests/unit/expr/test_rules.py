"""Each simplification rule by example, as text."""

from __future__ import annotations

import pytest

from meshfuse.expr import (
    Const,
    ceildiv,
    coefficient_of,
    const,
    floordiv,
    known_equal,
    known_less,
    known_less_equal,
    known_multiple,
    linear,
    maximum,
    minimum,
    mod,
    parse,
    render,
    symbol,
)

SYMBOLS = {
    s.name: s
    for s in (
        symbol("k", 0, 3),  # a lane below 4
        symbol("m", multiple=16),
        symbol("s", 1),  # sizes
        symbol("t", 1),
        symbol("n", None, -1),  # negative
        symbol("u", None, None),  # anything
        symbol("one", 1, 1),
    )
}
x, y, z = symbol("x"), symbol("y"), symbol("z")
s, t, k, m = SYMBOLS["s"], SYMBOLS["t"], SYMBOLS["k"], SYMBOLS["m"]


@pytest.mark.parametrize(
    ("source", "simplified"),
    [
        # linear normal form
        ("y + x + 3 + x - 1", "2*x + y + 2"),
        ("x - x", "0"),
        ("(x + 1)*(y + 2)", "x*y + 2*x + y + 2"),
        ("x*y - y*x + 3*(x + y)", "3*x + 3*y"),
        ("one*x + one", "x + 1"),
        ("0*u", "0"),
        # division by ranges and divisibility
        ("x // 1", "x"),
        ("x % 1", "0"),
        ("k // 4", "0"),
        ("k % 4", "k"),
        ("k // 8 + (k + 8) // 8", "1"),
        ("(4*x + k) // 4", "x"),
        ("(4*x + k) % 4", "k"),
        ("(4*x + y) // 4", "x + y // 4"),
        ("(5*x + 9) // 4", "x + (x + 1) // 4 + 2"),
        ("(5*x + 9) % 4", "(x + 1) % 4"),
        ("(8*x + 2*k + 1) // 16", "x // 2"),
        ("(8*x + 2*k + 1) % 16", "2*k + 8*(x % 2) + 1"),
        ("(k - 4) // 4", "-1"),
        ("x // -4", "-x // 4"),
        ("m % 8", "0"),
        ("m // 8 * 8", "m"),
        ("m // 16 * 8", "m // 2"),
        ("(m + k) // 4", "m // 4"),
        ("(m + k) % 4", "k"),
        # nesting
        ("x // 4 // 3", "x // 12"),
        ("(x // 4 + 5) // 3", "(x + 8) // 12 + 1"),
        ("x % 12 % 4", "x % 4"),
        ("(x % 12 + y) % 4", "(x + y) % 4"),
        ("x % 12 // 4", "x // 4 % 3"),
        # recombination
        ("x // 4 * 4 + x % 4", "x"),
        ("x // 4 * 12 + x % 4 * 3 + y", "3*x + y"),
        ("x - x % 4", "4*(x // 4)"),
        ("x - 4*(x // 4)", "x % 4"),
        ("x // 4 % 2 * 4 + x % 4", "x % 8"),
        ("x // 8 * 8 + x // 4 % 2 * 4 + x % 4", "x"),
        ("x // s * s + x % s", "x"),
        ("(x // s * s + x % s)*t", "t*x"),
        ("x // t % s * t + x % t", "x % (s*t)"),
        # symbolic divisors
        ("x*s // s", "x"),
        ("x*s % s", "0"),
        ("(x*s + y % s) // s", "x"),
        ("(x*s + y % s) % s", "y % s"),
        ("(x*s*t + y % s * t + z % t) // (s*t)", "x"),
        ("(x*s*t + y % s * t + z % t) // t % s", "y % s"),
        ("x*s // (4*s)", "x // 4"),
        ("(s*x + x + y) // (s + 1)", "x + y // (s + 1)"),
        ("x*s*t // t // s", "x"),
        ("x // s // t", "x // (s*t)"),
        ("x % (s*t) // t", "x // t % s"),
        ("0 // s + 0 % s", "0"),
        ("x // n", "-x // (-n)"),
        ("x*y // y", "x*y // y"),  # y may be 0
        # min and max
        ("min(x, x + 3)", "x"),
        ("max(x, x + 3, 0)", "x + 3"),
        ("min(k, 3)", "k"),
        ("max(k, 3)", "3"),
        ("min(x, y, min(y, z), 7)", "min(x, y, z, 7)"),
        ("min(x, max(x, u))", "x"),
        ("max(x // 4, x)", "x"),
    ],
)
def test_rule(source: str, simplified: str) -> None:
    e = parse(source, SYMBOLS)
    assert render(e) == simplified
    assert parse(simplified, SYMBOLS) is e


def test_ceildiv() -> None:
    assert ceildiv(x * 4, 4) is x
    assert ceildiv(x * s, s) is x
    assert ceildiv(7, 2) is const(4)
    assert ceildiv(-7, 2) is const(-3)
    assert repr(ceildiv(x, 4)) == "(x + 3) // 4"
    assert repr(ceildiv(x, s)) == "(s + x - 1) // s"
    assert repr(ceildiv(ceildiv(x, 4), 2)) == "(x + 7) // 8"


@pytest.mark.parametrize("divide", [floordiv, mod, ceildiv])
def test_division_by_the_constant_zero_is_an_error(divide: object) -> None:
    assert callable(divide)
    for zero in (0, x - x, symbol("zero", 0, 0)):
        with pytest.raises(ZeroDivisionError):
            divide(x, zero)


def test_facts() -> None:
    assert (const(0).low, const(0).high, const(0).divisor) == (0, 0, 0)
    assert ((2 * k - 5).low, (2 * k - 5).high, (2 * k - 5).divisor) == (-5, 1, 1)
    assert ((4 * x + 8 * y + 12).low, (4 * x + 8 * y + 12).divisor) == (12, 4)
    assert ((m // 4).divisor, (m % 24).divisor, (m % 24).high) == (4, 8, 16)
    assert (minimum(x, 7).low, minimum(x, 7).high) == (0, 7)
    assert (maximum(x, 7).low, maximum(x, 7).high) == (7, None)
    u = symbol("u", None, None)
    assert ((u * u).low, (u % 4).low, (u % 4).high) == (0, 0, 3)
    aligned = symbol("a", 1, 15, multiple=8)
    assert (aligned.low, aligned.high) == (8, 8)


def test_comparisons_are_true_only_when_proven() -> None:
    assert known_less(x, x + 1)
    assert not known_less(x, y)
    assert known_less(k, 4)
    assert not known_less(k, 3)
    assert known_less(x % s, s)
    assert known_less((x % s) * t + y % t, s * t)
    assert known_less_equal(x // 4 * 4, x)
    assert known_less_equal(minimum(x, y), y)
    assert not known_less_equal(y, minimum(x, y))
    assert known_less_equal(minimum(x, y) + z, maximum(x, y) + z)
    assert known_equal(x // s * s + x % s, x)
    assert not known_equal(x, y)
    assert known_multiple(m * 3 + 8, 8)
    assert not known_multiple(m + 4, 8)
    assert known_multiple(0, 0)
    assert not known_multiple(m, 0)


def test_linear_view_and_coefficients() -> None:
    assert linear(3 * x * s + 2 * y - 7) == ({x * s: 3, y: 2}, -7)
    assert linear(const(5)) == ({}, 5)
    assert coefficient_of(3 * x + y, x) == 3
    assert coefficient_of(3 * x * s + x * t, x) is 3 * s + t
    assert coefficient_of(y + 1, x) == 0
    assert coefficient_of(x * x, x) is None
    assert coefficient_of(x // 4, x) is None
    assert coefficient_of(x * (x % s), x) is None
    assert coefficient_of((x // 4) * 4 + x % 4, x) == 1
    assert isinstance(x - x, Const)
