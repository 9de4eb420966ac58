"""A place in a text being parsed: tokens, and errors that give line, column and expectation."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Final, final

_CLOSERS: Final = ",)]}"
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_NUMBER = re.compile(r"-?(?:(?:inf|nan)\b|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_FOUND_LENGTH: Final = 20


@final
class TextError(ValueError):
    """Text that does not parse: says line, column, what was expected and what stands there.

    The message is made when asked for: parsing a union raises many that nobody reads.
    """

    def __init__(self, text: str, position: int, expected: str) -> None:
        super().__init__(text, position, expected)
        self.text = text
        self.position = position
        self.expected = expected

    def __str__(self) -> str:
        before = self.text[: self.position]
        line, column = before.count("\n") + 1, self.position - (before.rfind("\n") + 1) + 1
        rest = self.text[self.position : self.position + _FOUND_LENGTH].split("\n")[0]
        found = repr(rest) if rest else "the end of the line"
        return f"line {line}, column {column}: expected {self.expected}, found {found}"


@final
@dataclass(slots=True, eq=False, repr=False)
class Cursor:
    """`position` counts characters of `text`. Tokens may stand after spaces, not after newlines."""

    text: str
    position: int = 0

    def fail(self, expected: str, at: int | None = None) -> TextError:
        """The error to raise, at the current position or at `at`."""
        return TextError(self.text, self.position if at is None else at, expected)

    def skip_spaces(self) -> None:
        while self.text.startswith(" ", self.position):
            self.position += 1

    def skip_blank(self) -> None:
        """Skip spaces, newlines and # comments."""
        while self.position < len(self.text):
            if self.text[self.position] == "#":
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            elif self.text[self.position].isspace():
                self.position += 1
            else:
                return

    def looking_at(self, token: str) -> bool:
        self.skip_spaces()
        return self.text.startswith(token, self.position)

    def accept(self, token: str) -> bool:
        """Take `token` if it stands here."""
        if not self.looking_at(token):
            return False
        self.position += len(token)
        return True

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.fail(repr(token))

    def expect_comma_or(self, closer: str) -> None:
        """Take a comma, which `closer` might have stood in place of."""
        if not self.accept(","):
            raise self.fail(f"',' or {closer!r}")

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Take what matches here, if anything does."""
        self.skip_spaces()
        found = pattern.match(self.text, self.position)
        if found is None:
            return None
        self.position = found.end()
        return found.group()

    def accept_identifier(self) -> str | None:
        return self.match(_IDENTIFIER)

    def identifier(self, expected: str = "a name") -> str:
        name = self.match(_IDENTIFIER)
        if name is None:
            raise self.fail(expected)
        return name

    def integer(self) -> int:
        start = self.position
        word = self.match(_NUMBER)
        if word is None or not word.lstrip("-").isdigit():
            self.position = start
            self.skip_spaces()
            raise self.fail("an integer")
        return int(word)

    def number(self) -> int | float:
        """An int where the text has neither point, exponent, inf nor nan.

        Every nan is `math.nan`: one object equals itself where values hold it.
        """
        word = self.match(_NUMBER)
        if word is None:
            raise self.fail("a number")
        if word.endswith("nan"):
            return math.nan
        return int(word) if word.lstrip("-").isdigit() else float(word)

    def string(self) -> str:
        """A JSON string."""
        start = self.position
        word = self.match(_STRING)
        if word is None:
            raise self.fail("a string in double quotes")
        try:
            return json.loads(word)
        except ValueError as error:
            self.position = start
            raise self.fail(f"a string in double quotes ({error})") from error

    def raw(self) -> str:
        """The text up to the line's end or to a comma or closer that is not inside brackets."""
        self.skip_spaces()
        start, depth = self.position, 0
        while self.position < len(self.text):
            char = self.text[self.position]
            if char == "\n" or (depth == 0 and char in _CLOSERS):
                break
            depth += (char in "([{") - (char in ")]}")
            self.position += 1
        return self.text[start : self.position].rstrip()

    def at_value_end(self) -> bool:
        """Whether a value may end here."""
        self.skip_spaces()
        return self.position >= len(self.text) or self.text[self.position] in _CLOSERS + "\n:"

    def at_line_end(self) -> bool:
        """Whether a statement may end here."""
        self.skip_spaces()
        return self.position >= len(self.text) or self.text[self.position] in "\n#}"
