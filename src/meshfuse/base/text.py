"""One text grammar for every IR, driven by dataclass fields (law L7).

A statement is one line, with an optional block:

    out, out = op(positional, ..., keyword=value) {
      statement
    }

Fields made by `out_field` stand left of the equals sign, `op_field` supplies the op's name (otherwise the
class name in snake case does), `rest_field` takes the remaining positional arguments, `block_field` is the
block. Of the other fields, those without a default are positional and those with one are keywords, left
out when they hold the default. Values print by their declared type; a value dataclass prints as
`Name(positional, keyword=value)`. `parse(print(x)) == x` for whatever is made of registered types.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, cast, final

_ROLE: Final = "text"
_NAMES: Final = "text_names"
_INDENT: Final = "  "
_CLOSERS: Final = ",)]}"
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_NUMBER = re.compile(r"-?(inf|nan|\d+(\.\d*)?([eE][-+]?\d+)?)")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def out_field() -> Any:
    """A name that the statement defines: printed left of the equals sign."""
    return dataclasses.field(metadata={_ROLE: "out"})


def op_field(names: Collection[str]) -> Any:
    """The statement's printed name, one of `names`."""
    return dataclasses.field(metadata={_ROLE: "op", _NAMES: tuple(names)})


def rest_field() -> Any:
    """A tuple that takes all remaining positional arguments."""
    return dataclasses.field(metadata={_ROLE: "rest"})


def block_field() -> Any:
    """A tuple of statements, printed between braces."""
    return dataclasses.field(metadata={_ROLE: "block"})


class TextError(ValueError):
    """Text that does not parse: says line, column and what was expected."""


@final
@dataclass(slots=True)
class Cursor:
    """A place in a text being parsed."""

    text: str
    position: int = 0

    def fail(self, expected: str) -> TextError:
        before = self.text[: self.position]
        line, column = before.count("\n") + 1, self.position - (before.rfind("\n") + 1) + 1
        found = self.text[self.position : self.position + 20].split("\n")[0] or "end of line"
        return TextError(f"line {line}, column {column}: expected {expected}, found {found!r}")

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
        if not self.looking_at(token):
            return False
        self.position += len(token)
        return True

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.fail(repr(token))

    def match(self, pattern: re.Pattern[str]) -> str | None:
        self.skip_spaces()
        found = pattern.match(self.text, self.position)
        if found is None:
            return None
        self.position = found.end()
        return found.group()

    def identifier(self, expected: str = "a name") -> str:
        name = self.match(_IDENTIFIER)
        if name is None:
            raise self.fail(expected)
        return name

    def raw(self) -> str:
        """The text up to the next comma or closing bracket that is not inside brackets, or the line's end."""
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
        self.skip_spaces()
        return self.position >= len(self.text) or self.text[self.position] in _CLOSERS + "\n:"


@final
@dataclass(frozen=True, slots=True)
class Codec:
    """How values of one type print and parse. `wrapped` values stand in parentheses where other types may stand too."""

    render: Callable[[Any], str]
    parse: Callable[[Cursor], Any]
    wrapped: bool = False


def raw_codec(render: Callable[[Any], str], parse: Callable[[str], Any]) -> Codec:
    """A codec for a sub-language of its own, such as integer expressions: takes everything to the next delimiter."""

    def parse_raw(cursor: Cursor) -> Any:
        start = cursor.position
        try:
            return parse(cursor.raw())
        except ValueError as error:
            cursor.position = start
            raise cursor.fail(f"an expression ({error})") from error

    return Codec(render, parse_raw, wrapped=True)


