"""Constructors that simplify: these and the operators make every expression outside this room."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from meshfuse.expr.bounds import known_less_equal
from meshfuse.expr.division import divide_floor, divide_modulo
from meshfuse.expr.nodes import MEMO_SIZE, Const, IntExpr, IntLike, Max, Min, Symbol
from meshfuse.expr.polynomial import Terms, accumulate, assemble, linear, product, settle
from meshfuse.expr.recombination import recombine


def const(n: int) -> Const:
    """The integer n."""
    return Const(int(n))


def symbol(name: str, low: int | None = 0, high: int | None = None, multiple: int = 1) -> Symbol:
    """A named integer in [low, high] (None: unbounded) that is a multiple of `multiple`.

    The same name with the same facts is the same object; with other facts it is another symbol,
    although both print alike and `evaluate` gives both the same value. A symbol with one possible
    value becomes that constant as soon as it is part of a larger expression.
    """
    return Symbol(name, low, high, multiple)


def as_expr(x: IntLike) -> IntExpr:
    """x as an expression."""
    if type(x) is int:  # asked first: isinstance is slow for a subclass of an abstract class
        return Const(x)
    return x if isinstance(x, IntExpr) else Const(int(x))


def is_const(e: IntLike) -> bool:
    """True for an int or a Const."""
    return type(e) is Const or not isinstance(e, IntExpr)


def const_value(e: IntLike) -> int | None:
    """The value of an int or a Const, else None."""
    if type(e) is Const:
        return e.value
    return None if isinstance(e, IntExpr) else e


@lru_cache(MEMO_SIZE)
def add(*xs: IntLike) -> IntExpr:
    """The sum, 0 of nothing. Equal terms merge; matching divisions and remainders recombine."""
    terms: Terms = {}
    constant = 0
    for x in xs:
        if not isinstance(x, IntExpr):
            constant += int(x)
            continue
        more, offset = linear(x)
        accumulate(terms, more, 1)
        constant += offset
    return _normalize(terms, constant)


@lru_cache(MEMO_SIZE)
def mul(*xs: IntLike) -> IntExpr:
    """The product, 1 of nothing, multiplied out into a sum of products of atoms."""
    return _normalize(*product(map(as_expr, xs)))


def floordiv(a: IntLike, b: IntLike) -> IntExpr:
    """a // b as Python rounds it. Raises ZeroDivisionError if b is the constant 0."""
    return divide_floor(settle(as_expr(a)), settle(as_expr(b)))


def mod(a: IntLike, b: IntLike) -> IntExpr:
    """a % b with the sign of b, as in Python. Raises ZeroDivisionError if b is the constant 0."""
    return divide_modulo(settle(as_expr(a)), settle(as_expr(b)))


def ceildiv(a: IntLike, b: IntLike) -> IntExpr:
    """a / b rounded up. Raises ZeroDivisionError if b is the constant 0."""
    dividend, divisor = as_expr(a), as_expr(b)
    if divisor.low is not None and divisor.low >= 1:
        return floordiv(dividend + divisor - 1, divisor)
    return -floordiv(-dividend, divisor)


def minimum(*xs: IntLike) -> IntExpr:
    """The smallest of one or more. An operand known to be no smaller than another is dropped."""
    operands = _flatten(xs, Min)
    return _extremum(operands, known_less_equal, Min)


def maximum(*xs: IntLike) -> IntExpr:
    """The largest of one or more. An operand known to be no larger than another is dropped."""
    operands = _flatten(xs, Max)
    return _extremum(operands, lambda a, b: known_less_equal(b, a), Max)


def _normalize(terms: Terms, constant: int) -> IntExpr:
    if any(term.has_division for term in terms):
        constant = recombine(terms, constant)
    return assemble(terms, constant)


def _flatten(xs: Iterable[IntLike], kind: type[Min] | type[Max]) -> list[IntExpr]:
    operands: dict[IntExpr, None] = {}
    for x in xs:
        e = settle(as_expr(x))
        operands.update(dict.fromkeys(e.operands if isinstance(e, kind) else (e,)))
    if not operands:
        raise TypeError("minimum and maximum need at least one operand")
    return sorted(operands, key=lambda operand: operand.order)


def _extremum(
    operands: list[IntExpr],
    wins: Callable[[IntExpr, IntExpr], bool],
    kind: type[Min] | type[Max],
) -> IntExpr:
    kept: list[IntExpr] = []
    for candidate in operands:
        if any(wins(other, candidate) for other in kept):
            continue
        kept = [other for other in kept if not wins(candidate, other)]
        kept.append(candidate)
    return kept[0] if len(kept) == 1 else settle(kind(*kept))
