"""Recombine matching divisions and remainders inside one sum.

Each rule removes a division, or keeps their number and shortens the sum, so the search ends.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshfuse.expr.bounds import excludes_zero, is_positive
from meshfuse.expr.division import exact_multiple
from meshfuse.expr.nodes import Const, FloorDiv, IntExpr, Mod
from meshfuse.expr.polynomial import Terms, accumulate, factors_of, linear, quotient_if_exact

# (removed, added) of equal value. What is removed are several sums, since their total recombines.
_Rewrite = tuple[list[tuple[Terms, int]], IntExpr]
# (what is removed besides the division itself, what is added).
_Completion = tuple[list[IntExpr], IntExpr]


def recombine(terms: Terms, constant: int) -> int:
    """Rewrite `terms` in place until no rule applies; return the new constant."""
    while (rewrite := _find_rewrite(terms)) is not None:
        removed, added = rewrite
        for part, offset in removed:
            accumulate(terms, part, -1)
            constant -= offset
        part, offset = linear(added)
        accumulate(terms, part, 1)
        constant += offset
    return constant


def _find_rewrite(terms: Terms) -> _Rewrite | None:
    divisions = sorted((t for t in terms if t.has_division), key=lambda term: term.order)
    for term in divisions:
        exact = exact_multiple(term, terms[term])
        if exact is not None:
            return [({term: terms[term]}, 0)], exact[1] * exact[0]
    if len(terms) == 1:
        return None
    for term in divisions:
        for atom, multiplier in _divisions_of(term, terms[term]):
            if isinstance(atom, FloorDiv):
                rewrite = _complete_remainder(terms, atom, multiplier)
            else:
                rewrite = _complete_dividend(terms, atom, multiplier, divisions)
            if rewrite is not None:
                parts, added = rewrite
                return [({term: terms[term]}, 0), *map(linear, parts)], added
    return None


def _divisions_of(term: IntExpr, coefficient: int) -> Iterator[tuple[FloorDiv | Mod, IntExpr]]:
    """Each division in coefficient * term that may be undone, with what multiplies it."""
    atoms = factors_of(term)
    for position, atom in enumerate(atoms):
        if isinstance(atom, FloorDiv | Mod) and excludes_zero(atom.denominator):
            multiplier: IntExpr = Const(coefficient)
            for other in atoms[:position] + atoms[position + 1 :]:
                multiplier *= other
            yield atom, multiplier


def _complete_remainder(
    terms: Terms, division: FloorDiv, multiplier: IntExpr
) -> _Completion | None:
    """m*x - m*k*(x // k)  ->  m * (x % k)."""
    scale = quotient_if_exact(-multiplier, division.denominator)
    if scale is None:
        return None
    dividend = scale * division.numerator
    if not _contains(terms, dividend):
        return None
    rest = scale * (division.numerator % division.denominator)
    return _if_shorter(dividend, rest)


def _complete_dividend(
    terms: Terms, remainder: Mod, multiplier: IntExpr, divisions: list[IntExpr]
) -> _Completion | None:
    """m*k*(x // k) + m*(x % k)  ->  m*x;   m*x - m*(x % k)  ->  m*k*(x // k);
    m*k*(x // k % j) + m*(x % k)  ->  m*(x % (j*k))."""
    numerator, denominator = remainder.numerator, remainder.denominator
    dividend = -multiplier * numerator
    if _contains(terms, dividend):
        whole = -multiplier * denominator * (numerator // denominator)
        return _if_shorter(dividend, whole)
    if len(divisions) == 1:
        return None
    quotient = numerator // denominator
    whole = multiplier * denominator * quotient
    if _contains(terms, whole):
        return [whole], multiplier * numerator
    for other in _remainders_of(divisions, quotient):
        part = multiplier * denominator * other
        if is_positive(denominator) and is_positive(other.denominator) and _contains(terms, part):
            joined = multiplier * (numerator % (denominator * other.denominator))
            return [part], joined
    return None


def _remainders_of(divisions: list[IntExpr], dividend: IntExpr) -> Iterator[Mod]:
    for term in divisions:
        for atom in factors_of(term):
            if isinstance(atom, Mod) and atom.numerator is dividend:
                yield atom


def _contains(terms: Terms, part: IntExpr) -> bool:
    """True if part has terms and each stands in `terms` with the same coefficient."""
    wanted = linear(part)[0]
    return bool(wanted) and all(terms.get(term) == c for term, c in wanted.items())


def _if_shorter(dividend: IntExpr, added: IntExpr) -> _Completion | None:
    """The rewrite that takes a division and the dividend, unless it adds as many terms."""
    is_shorter = len(linear(added)[0]) <= len(linear(dividend)[0])
    return ([dividend], added) if is_shorter else None