@final
class Grammar:
    """Printer and parser for a set of statement classes.

    `statements` may stand on a line; `codecs` say how further types print. Value dataclasses and enums
    need no registration: their types are found in the fields.
    """

    def __init__(
        self, statements: Sequence[type], codecs: Mapping[type, Codec] | None = None
    ) -> None:
        self._codecs: dict[Any, Codec] = {**_BASIC_CODECS, **(codecs or {})}
        self._by_op: dict[str, type] = {}
        for cls in statements:
            for name in _op_names(cls):
                if name in self._by_op:
                    raise TypeError(f"op {name} is {self._by_op[name].__name__} and {cls.__name__}")
                self._by_op[name] = cls

    # Printing.

    def print(self, statement: object, depth: int = 0) -> str:
        """The text of one statement and its block, without a final newline."""
        shape = _shape_of(type(statement))
        outs = [str(getattr(statement, name)) for name in shape.outs]
        op = getattr(statement, shape.op) if shape.op else _snake(type(statement).__name__)
        head = f"{', '.join(outs)} = " if outs else ""
        line = f"{_INDENT * depth}{head}{op}({self._render_arguments(statement, shape)})"
        if shape.block is None:
            return line
        body = [self.print(child, depth + 1) for child in getattr(statement, shape.block)]
        return "\n".join([line + " {", *body, _INDENT * depth + "}"])

    def _render_arguments(self, value: object, shape: _Shape) -> str:
        parts = [self.render(getattr(value, name), shape.hints[name]) for name in shape.positional]
        if shape.rest is not None:
            element = typing.get_args(shape.hints[shape.rest])[0]
            parts += [self.render(item, element) for item in getattr(value, shape.rest)]
        for name, default in shape.keywords.items():
            item = getattr(value, name)
            if item != default:
                parts.append(f"{name}={self.render(item, shape.hints[name])}")
        return ", ".join(parts)

    def render(self, value: object, hint: Any) -> str:
        """The text of a value declared as `hint`."""
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if value is None:
            return "none"
        if origin in (typing.Union, types.UnionType):
            return self._render_in_union(value, args)
        if origin is tuple:
            hints = (
                [args[0]] * len(cast(tuple[object, ...], value)) if args[-1] is Ellipsis else args
            )
            items = zip(cast(tuple[object, ...], value), hints, strict=True)
            return "[" + ", ".join(self.render(item, of) for item, of in items) + "]"
        if origin is not None and issubclass(origin, Mapping):
            pairs = cast(Mapping[object, object], value).items()
            inside = (f"{self.render(k, args[0])}: {self.render(v, args[1])}" for k, v in pairs)
            return "{" + ", ".join(inside) + "}"
        codec = self._codec_for(hint)
        if codec is not None:
            return codec.render(value)
        return f"{type(value).__name__}({self._render_arguments(value, _shape_of(type(value)))})"

    def _render_in_union(self, value: object, alternatives: Sequence[Any]) -> str:
        for hint in alternatives:
            if _is_instance(value, hint):
                codec = self._codec_for(hint)
                text = self.render(value, hint)
                many = len([a for a in alternatives if a is not types.NoneType]) > 1
                return f"({text})" if codec is not None and codec.wrapped and many else text
        raise TypeError(f"{value!r} is none of {alternatives}")

    # Parsing.

    def parse(self, text: str) -> Any:
        """The one statement that `text` holds."""
        cursor = Cursor(text)
        statement = self._parse_statement(cursor)
        cursor.skip_blank()
        if cursor.position < len(text):
            raise cursor.fail("the end of the text")
        return statement

    def parse_value(self, text: str, hint: Any) -> Any:
        """The value declared as `hint` that `text` holds."""
        return self._parse_value(Cursor(text), hint)

    def _parse_statement(self, cursor: Cursor) -> object:
        cursor.skip_blank()
        start = cursor.position
        names = [cursor.identifier("a statement")]
        while cursor.accept(","):
            names.append(cursor.identifier())
        outs: list[str] = []
        if cursor.accept("="):
            outs, start = names, cursor.position
            names = [cursor.identifier("an op")]
        cls = self._by_op.get(names[0])
        if cls is None or len(names) > 1:
            cursor.position = start
            raise cursor.fail(f"an op, one of {', '.join(sorted(self._by_op))}")
        shape = _shape_of(cls)
        if len(outs) != len(shape.outs):
            cursor.position = start
            raise cursor.fail(f"{len(shape.outs)} names before '=' for {names[0]}, not {len(outs)}")
        fields: dict[str, object] = dict(zip(shape.outs, outs, strict=True))
        if shape.op is not None:
            fields[shape.op] = names[0]
        cursor.expect("(")
        fields |= self._parse_arguments(cursor, shape, names[0])
        if shape.block is not None:
            fields[shape.block] = self._parse_block(cursor)
        return cls(**fields)

    def _parse_block(self, cursor: Cursor) -> tuple[object, ...]:
        cursor.expect("{")
        statements: list[object] = []
        while True:
            cursor.skip_blank()
            if cursor.accept("}"):
                return tuple(statements)
            statements.append(self._parse_statement(cursor))

    def _parse_arguments(self, cursor: Cursor, shape: _Shape, op: str) -> dict[str, object]:
        """Everything after the opening parenthesis, up to and with the closing one."""
        fields: dict[str, object] = {}
        rest: list[object] = []
        pending = list(shape.positional)
        while not cursor.accept(")"):
            if fields or rest:
                cursor.expect(",")
            keyword = self._accept_keyword(cursor)
            if keyword is not None:
                if keyword not in shape.keywords:
                    raise cursor.fail(
                        f"a keyword of {op}, one of {', '.join(shape.keywords) or 'none'}"
                    )
                fields[keyword] = self._parse_value(cursor, shape.hints[keyword])
            elif pending:
                name = pending.pop(0)
                fields[name] = self._parse_value(cursor, shape.hints[name])
            elif shape.rest is not None:
                rest.append(self._parse_value(cursor, typing.get_args(shape.hints[shape.rest])[0]))
            else:
                raise cursor.fail(f"')': {op} takes {len(shape.positional)} positional arguments")
        if pending:
            raise cursor.fail(f"{op}'s argument {pending[0]}")
        if shape.rest is not None:
            fields[shape.rest] = tuple(rest)
        return fields

    def _accept_keyword(self, cursor: Cursor) -> str | None:
        start = cursor.position
        name = cursor.match(_IDENTIFIER)
        if name is not None and cursor.looking_at("=") and not cursor.looking_at("=="):
            cursor.expect("=")
            return name
        cursor.position = start
        return None

    def _parse_value(self, cursor: Cursor, hint: Any) -> Any:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self._parse_union(cursor, args)
        if origin is tuple:
            hints = None if args[-1] is Ellipsis else args
            return tuple(self._parse_items(cursor, args[0], hints))
        if origin is not None and issubclass(origin, Mapping):
            return self._parse_mapping(cursor, args[0], args[1])
        codec = self._codec_for(hint)
        if codec is not None:
            return codec.parse(cursor)
        name = cursor.identifier(hint.__name__)
        if name != hint.__name__:
            raise cursor.fail(hint.__name__)
        cursor.expect("(")
        return hint(**self._parse_arguments(cursor, _shape_of(hint), name))

    def _parse_items(
        self, cursor: Cursor, element: Any, hints: Sequence[Any] | None
    ) -> list[object]:
        cursor.expect("[")
        items: list[object] = []
        while not cursor.accept("]"):
            if items:
                cursor.expect(",")
            items.append(self._parse_value(cursor, hints[len(items)] if hints else element))
        return items

    def _parse_mapping(self, cursor: Cursor, key: Any, value: Any) -> dict[object, object]:
        cursor.expect("{")
        pairs: dict[object, object] = {}
        while not cursor.accept("}"):
            if pairs:
                cursor.expect(",")
            name = self._parse_value(cursor, key)
            cursor.expect(":")
            pairs[name] = self._parse_value(cursor, value)
        return pairs

    def _parse_union(self, cursor: Cursor, alternatives: Sequence[Any]) -> object:
        """The first alternative that takes the text up to a delimiter; names come last, as they take most."""
        start = cursor.position
        if types.NoneType in alternatives and cursor.match(_IDENTIFIER) == "none":
            return None
        cursor.position = start
        real = [a for a in alternatives if a is not types.NoneType]
        errors: list[TextError] = []
        for hint in sorted(real, key=lambda a: hasattr(a, "__supertype__")):
            cursor.position = start
            codec = self._codec_for(hint)
            wrapped = codec is not None and codec.wrapped and len(real) > 1
            try:
                if wrapped:
                    cursor.expect("(")
                value = self._parse_value(cursor, hint)
                if wrapped:
                    cursor.expect(")")
                if not cursor.at_value_end():
                    raise cursor.fail("the end of the value")
                return value
            except TextError as error:
                errors.append(error)
        cursor.position = start
        if len(errors) == 1:
            raise errors[0]
        raise cursor.fail(" or ".join(_hint_name(a) for a in real))

    def _codec_for(self, hint: Any) -> Codec | None:
        codec = self._codecs.get(hint)
        if codec is not None:
            return codec
        if hasattr(hint, "__supertype__"):
            return _NAME_CODEC
        if isinstance(hint, type) and issubclass(hint, Enum):
            return _enum_codec(hint)
        return None


