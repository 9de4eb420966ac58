"""Evaluate expressions, substitute in them, and ask which symbols they use and how."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, singledispatch
from math import prod
from typing import final

from meshfuse.expr.nodes import (
    MEMO_SIZE,
    Add,
    Const,
    FloorDiv,
    IntExpr,
    IntLike,
    Max,
    Min,
    Mod,
    Mul,
    Symbol,
)
from meshfuse.expr.polynomial import factors_of, linear
from meshfuse.expr.simplify import add, as_expr, floordiv, maximum, minimum, mod, mul


@final
class MissingSymbolError(LookupError):
    """A symbol of the expression has no value."""


def evaluate(e: IntLike, env: Mapping[str, int]) -> int:
    """The value of e with symbols by name.

    Simplification relied on the symbols' ranges and multiples, so values outside them give wrong
    results. Raises MissingSymbolError for a symbol that env lacks, ZeroDivisionError.
    """
    return _evaluate(e, env) if isinstance(e, IntExpr) else e


@singledispatch
def _evaluate(e: IntExpr, env: Mapping[str, int]) -> int:
    del env
    raise TypeError(f"cannot evaluate a {type(e).__name__}")


@_evaluate.register
def _(e: Const, env: Mapping[str, int]) -> int:
    del env
    return e.value


@_evaluate.register
def _(e: Symbol, env: Mapping[str, int]) -> int:
    try:
        return env[e.name]
    except KeyError:
        known = ", ".join(sorted(env)) or "none"
        raise MissingSymbolError(f"no value for symbol {e.name}; given: {known}") from None


@_evaluate.register
def _(e: Add, env: Mapping[str, int]) -> int:
    return e.constant + sum(c * _evaluate(term, env) for term, c in e.terms)


@_evaluate.register
def _(e: Mul, env: Mapping[str, int]) -> int:
    return e.coefficient * prod(_evaluate(factor, env) for factor in e.factors)


@_evaluate.register
def _(e: FloorDiv, env: Mapping[str, int]) -> int:
    return _evaluate(e.numerator, env) // _evaluate(e.denominator, env)


@_evaluate.register
def _(e: Mod, env: Mapping[str, int]) -> int:
    return _evaluate(e.numerator, env) % _evaluate(e.denominator, env)


@_evaluate.register
def _(e: Min, env: Mapping[str, int]) -> int:
    return min(_evaluate(operand, env) for operand in e.operands)


@_evaluate.register
def _(e: Max, env: Mapping[str, int]) -> int:
    return max(_evaluate(operand, env) for operand in e.operands)


def substitute(e: IntLike, mapping: Mapping[str | IntExpr, IntLike]) -> IntExpr:
    """Replace symbols (by name or as nodes) and whole subexpressions, all at once.

    The outermost match wins, and what replaces it is not searched again. Simplifies anew.
    """
    done: dict[IntExpr, IntExpr] = {}

    def visit(node: IntExpr) -> IntExpr:
        if node not in done:
            done[node] = replace(node)
        return done[node]

    def replace(node: IntExpr) -> IntExpr:
        if node in mapping:
            return as_expr(mapping[node])
        if type(node) is Symbol and node.name in mapping:
            return as_expr(mapping[node.name])
        if not node.operands:
            return node
        return _rebuild(node, tuple(visit(operand) for operand in node.operands))

    return visit(as_expr(e))


@singledispatch
def _rebuild(e: IntExpr, operands: tuple[IntExpr, ...]) -> IntExpr:
    """A node like e, simplified, of operands in the order of e.operands."""
    del operands
    raise TypeError(f"a {type(e).__name__} has no operands")


@_rebuild.register
def _(e: Add, operands: tuple[IntExpr, ...]) -> IntExpr:
    scaled = (mul(c, operand) for (_, c), operand in zip(e.terms, operands, strict=True))
    return add(e.constant, *scaled)


@_rebuild.register
def _(e: Mul, operands: tuple[IntExpr, ...]) -> IntExpr:
    return mul(e.coefficient, *operands)


@_rebuild.register
def _(e: FloorDiv, operands: tuple[IntExpr, ...]) -> IntExpr:
    del e
    return floordiv(*operands)


@_rebuild.register
def _(e: Mod, operands: tuple[IntExpr, ...]) -> IntExpr:
    del e
    return mod(*operands)


@_rebuild.register
def _(e: Min, operands: tuple[IntExpr, ...]) -> IntExpr:
    del e
    return minimum(*operands)


@_rebuild.register
def _(e: Max, operands: tuple[IntExpr, ...]) -> IntExpr:
    del e
    return maximum(*operands)


def free_symbols(e: IntLike) -> tuple[Symbol, ...]:
    """The symbols of e, each once, sorted by name."""
    return () if type(e) is int else _find_symbols(as_expr(e))


@lru_cache(MEMO_SIZE)
def _find_symbols(e: IntExpr) -> tuple[Symbol, ...]:
    found: dict[Symbol, None] = {}
    visited: set[IntExpr] = set()
    pending = [e]
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        if type(node) is Symbol:
            found[node] = None
        pending.extend(node.operands)
    return tuple(sorted(found, key=lambda node: node.order))


def coefficient_of(e: IntLike, of: Symbol) -> int | IntExpr | None:
    """What e grows by when the symbol grows by 1; None if e is not affine in the symbol.

    An int where it is one, else an expression without the symbol: the symbol's stride in e.
    """
    coefficient: IntExpr = Const(0)
    for term, scale in linear(as_expr(e))[0].items():
        if of not in free_symbols(term):
            continue
        factors = factors_of(term)
        others = tuple(factor for factor in factors if factor is not of)
        if len(others) != len(factors) - 1 or any(of in free_symbols(x) for x in others):
            return None
        coefficient += mul(scale, *others)
    return coefficient.value if isinstance(coefficient, Const) else coefficient
