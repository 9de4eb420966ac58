"""The linear normal form: a map from term to coefficient plus a constant.

A term is an atom or a product of atoms, so the form is a polynomial whose variables are atoms.
These functions never recombine divisions; simplify.py does, before it assembles a node.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from meshfuse.expr.nodes import Add, Const, FloorDiv, IntExpr, Mul

Terms = dict[IntExpr, int]
_Monomial = tuple[IntExpr, ...]
_MAXIMUM_DIVISION_STEPS = 64


def linear(e: IntExpr) -> tuple[Terms, int]:
    """The affine view of e: a fresh map from term to coefficient, and the constant."""
    if isinstance(e, Add):
        return dict(e.terms), e.constant
    if e.low is not None and e.low == e.high:
        return {}, e.low
    if isinstance(e, Mul) and e.coefficient != 1:
        return {product_of(e.factors): e.coefficient}, 0
    return {e: 1}, 0


def factors_of(term: IntExpr) -> tuple[IntExpr, ...]:
    """The atoms of a term."""
    return term.factors if isinstance(term, Mul) else (term,)


def product_of(factors: tuple[IntExpr, ...]) -> IntExpr:
    """The term of one or more sorted atoms."""
    return factors[0] if len(factors) == 1 else Mul(1, factors)


def assemble(terms: Terms, constant: int) -> IntExpr:
    """The node of a linear form. Terms of coefficient 0 vanish; a single value becomes a Const."""
    ordered = sorted((item for item in terms.items() if item[1]), key=lambda item: item[0].order)
    if not ordered:
        return Const(constant)
    if constant == 0 and len(ordered) == 1:
        term, coefficient = ordered[0]
        node = term if coefficient == 1 else Mul(coefficient, factors_of(term))
    else:
        node = Add(constant, tuple(ordered))
    return settle(node)


def settle(node: IntExpr) -> IntExpr:
    """A node that has only one possible value is that constant."""
    if node.low is not None and node.low == node.high:
        return Const(node.low)
    return node


def accumulate(into: Terms, terms: Terms, scale: int) -> None:
    """Add scale * terms to `into`, dropping what cancels."""
    for term, coefficient in terms.items():
        total = into.get(term, 0) + scale * coefficient
        if total:
            into[term] = total
        else:
            into.pop(term, None)


def scaled(form: tuple[Terms, int], scale: int) -> tuple[Terms, int]:
    """scale * form for a scale that is not 0."""
    return {term: scale * coefficient for term, coefficient in form[0].items()}, scale * form[1]


def multiply(left: tuple[Terms, int], right: tuple[Terms, int]) -> tuple[Terms, int]:
    """The product of two linear forms, multiplied out."""
    terms: Terms = {}
    accumulate(terms, left[0], right[1])
    accumulate(terms, right[0], left[1])
    for a, x in left[0].items():
        for b, y in right[0].items():
            atoms = tuple(sorted(factors_of(a) + factors_of(b), key=lambda atom: atom.order))
            accumulate(terms, {product_of(atoms): 1}, x * y)
    return terms, left[1] * right[1]


def product(factors: Iterable[IntExpr]) -> tuple[Terms, int]:
    """The linear form of a product, 1 of nothing."""
    coefficient = 1
    form: tuple[Terms, int] | None = None
    for factor in factors:
        if isinstance(factor, Const):
            coefficient *= factor.value
        elif form is None:
            form = linear(factor)
        else:
            form = multiply(form, linear(factor))
    if form is None or coefficient == 0:
        return {}, coefficient
    return form if coefficient == 1 else scaled(form, coefficient)


def divide_exactly(term: IntExpr, by: int) -> IntExpr:
    """term // by for a `by` that divides term.divisor, taken out of the atoms that carry it."""
    atoms: list[IntExpr] = []
    for atom in factors_of(term):
        share = gcd(atom.divisor, by)
        by //= share
        atoms.append(atom if share == 1 else atom // Const(share))
    return assemble(*product(atoms))


def divide(dividend: IntExpr, divisor: IntExpr) -> tuple[IntExpr, IntExpr]:
    """Polynomial division: (quotient, rest) with dividend = quotient * divisor + rest.

    Neither part is unique; the quotient takes each term that the divisor's leading term divides.
    """
    rest = _monomials(dividend)
    steps = _monomials(divisor)
    leading = min(steps, key=_monomial_order)
    quotient: dict[_Monomial, int] = {}
    for _ in range(_MAXIMUM_DIVISION_STEPS):
        found = _find_multiple(rest, leading, steps[leading])
        if found is None:
            break
        monomial, coefficient = found
        quotient[monomial] = quotient.get(monomial, 0) + coefficient
        for atoms, scale in steps.items():
            merged = tuple(sorted(atoms + monomial, key=lambda atom: atom.order))
            rest[merged] = rest.get(merged, 0) - coefficient * scale
            if not rest[merged]:
                del rest[merged]
    return _from_monomials(quotient), _from_monomials(rest)


def quotient_if_exact(dividend: IntExpr, divisor: IntExpr) -> IntExpr | None:
    """dividend / divisor if polynomial division leaves no rest; None by 0, of an empty axis."""
    if isinstance(divisor, Const) and divisor.value == 0:
        return None
    quotient, rest = divide(dividend, divisor)
    return quotient if isinstance(rest, Const) and rest.value == 0 else None


def _monomials(e: IntExpr) -> dict[_Monomial, int]:
    terms, constant = linear(e)
    monomials: dict[_Monomial, int] = {factors_of(term): c for term, c in terms.items()}
    if constant:
        monomials[()] = constant
    return monomials


def _from_monomials(monomials: dict[_Monomial, int]) -> IntExpr:
    terms = {product_of(atoms): c for atoms, c in monomials.items() if atoms}
    return assemble(terms, monomials.get((), 0))


def _monomial_order(monomial: _Monomial) -> tuple[int, tuple[tuple[int, str], ...]]:
    """Higher degree first: an order that multiplication keeps, so that division ends."""
    return -len(monomial), tuple(atom.order for atom in monomial)


def _find_multiple(
    monomials: dict[_Monomial, int], leading: _Monomial, coefficient: int
) -> tuple[_Monomial, int] | None:
    """The first monomial that coefficient * leading divides, as (cofactor, whole quotient)."""
    for atoms in sorted(monomials, key=_monomial_order):
        whole = truncating_quotient(monomials[atoms], coefficient)
        cofactor = _remove(atoms, leading)
        if whole and cofactor is not None:
            return cofactor, whole
    return None


def _remove(atoms: _Monomial, taken: _Monomial) -> _Monomial | None:
    """The multiset difference, None if `taken` is not contained."""
    remaining = list(atoms)
    for atom in taken:
        if atom not in remaining:
            return None
        remaining.remove(atom)
    return tuple(remaining)


def truncating_quotient(dividend: int, divisor: int) -> int:
    """The quotient rounded towards zero, so that the rest keeps the sign of the dividend."""
    quotient = abs(dividend) // abs(divisor)
    return quotient if (dividend < 0) == (divisor < 0) else -quotient


def lone_division(e: IntExpr) -> tuple[FloorDiv, int] | None:
    """(n // k, c) if e is n // k + c."""
    terms, constant = linear(e)
    if len(terms) != 1:
        return None
    ((term, coefficient),) = terms.items()
    return (term, constant) if isinstance(term, FloorDiv) and coefficient == 1 else None
