"""How values of single types print and parse, for the grammar of base/text.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, final

from meshfuse.base.cursor import Cursor
from meshfuse.base.frozen import frozen_dataclass


@final
@frozen_dataclass
class Codec:
    """`parse` reads what `render` writes, and raises Cursor.fail's error for other text.

    A `wrapped` value stands in parentheses where values of other types may stand, too.
    """

    render: Callable[[Any], str]
    parse: Callable[[Cursor], Any]
    wrapped: bool = False


def raw_codec(render: Callable[[Any], str], parse: Callable[[str], Any]) -> Codec:
    """A codec for a language of its own, such as integer expressions.

    `parse` gets everything up to the next delimiter and raises ValueError for what it cannot read.
    """

    def parse_raw(cursor: Cursor) -> Any:
        cursor.skip_spaces()
        start = cursor.position
        try:
            return parse(cursor.raw())
        except ValueError as error:
            cursor.position = start
            raise cursor.fail(f"an expression ({error})") from error

    return Codec(render, parse_raw, wrapped=True)


def enum_codec(enum: type[Enum]) -> Codec:
    """Members print as their values, which are identifiers."""
    by_text = {str(member.value): member for member in enum}

    def parse(cursor: Cursor) -> Enum:
        cursor.skip_spaces()
        start = cursor.position
        word = cursor.accept_identifier()
        if word not in by_text:
            raise cursor.fail(f"one of {', '.join(by_text)}", at=start)
        return by_text[word]

    return Codec(lambda member: str(member.value), parse)


def parse_bool(cursor: Cursor) -> bool:
    cursor.skip_spaces()
    start = cursor.position
    word = cursor.accept_identifier()
    if word not in ("true", "false"):
        raise cursor.fail("true or false", at=start)
    return word == "true"


def render_bool(value: bool) -> str:
    return "true" if value else "false"


NAME_CODEC: Final = Codec(str, Cursor.identifier)

BASIC_CODECS: Final[Mapping[Any, Codec]] = {
    bool: Codec(render_bool, parse_bool),
    int: Codec(str, Cursor.integer),
    float: Codec(repr, lambda cursor: float(cursor.number())),
    str: Codec(lambda value: json.dumps(value, ensure_ascii=False), Cursor.string),
}
