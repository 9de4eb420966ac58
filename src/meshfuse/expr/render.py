"""Print expressions as text that parses back, which is also Python, or as C."""

from __future__ import annotations

import re
from functools import singledispatch
from typing import Literal

from meshfuse.expr.nodes import Add, Const, FloorDiv, IntExpr, IntLike, Max, Min, Mod, Mul, Symbol

Style = Literal["text", "c"]

# How tightly the outermost operator of a printed part binds.
_SUM, _PRODUCT, _ATOM = 1, 2, 3
_Printed = tuple[str, int]

_C_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_INT32_LIMIT = 2**31
_INT64_LIMIT = 2**63


def render(e: IntLike, style: Style = "text") -> str:
    """One line of text for e, with few parentheses and in a fixed order.

    "text": infix + - * // % and min(...), max(...); parser.parse reads it back.
    "c": an expression for symbols that are int64_t variables. a // b and a % b are printed as
    a / b and a % b where the ranges prove a >= 0 and b > 0, and otherwise call
    mf_floordiv(a, b) and mf_mod(a, b), which round as Python does; mf_min(a, b) and mf_max(a, b)
    take two operands. All four are int64_t functions of int64_t that the including code defines.
    Raises ValueError for a constant beyond int64 or a symbol whose name is no C identifier.
    """
    if not isinstance(e, IntExpr):
        e = Const(e)
    return _print(e, style)[0]


@singledispatch
def _print(e: IntExpr, style: Style) -> _Printed:
    del style
    raise TypeError(f"cannot print a {type(e).__name__}")


@_print.register
def _(e: Const, style: Style) -> _Printed:
    # Unary minus binds tighter than any binary operator, but `a - -1` is hard to read.
    return _integer(e.value, style), _ATOM if e.value >= 0 else _PRODUCT


@_print.register
def _(e: Symbol, style: Style) -> _Printed:
    if style == "c" and not _C_NAME.fullmatch(e.name):
        raise ValueError(f"symbol {e.name}: not a C identifier; substitute it before printing C")
    return e.name, _ATOM


@_print.register
def _(e: Add, style: Style) -> _Printed:
    positive = [_scaled(term, c, style) for term, c in e.terms if c > 0]
    negated = [(term, c) for term, c in e.terms if c < 0]
    has_no_c_negation = style == "c" and e.constant == -_INT64_LIMIT
    if e.constant > 0 or has_no_c_negation:
        positive.append(_integer(e.constant, style))
    if not positive:
        positive.append(_scaled(*negated.pop(0), style))
    negative = [_scaled(term, -c, style) for term, c in negated]
    if e.constant < 0 and not has_no_c_negation:
        negative.append(_integer(-e.constant, style))
    return " - ".join([" + ".join(positive), *negative]), _SUM


@_print.register
def _(e: Mul, style: Style) -> _Printed:
    parts = [_enclosed(factor, _ATOM, style) for factor in e.factors]
    if e.coefficient == 1:
        return "*".join(parts), _PRODUCT
    if e.coefficient == -1:
        return "-" + "*".join(parts), _PRODUCT
    return "*".join([_integer(e.coefficient, style), *parts]), _PRODUCT


@_print.register
def _(e: FloorDiv, style: Style) -> _Printed:
    return _division(e, "//" if style == "text" else "/", "mf_floordiv", style)


@_print.register
def _(e: Mod, style: Style) -> _Printed:
    return _division(e, "%", "mf_mod", style)


@_print.register
def _(e: Min, style: Style) -> _Printed:
    return _call("min", e.operands, style), _ATOM


@_print.register
def _(e: Max, style: Style) -> _Printed:
    return _call("max", e.operands, style), _ATOM


def _division(e: FloorDiv | Mod, operator: str, function: str, style: Style) -> _Printed:
    a, b = e.numerator, e.denominator
    truncates_alike = a.low is not None and a.low >= 0 and b.low is not None and b.low >= 1
    if style == "c" and not truncates_alike:
        return f"{function}({_print(a, style)[0]}, {_print(b, style)[0]})", _ATOM
    left, right = _enclosed(a, _PRODUCT, style), _enclosed(b, _ATOM, style)
    return f"{left} {operator} {right}", _PRODUCT


def _call(name: str, operands: tuple[IntExpr, ...], style: Style) -> str:
    printed = [_print(operand, style)[0] for operand in operands]
    if style == "text":
        return f"{name}({', '.join(printed)})"
    text = printed[-1]
    for operand in reversed(printed[:-1]):
        text = f"mf_{name}({operand}, {text})"
    return text


def _scaled(term: IntExpr, coefficient: int, style: Style) -> str:
    if coefficient == 1:
        return _enclosed(term, _PRODUCT, style)
    factors = term.factors if isinstance(term, Mul) else (term,)
    return _print(Mul(coefficient, factors), style)[0]


def _enclosed(e: IntExpr, binding: int, style: Style) -> str:
    text, own = _print(e, style)
    return text if own >= binding else f"({text})"


def _integer(value: int, style: Style) -> str:
    if style == "text" or -_INT32_LIMIT < value < _INT32_LIMIT:
        return str(value)
    if not -_INT64_LIMIT <= value < _INT64_LIMIT:
        raise ValueError(f"{value} does not fit an int64")
    if value == -_INT64_LIMIT:
        # C has no negative literals, and the positive one would overflow.
        return f"(-{_INT64_LIMIT - 1}LL - 1)"
    return f"{value}LL"
