"""Recombine matching divisions and remainders inside one sum.

Each rule removes a division, or keeps their number and shortens the sum or a divisor, so the search
ends. It works on linear forms: the node of what a rule looks for would itself recombine.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from meshfuse.expr.bounds import excludes_zero, is_positive
from meshfuse.expr.nodes import Const, FloorDiv, IntExpr, Mod
from meshfuse.expr.polynomial import (
    Terms,
    accumulate,
    assemble,
    factors_of,
    linear,
    multiply,
    product,
    quotient_if_exact,
    scaled,
)

_Form = tuple[Terms, int]
# (what is removed besides the division itself, what is added in place of both).
_Completion = tuple[_Form, IntExpr]


def recombine(terms: Terms, constant: int) -> int:
    """Rewrite `terms` in place until no rule applies; return the new constant."""
    while (rewrite := _find_rewrite(terms)) is not None:
        removed, added = rewrite
        accumulate(terms, removed[0], -1)
        more, offset = linear(added)
        accumulate(terms, more, 1)
        constant += offset - removed[1]
    return constant


def _find_rewrite(terms: Terms) -> _Completion | None:
    divisions = sorted((t for t in terms if t.has_division), key=lambda term: term.order)
    for term in divisions:
        simpler = _divide_exact_multiple(term, terms[term])
        if simpler is not None:
            return ({term: terms[term]}, 0), simpler
    if len(terms) == 1:
        return None
    for term in divisions:
        for atom, others in _divisions_in(term):
            multiplier = scaled(product(others), terms[term])
            if isinstance(atom, FloorDiv):
                completion = _complete_remainder(terms, atom, multiplier)
            else:
                completion = _complete_dividend(terms, atom, multiplier)
                if completion is None and len(divisions) > 1:
                    completion = _join_remainder(terms, atom, multiplier, divisions)
            if completion is not None:
                (removed, offset), added = completion
                accumulate(removed, {term: terms[term]}, 1)
                return (removed, offset), added
    return None


def _divisions_in(term: IntExpr) -> Iterator[tuple[FloorDiv | Mod, tuple[IntExpr, ...]]]:
    """Each division in the term that may be undone, with the other factors."""
    atoms = factors_of(term)
    for position, atom in enumerate(atoms):
        if isinstance(atom, FloorDiv | Mod) and excludes_zero(atom.denominator):
            yield atom, atoms[:position] + atoms[position + 1 :]


def _divide_exact_multiple(term: IntExpr, coefficient: int) -> IntExpr | None:
    """c * (x // k)  ->  (c/g) * (x // (k/g))   if k divides x and g = gcd(c, k) > 1."""
    for atom, others in _divisions_in(term):
        if not isinstance(atom, FloorDiv) or not isinstance(atom.denominator, Const):
            continue
        k = atom.denominator.value
        share = gcd(coefficient, k)
        if share > 1 and atom.numerator.divisor % k == 0:
            simpler = atom.numerator // (k // share)
            return assemble(*scaled(product((simpler, *others)), coefficient // share))
    return None


def _complete_remainder(terms: Terms, division: FloorDiv, multiplier: _Form) -> _Completion | None:
    """m*x - m*k*(x // k)  ->  m * (x % k)."""
    denominator = division.denominator
    if not multiplier[0] and isinstance(denominator, Const) and multiplier[1] % denominator.value:
        return None
    scale = quotient_if_exact(assemble(*scaled(multiplier, -1)), denominator)
    if scale is None:
        return None
    dividend = multiply(linear(scale), linear(division.numerator))
    if not _contains(terms, dividend):
        return None
    return _if_shorter(dividend, scale * (division.numerator % denominator))


def _complete_dividend(terms: Terms, remainder: Mod, multiplier: _Form) -> _Completion | None:
    """m*x - m*(x % k)  ->  m*k*(x // k)."""
    numerator, denominator = remainder.numerator, remainder.denominator
    dividend = multiply(scaled(multiplier, -1), linear(numerator))
    if not _contains(terms, dividend):
        return None
    scale = -assemble(*multiplier)
    return _if_shorter(dividend, scale * denominator * (numerator // denominator))


def _join_remainder(
    terms: Terms, remainder: Mod, multiplier: _Form, divisions: list[IntExpr]
) -> _Completion | None:
    """m*k*(x // k) + m*(x % k)  ->  m*x   and   m*k*(x // k % j) + m*(x % k)  ->  m*(x % (j*k))."""
    numerator, denominator = remainder.numerator, remainder.denominator
    scale = multiply(multiplier, linear(denominator))
    if not scale[0] and all(terms[term] != scale[1] for term in divisions):
        return None
    quotient = numerator // denominator
    whole = multiply(scale, linear(quotient))
    if _contains(terms, whole):
        return whole, assemble(*multiplier) * numerator
    for other in _remainders_of(divisions, quotient):
        part = multiply(scale, linear(other))
        if is_positive(denominator) and is_positive(other.denominator) and _contains(terms, part):
            joined = numerator % (denominator * other.denominator)
            return part, assemble(*multiplier) * joined
    return None


def _remainders_of(divisions: list[IntExpr], dividend: IntExpr) -> Iterator[Mod]:
    for term in divisions:
        for atom in factors_of(term):
            if isinstance(atom, Mod) and atom.numerator is dividend:
                yield atom


def _contains(terms: Terms, form: _Form) -> bool:
    """True if the form has terms and each stands in `terms` with the same coefficient."""
    return bool(form[0]) and all(terms.get(term) == c for term, c in form[0].items())


def _if_shorter(dividend: _Form, added: IntExpr) -> _Completion | None:
    """The rewrite that takes a division and the dividend, unless it adds as many terms."""
    return (dividend, added) if len(linear(added)[0]) <= len(dividend[0]) else None