# Shapes: what a dataclass' fields are in text.


@final
@dataclass(frozen=True, slots=True)
class _Shape:
    outs: tuple[str, ...]
    op: str | None
    positional: tuple[str, ...]
    rest: str | None
    block: str | None
    keywords: Mapping[str, object]
    hints: Mapping[str, Any]


_SHAPES: dict[type, _Shape] = {}


def _shape_of(cls: type) -> _Shape:
    if cls not in _SHAPES:
        _SHAPES[cls] = _make_shape(cls)
    return _SHAPES[cls]


def _make_shape(cls: type) -> _Shape:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is no dataclass and has no codec")
    fields = dataclasses.fields(cls)
    roles = {f.name: f.metadata.get(_ROLE) for f in fields}

    def only(role: str) -> str | None:
        return next((name for name, found in roles.items() if found == role), None)

    plain = [f for f in fields if roles[f.name] is None]
    return _Shape(
        outs=tuple(name for name, role in roles.items() if role == "out"),
        op=only("op"),
        positional=tuple(f.name for f in plain if not _has_default(f)),
        rest=only("rest"),
        block=only("block"),
        keywords={f.name: _default(f) for f in plain if _has_default(f)},
        hints=typing.get_type_hints(cls),
    )


def _has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _op_names(cls: type) -> tuple[str, ...]:
    for field in dataclasses.fields(cls):
        if field.metadata.get(_ROLE) == "op":
            return field.metadata[_NAMES]
    return (_snake(cls.__name__),)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _hint_name(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))


