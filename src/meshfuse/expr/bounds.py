"""Questions that are answered from ranges and linear differences: True only when proven."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from math import gcd

from meshfuse.expr import intervals
from meshfuse.expr.intervals import Interval
from meshfuse.expr.nodes import Const, FloorDiv, IntExpr, IntLike, Max, Min, Mod, Mul
from meshfuse.expr.polynomial import (
    Terms,
    accumulate,
    factors_of,
    linear,
    multiply,
    product,
    scaled,
)

# Each step replaces one term by a bound that is itself linear, such as a % k by k - 1.
_PROOF_DEPTH = 2


def known_less(a: IntLike, b: IntLike) -> bool:
    """True if a < b for every value of the symbols."""
    terms, constant = _difference(b, a)
    return _is_nonnegative(terms, constant - 1, _PROOF_DEPTH)


def known_less_equal(a: IntLike, b: IntLike) -> bool:
    """True if a <= b for every value of the symbols."""
    return _is_nonnegative(*_difference(b, a), _PROOF_DEPTH)


def known_equal(a: IntLike, b: IntLike) -> bool:
    """True if a == b for every value of the symbols."""
    return _range(*_difference(a, b)) == (0, 0)


def known_multiple(e: IntLike, n: int) -> bool:
    """True if n divides every value of e; 0 divides only 0."""
    divisor = e.divisor if isinstance(e, IntExpr) else e
    return divisor == 0 if n == 0 else divisor % n == 0


def excludes_zero(e: IntExpr) -> bool:
    """True if the range of e does not contain 0."""
    return is_positive(e) or (e.high is not None and e.high < 0)


def is_positive(e: IntExpr) -> bool:
    """True if the range of e starts at 1 or above."""
    return e.low is not None and e.low >= 1


def is_nonnegative(e: IntExpr) -> bool:
    """True if e >= 0 is proven, by its range or by replacing terms with linear bounds."""
    if e.low is not None and e.low >= 0:
        return True
    terms, constant = linear(e)
    return _is_nonnegative(terms, constant, _PROOF_DEPTH)


def _difference(a: IntLike, b: IntLike) -> tuple[Terms, int]:
    left = a if isinstance(a, IntExpr) else Const(a)
    right = b if isinstance(b, IntExpr) else Const(b)
    terms, constant = linear(left)
    subtracted, offset = linear(right)
    accumulate(terms, subtracted, -1)
    if any(term.has_division for term in terms):
        return linear(left - right)  # recombines
    return terms, constant - offset


def _is_nonnegative(terms: Terms, constant: int, depth: int) -> bool:
    low, high = _range(terms, constant)
    if low is not None and low >= 0:
        return True
    if depth == 0 or (high is not None and high < 0):
        return False
    for term, coefficient in terms.items():
        for scale, bound, offset in _bounds_below(term, coefficient):
            relaxed: Terms = {}
            accumulate(relaxed, {t: c for t, c in terms.items() if t is not term}, scale)
            accumulate(relaxed, bound, 1)
            if _is_nonnegative(relaxed, scale * constant + offset, depth - 1):
                return True
    return False


def _range(terms: Terms, constant: int) -> Interval:
    total: Interval = (constant, constant)
    for term, coefficient in terms.items():
        total = intervals.add(total, intervals.scale((term.low, term.high), coefficient))
    return total


# (scale, terms, constant) with scale * coefficient * term >= terms + constant, scale >= 1.
_Bound = tuple[int, Terms, int]


@singledispatch
def _bounds_below(term: IntExpr, coefficient: int) -> Iterator[_Bound]:
    """Linear lower bounds of coefficient * term; none for a term that is its own best bound."""
    del term, coefficient
    return iter(())


@_bounds_below.register
def _(term: Min, coefficient: int) -> Iterator[_Bound]:
    if coefficient < 0:
        for operand in term.operands:
            yield _bound(linear(operand), coefficient)


@_bounds_below.register
def _(term: Max, coefficient: int) -> Iterator[_Bound]:
    if coefficient > 0:
        for operand in term.operands:
            yield _bound(linear(operand), coefficient)


@_bounds_below.register
def _(term: Mod, coefficient: int) -> Iterator[_Bound]:
    """a % k <= k - 1, and a % k <= a for a >= 0."""
    if coefficient > 0 or not is_positive(term.denominator):
        return
    yield _bound(linear(term.denominator - 1), coefficient)
    if term.numerator.low is not None and term.numerator.low >= 0:
        yield _bound(linear(term.numerator), coefficient)


@_bounds_below.register
def _(term: FloorDiv, coefficient: int) -> Iterator[_Bound]:
    """a - (k - 1) <= k * (a // k) <= a."""
    if not isinstance(term.denominator, Const):
        return
    k = term.denominator.value
    scale = k // gcd(coefficient, k)
    bound = term.numerator if coefficient < 0 else term.numerator - (k - 1)
    _, terms, constant = _bound(linear(bound), coefficient * scale // k)
    yield scale, terms, constant


@_bounds_below.register
def _(term: Mul, coefficient: int) -> Iterator[_Bound]:
    """Replace one factor by its bound while the others are not negative."""
    for position, factor in enumerate(term.factors):
        others = term.factors[:position] + term.factors[position + 1 :]
        if any(other.low is None or other.low < 0 for other in others):
            continue
        rest = product(others)
        for scale, terms, constant in _bounds_below(factor, coefficient):
            yield scale, *multiply((terms, constant), rest)
        end = factor.low if coefficient > 0 else factor.high
        if end is not None:
            yield _bound(rest, coefficient * end)
        if isinstance(factor, FloorDiv) and is_positive(factor.denominator):
            yield from _bounds_of_whole_part(factor, others, coefficient)


def _bounds_of_whole_part(
    division: FloorDiv, others: tuple[IntExpr, ...], coefficient: int
) -> Iterator[_Bound]:
    """a - (k - 1) <= k * (a // k) <= a for a symbolic k."""
    numerator, denominator = division.numerator, division.denominator
    if factors_of(denominator) == others:
        bound = numerator if coefficient < 0 else numerator - denominator + 1
        yield _bound(linear(bound), coefficient)


def _bound(form: tuple[Terms, int], scale: int) -> _Bound:
    terms, constant = scaled(form, scale) if scale else ({}, 0)
    return 1, terms, constant
