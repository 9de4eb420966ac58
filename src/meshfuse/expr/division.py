"""Rules for // and %. Both start from the same reduction of (a, b), so their results recombine.

A reduction rewrites a = quotient * b + scale * numerator + offset with b = scale * denominator and
0 <= offset < scale, hence

    a // b  ->  quotient + numerator // denominator
    a %  b  ->  scale * (numerator % denominator) + offset

Rules for a symbolic b apply only where its range excludes 0. Each rule makes the numerator or the
denominator smaller; a node is built only when none applies, so building it again changes nothing.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import intervals
from meshfuse.expr.bounds import excludes_zero, is_nonnegative, is_positive, known_less
from meshfuse.expr.nodes import MEMO_SIZE, Add, Const, FloorDiv, IntExpr, Mod, Mul
from meshfuse.expr.polynomial import (
    Terms,
    accumulate,
    assemble,
    divide,
    divide_exactly,
    factors_of,
    linear,
    lone_division,
    quotient_if_exact,
    settle,
    truncating_quotient,
)

_ZERO = Const(0)
_ONE = Const(1)


@final
@frozen_dataclass
class _Reduction:
    quotient: IntExpr
    numerator: IntExpr
    denominator: IntExpr
    scale: IntExpr
    offset: IntExpr


@lru_cache(MEMO_SIZE)
def divide_floor(a: IntExpr, b: IntExpr) -> IntExpr:
    """a // b of settled operands."""
    if isinstance(b, Const):
        if b.value == 0:
            raise ZeroDivisionError(f"{a!r} // 0")
        if b.value == 1:
            return a
    elif not excludes_zero(b):
        return settle(FloorDiv(a, b))
    if not is_positive(b):
        return divide_floor(-a, -b)
    reduction = _reduce(a, b)
    if reduction is not None:
        return reduction.quotient + reduction.numerator // reduction.denominator
    merged = _divide_division(a, b)
    return settle(FloorDiv(a, b)) if merged is None else merged


@lru_cache(MEMO_SIZE)
def divide_modulo(a: IntExpr, b: IntExpr) -> IntExpr:
    """a % b of settled operands."""
    if isinstance(b, Const):
        if b.value == 0:
            raise ZeroDivisionError(f"{a!r} % 0")
        if a.divisor % b.value == 0:
            return _ZERO
    elif not excludes_zero(b):
        return settle(Mod(a, b))
    if not is_positive(b):
        return -divide_modulo(-a, -b)
    reduction = _reduce(a, b)
    if reduction is not None:
        rest = reduction.numerator % reduction.denominator
        return reduction.scale * rest + reduction.offset
    unwrapped = _unwrap_modulo(a, b)
    return settle(Mod(a, b)) if unwrapped is None else unwrapped % b


def _reduce(a: IntExpr, b: IntExpr) -> _Reduction | None:
    """The first reduction that applies to a and a positive b."""
    by_range = _reduce_by_range(a, b)
    if by_range is not None:
        return by_range
    if isinstance(b, Const):
        return _take_multiples_of(b.value, a) or _take_common_factor(a, b.value)
    return _take_symbolic_multiples(a, b) or _take_symbolic_factor(a, b)


def _reduce_by_range(a: IntExpr, b: IntExpr) -> _Reduction | None:
    """a // b  ->  c   if c * b <= a < (c + 1) * b."""
    low, high = intervals.floordiv((a.low, a.high), (b.low, b.high))
    if low is not None and low == high:
        return _Reduction(Const(low), _ZERO, _ONE, _ONE, a - low * b)
    if isinstance(b, Const):
        return None
    if _is_rest(a, b):
        return _Reduction(_ZERO, _ZERO, _ONE, _ONE, a)
    if a.high is not None and a.high < 0 and is_nonnegative(a + b):
        return _Reduction(Const(-1), _ZERO, _ONE, _ONE, a + b)
    return None


def _take_multiples_of(k: int, a: IntExpr) -> _Reduction | None:
    """(k*x + y) // k  ->  x + y // k   and   (5*x + 9) // 4  ->  x + 2 + (x + 1) // 4."""
    terms, constant = linear(a)
    if constant == 0 and terms == {a: 1} and not isinstance(a, Mul):
        return None
    whole, rest_constant = divmod(constant, k)
    quotient: Terms = {}
    rest: Terms = {}
    for term, coefficient in terms.items():
        if coefficient * term.divisor % k == 0:
            whole += _accumulate_exact(quotient, term, coefficient, k)
            continue
        multiple = truncating_quotient(coefficient, k)
        accumulate(quotient, {term: 1}, multiple)
        rest[term] = coefficient - multiple * k
    if len(rest) == len(terms) and not quotient and not whole:
        return None
    return _Reduction(
        assemble(quotient, whole), assemble(rest, rest_constant), Const(k), _ONE, _ZERO
    )


