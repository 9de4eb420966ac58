"""Read back the text that render.py prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from meshfuse.expr.nodes import IntExpr, Symbol
from meshfuse.expr.simplify import add, const, floordiv, maximum, minimum, mod, mul, symbol

_TOKEN = re.compile(
    r"\s*(?:(?P<integer>\d+)|(?P<name>[A-Za-z_]\w*(?:\.\w+)*)|(?P<operator>//|[-+*%(),]))", re.ASCII
)
_FUNCTIONS: dict[str, Callable[..., IntExpr]] = {"min": minimum, "max": maximum}


def parse(text: str, symbols: Mapping[str, Symbol] | None = None) -> IntExpr:
    """The expression that `text` denotes; `parse(render(e)) is e`.

    A name stands for `symbols[name]`, else for the symbol of that name with default facts.
    Raises ValueError with the text, the column (from 1) and what was expected there.
    """
    reader = _Reader(text, symbols or {})
    reader.advance()
    e = reader.sum()
    if reader.token:
        raise reader.error("an operator or the end")
    return e


@final
@dataclass(slots=True, eq=False, repr=False)
class _Reader:
    """A recursive-descent parser with one token of look-ahead; the empty token is the end."""

    text: str
    symbols: Mapping[str, Symbol]
    kind: str | None = None
    token: str = ""
    start: int = 0
    end: int = 0

    def advance(self) -> str:
        """Move to the next token and return the one that was current."""
        previous = self.token
        match = _TOKEN.match(self.text, self.end)
        if match is None:
            self.kind, self.token = None, ""
            self.start = len(self.text) - len(self.text[self.end :].lstrip())
            if self.start < len(self.text):
                raise self.error("an integer, a name or an operator")
            return previous
        self.kind = match.lastgroup
        self.token = match[match.lastgroup or 0]
        self.start, self.end = match.end() - len(self.token), match.end()
        return previous

    def error(self, expected: str) -> ValueError:
        found = repr(self.text[self.start : self.start + max(1, len(self.token))] or "the end")
        return ValueError(
            f"{self.text!r}, column {self.start + 1}: expected {expected}, found {found}"
        )

    def expect(self, token: str) -> None:
        if self.token != token:
            raise self.error(repr(token))
        self.advance()

    def sum(self) -> IntExpr:
        addends = [self.product()]
        while self.token in ("+", "-"):
            sign = 1 if self.advance() == "+" else -1
            addends.append(mul(sign, self.product()))
        return add(*addends) if len(addends) > 1 else addends[0]

    def product(self) -> IntExpr:
        result = self.unary()
        while self.token in ("*", "//", "%"):
            operator = self.advance()
            start = self.start
            operand = self.unary()
            try:
                result = {"*": mul, "//": floordiv, "%": mod}[operator](result, operand)
            except ZeroDivisionError:
                raise ValueError(
                    f"{self.text!r}, column {start + 1}: expected a divisor other than 0"
                ) from None
        return result

    def unary(self) -> IntExpr:
        if self.token == "-":
            self.advance()
            return mul(-1, self.unary())
        return self.atom()

    def atom(self) -> IntExpr:
        if self.kind == "integer":
            return const(int(self.advance()))
        if self.kind == "name":
            name = self.advance()
            if name in _FUNCTIONS:
                return _FUNCTIONS[name](*self.arguments())
            return self.symbols[name] if name in self.symbols else symbol(name)
        if self.token == "(":
            self.advance()
            e = self.sum()
            self.expect(")")
            return e
        raise self.error("an integer, a name, '-' or '('")

    def arguments(self) -> list[IntExpr]:
        self.expect("(")
        operands = [self.sum()]
        while self.token == ",":
            self.advance()
            operands.append(self.sum())
        self.expect(")")
        return operands