def _is_instance(value: object, hint: Any) -> bool:
    if hint is types.NoneType:
        return value is None
    if hasattr(hint, "__supertype__"):
        return isinstance(value, hint.__supertype__)
    origin = typing.get_origin(hint)
    wanted = origin if origin is not None else hint
    if isinstance(value, bool) and wanted in (int, float):
        return False
    return isinstance(value, wanted)


# Codecs of the basic types.


def _parse_bool(cursor: Cursor) -> bool:
    word = cursor.match(_IDENTIFIER)
    if word not in ("true", "false"):
        raise cursor.fail("true or false")
    return word == "true"


def _parse_int(cursor: Cursor) -> int:
    start = cursor.position
    word = cursor.match(_NUMBER)
    if word is None or not word.lstrip("-").isdigit():
        cursor.position = start
        raise cursor.fail("an integer")
    return int(word)


def _parse_float(cursor: Cursor) -> float:
    word = cursor.match(_NUMBER)
    if word is None:
        raise cursor.fail("a number")
    return float(word)


def _parse_string(cursor: Cursor) -> str:
    word = cursor.match(_STRING)
    if word is None:
        raise cursor.fail("a string in double quotes")
    return json.loads(word)


def _enum_codec(enum: type[Enum]) -> Codec:
    by_text = {str(member.value): member for member in enum}

    def parse(cursor: Cursor) -> Enum:
        start = cursor.position
        word = cursor.match(_IDENTIFIER)
        if word not in by_text:
            cursor.position = start
            raise cursor.fail(f"one of {', '.join(by_text)}")
        return by_text[word]

    return Codec(lambda member: str(member.value), parse)


_NAME_CODEC: Final = Codec(str, Cursor.identifier)
_BASIC_CODECS: Final[dict[type, Codec]] = {
    bool: Codec(lambda value: "true" if value else "false", _parse_bool),
    int: Codec(str, _parse_int),
    float: Codec(repr, _parse_float),
    str: Codec(lambda value: json.dumps(value, ensure_ascii=False), _parse_string),
}