def _accumulate_exact(into: Terms, term: IntExpr, coefficient: int, by: int) -> int:
    """Add coefficient * term / by, a whole number, to `into`; return the constant part."""
    share = gcd(coefficient, by)
    if share == by:
        accumulate(into, {term: 1}, coefficient // share)
        return 0
    terms, constant = linear(divide_exactly(term, by // share))
    accumulate(into, terms, coefficient // share)
    return coefficient // share * constant


def _take_common_factor(a: IntExpr, k: int) -> _Reduction | None:
    """(g*x + y) // (g*m)  ->  x // m   if 0 <= y < g."""
    split = _split_by_share(a, k)
    if split is None:
        return None
    share, numerator, offset = split
    return _Reduction(_ZERO, numerator, Const(k // share), Const(share), offset)


def _split_by_share(a: IntExpr, content: int) -> tuple[int, IntExpr, IntExpr] | None:
    """(g, x, y) with a = g*x + y, 0 <= y < g, and g > 1 shared by `content` and a coefficient.

    A factor that only a term's known divisor shares is left alone: taking it would turn
    m // (2*s) into m // 2 // s, which merges back.
    """
    shares = {gcd(coefficient, content) for coefficient in linear(a)[0].values()}
    for share in sorted(shares, reverse=True):
        parts = _split_by_integer(a, share) if share > 1 else None
        if parts is not None:
            return share, *parts
    return None


def _split_by_integer(a: IntExpr, share: int) -> tuple[IntExpr, IntExpr] | None:
    """(x, y) with a = share*x + y and 0 <= y < share, if such a split of the terms is known."""
    terms, constant = linear(a)
    whole: Terms = {}
    shift = 0
    rest: Terms = {}
    for term, coefficient in terms.items():
        if coefficient * term.divisor % share:
            rest[term] = coefficient
        else:
            shift += _accumulate_exact(whole, term, coefficient, share)
    offset = assemble(rest, constant)
    if offset.low is None or offset.high is None or offset.low // share != offset.high // share:
        return None
    floor = offset.low // share
    return assemble(whole, shift + floor), assemble(rest, constant - floor * share)


def _take_symbolic_multiples(a: IntExpr, b: IntExpr) -> _Reduction | None:
    """(x*s + y) // s  ->  x + y // s."""
    quotient, rest = divide(a, b)
    # Like the constant of _take_multiples_of, the rest is not negative if that can be had.
    if not is_nonnegative(rest) and is_nonnegative(rest + b):
        quotient, rest = quotient - 1, rest + b
    if quotient is _ZERO:
        return None
    # Dividing by a sum can make the rest longer than what it divides.
    if isinstance(b, Add) and len(linear(rest)[0]) >= len(linear(a)[0]):
        return None
    return _Reduction(quotient, rest, b, _ONE, _ZERO)


def _take_symbolic_factor(a: IntExpr, b: IntExpr) -> _Reduction | None:
    """(s*x + y) // (s*m)  ->  x // m   if 0 <= y < s."""
    form = linear(b)
    split = _split_by_share(a, gcd(form[1], *form[0].values()))
    if split is not None:
        share, numerator, offset = split
        denominator = assemble({t: c // share for t, c in form[0].items()}, form[1] // share)
        return _Reduction(_ZERO, numerator, denominator, Const(share), offset)
    if isinstance(b, Add):
        return None
    for factor in dict.fromkeys(factors_of(b)):
        parts = _split_by_atom(a, factor) if factor is not b else None
        denominator = quotient_if_exact(b, factor)
        if parts is not None and denominator is not None:
            return _Reduction(_ZERO, parts[0], denominator, factor, parts[1])
    return None


def _split_by_atom(a: IntExpr, atom: IntExpr) -> tuple[IntExpr, IntExpr] | None:
    """(x, y) with a = atom*x + y, x not 0, and 0 <= y < atom, if known."""
    whole, offset = divide(a, atom)
    if whole is _ZERO or not is_positive(atom):
        return None
    return (whole, offset) if _is_rest(offset, atom) else None


def _is_rest(offset: IntExpr, divisor: IntExpr) -> bool:
    return is_nonnegative(offset) and known_less(offset, divisor)


def _divide_division(a: IntExpr, b: IntExpr) -> IntExpr | None:
    """(x // k + c) // m  ->  (x + c*k) // (k*m)   and   x % (k*m) // k  ->  x // k % m."""
    nested = lone_division(a)
    if nested is not None:
        division, constant = nested
        if not excludes_zero(division.denominator):
            return None
        numerator = division.numerator + constant * division.denominator
        return numerator // (division.denominator * b)
    if isinstance(a, Mod):
        count = quotient_if_exact(a.denominator, b)
        if count is not None and is_positive(count):
            return a.numerator // b % count
    return None


def _unwrap_modulo(a: IntExpr, b: IntExpr) -> IntExpr | None:
    """(c * (x % n) + y) % k  ->  (c*x + y) % k   if k divides c*n."""
    terms, constant = linear(a)
    replaced: Terms = {}
    for term, coefficient in terms.items():
        if isinstance(term, Mod) and excludes_zero(term.denominator):
            if quotient_if_exact(coefficient * term.denominator, b) is not None:
                inner_terms, inner_constant = linear(term.numerator)
                accumulate(replaced, inner_terms, coefficient)
                accumulate(replaced, {term: 1}, -coefficient)
                constant += coefficient * inner_constant
    if not replaced:
        return None
    accumulate(terms, replaced, 1)
    return assemble(terms, constant)
