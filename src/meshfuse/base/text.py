"""One text grammar for every IR, driven by dataclass fields (law 7).

A statement is one line, with an optional block:

    out, out = op(positional, ..., keyword=value) {
      statement
    }

Fields of type `Out[...]` stand left of the equals sign, one with `OpNames` supplies the op's name
(otherwise the class name in snake case does, less a final "statement"), a `Rest[...]` takes the
remaining positional arguments, a `Block[...]` is the block. Of the other fields, those without a
default are positional and those with one are keywords, left out when they hold the default.

Values print by their declared type: names bare, strings quoted, enums by value, tuples in [],
mappings in {}, None as `none`, and a dataclass as `Name(positional, keyword=value)`.
`parse(print(x)) == x` for whatever is made of such types and of those that have a codec.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, Final, TypeAlias, TypeVar, cast, final

from meshfuse.base.codecs import BASIC_CODECS, NAME_CODEC, Codec, enum_codec, raw_codec
from meshfuse.base.cursor import Cursor, TextError
from meshfuse.base.frozen import frozen_dataclass

__all__ = [
    "Block",
    "Codec",
    "Cursor",
    "Grammar",
    "OpNames",
    "Out",
    "Rest",
    "TextError",
    "raw_codec",
]

_INDENT: Final = "  "


_T = TypeVar("_T")


@final
class _Role(Enum):
    out = "out"
    rest = "rest"
    block = "block"


Out: TypeAlias = Annotated[_T, _Role.out]
"""A name that the statement defines: printed left of the equals sign."""
Rest: TypeAlias = Annotated[_T, _Role.rest]
"""A tuple that takes all remaining positional arguments."""
Block: TypeAlias = Annotated[_T, _Role.block]
"""A tuple of statements, printed between braces."""


@final
@frozen_dataclass
class OpNames:
    """`Annotated[str, OpNames(names)]`: the statement's printed name, one of `names`."""

    names: Collection[str]


@final
class Grammar:
    """Printer and parser for a set of statement classes.

    `statements` may stand on a line; `codecs` say how further types print. Value dataclasses and
    enums need no registration: their types are found in the fields. No two statements may have one
    op name.
    """

    def __init__(
        self, statements: Sequence[type], codecs: Mapping[type, Codec] | None = None
    ) -> None:
        self._codecs: dict[Any, Codec] = {**BASIC_CODECS, **(codecs or {})}
        self._statements = tuple(statements)

    @cached_property
    def _by_op(self) -> dict[str, type]:
        """The statement of each op name; found when first parsing, for reading all fields is slow.

        Raises TypeError for two classes with one op name.
        """
        by_op: dict[str, type] = {}
        for cls in self._statements:
            for name in _op_names(cls):
                if name in by_op:
                    raise TypeError(f"op {name} is {by_op[name].__name__} and {cls.__name__}")
                by_op[name] = cls
        return by_op

    # Printing.

    def print(self, statement: object, depth: int = 0) -> str:
        """The text of one statement and its block, without a final newline."""
        shape = _shape_of(type(statement))
        outs = [str(getattr(statement, name)) for name in shape.outs]
        head = f"{', '.join(outs)} = " if outs else ""
        arguments = self._render_arguments(statement, shape)
        line = f"{_INDENT * depth}{head}{self.op_name(statement)}({arguments})"
        if shape.block is None:
            return line
        body = [self.print(child, depth + 1) for child in getattr(statement, shape.block)]
        return "\n".join([line + " {", *body, _INDENT * depth + "}"])

    def op_name(self, statement: object) -> str:
        """The op of a statement, as it is printed."""
        shape = _shape_of(type(statement))
        return getattr(statement, shape.op) if shape.op else _snake(type(statement).__name__)

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
            return self._render_tuple(cast(tuple[object, ...], value), args)
        if origin is not None and issubclass(origin, Mapping):
            pairs = cast(Mapping[object, object], value).items()
            inside = (f"{self.render(k, args[0])}: {self.render(v, args[1])}" for k, v in pairs)
            return "{" + ", ".join(inside) + "}"
        codec = self._codec_for(hint)
        if codec is not None:
            return codec.render(value)
        return f"{type(value).__name__}({self._render_arguments(value, _shape_of(type(value)))})"

    def _render_tuple(self, items: tuple[object, ...], hints: Sequence[Any]) -> str:
        each = [hints[0]] * len(items) if hints[-1] is Ellipsis else hints
        texts = [self.render(item, of) for item, of in zip(items, each, strict=True)]
        return "[" + ", ".join(texts) + "]"

    def _render_in_union(self, value: object, alternatives: Sequence[Any]) -> str:
        for hint in alternatives:
            if _is_instance(value, hint):
                text = self.render(value, hint)
                return f"({text})" if self._is_wrapped(hint, alternatives) else text
        raise TypeError(f"{value!r} is none of {alternatives}")

    # Parsing.

    def parse(self, text: str) -> Any:
        """The one statement that `text` holds. Raises TextError."""
        cursor = Cursor(text)
        statement = self._parse_statement(cursor)
        cursor.skip_blank()
        if cursor.position < len(text):
            raise cursor.fail("the end of the text")
        return statement

    def parse_value(self, text: str, hint: Any) -> Any:
        """The value declared as `hint` that `text` holds. Raises TextError."""
        cursor = Cursor(text)
        value = self._parse_value(cursor, hint)
        cursor.skip_blank()
        if cursor.position < len(text):
            raise cursor.fail("the end of the text")
        return value

    def _parse_statement(self, cursor: Cursor) -> object:
        cursor.skip_blank()
        start = cursor.position
        names = [cursor.identifier("a statement")]
        while cursor.accept(","):
            names.append(cursor.identifier())
        outs: list[str] = []
        if cursor.accept("="):
            cursor.skip_spaces()
            outs, start = names, cursor.position
            names = [cursor.identifier("an op")]
        cls = self._by_op.get(names[0])
        if cls is None or len(names) > 1:
            raise cursor.fail(f"an op, one of {', '.join(sorted(self._by_op))}", at=start)
        shape = _shape_of(cls)
        if len(outs) != len(shape.outs):
            expected = f"{len(shape.outs)} names before '=' for {names[0]}, not {len(outs)}"
            raise cursor.fail(expected, at=start)
        fields: dict[str, object] = dict(zip(shape.outs, outs, strict=True))
        if shape.op is not None:
            fields[shape.op] = names[0]
        cursor.expect("(")
        fields |= self._parse_arguments(cursor, shape, names[0])
        if shape.block is not None:
            fields[shape.block] = self._parse_block(cursor)
        if not cursor.at_line_end():
            raise cursor.fail("the end of the line")
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
                cursor.expect_comma_or(")")
            cursor.skip_spaces()
            start = cursor.position
            keyword = _accept_keyword(cursor)
            if keyword is not None:
                if keyword not in shape.keywords or keyword in fields:
                    free = [name for name in shape.keywords if name not in fields]
                    expected = f"a keyword of {op}, one of {', '.join(free) or 'none'}"
                    raise cursor.fail(expected, at=start)
                fields[keyword] = self._parse_value(cursor, shape.hints[keyword])
            elif pending:
                name = pending.pop(0)
                fields[name] = self._parse_value(cursor, shape.hints[name])
            elif shape.rest is not None:
                rest.append(self._parse_value(cursor, typing.get_args(shape.hints[shape.rest])[0]))
            else:
                raise cursor.fail(f"')': {op} takes {len(shape.positional)} positional arguments")
        if pending:
            raise cursor.fail(f"{op}'s argument {pending[0]}", at=cursor.position - 1)
        if shape.rest is not None:
            fields[shape.rest] = tuple(rest)
        return fields

    def _parse_value(self, cursor: Cursor, hint: Any) -> Any:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self._parse_union(cursor, args)
        if origin is tuple:
            return tuple(self._parse_items(cursor, args))
        if origin is not None and issubclass(origin, Mapping):
            return self._parse_mapping(cursor, args[0], args[1])
        codec = self._codec_for(hint)
        if codec is not None:
            return codec.parse(cursor)
        cursor.skip_spaces()
        start = cursor.position
        if cursor.accept_identifier() != hint.__name__:
            raise cursor.fail(hint.__name__, at=start)
        cursor.expect("(")
        return hint(**self._parse_arguments(cursor, _shape_of(hint), hint.__name__))

    def _parse_items(self, cursor: Cursor, hints: Sequence[Any]) -> list[object]:
        """A bracketed list; `hints` are the arguments of its tuple type."""
        cursor.expect("[")
        items: list[object] = []
        fixed = None if hints[-1] is Ellipsis else len(hints)
        while not cursor.accept("]"):
            if len(items) == fixed:
                raise cursor.fail(f"']' after {fixed} items")
            if items:
                cursor.expect_comma_or("]")
            items.append(
                self._parse_value(cursor, hints[0] if fixed is None else hints[len(items)])
            )
        if fixed is not None and len(items) < fixed:
            raise cursor.fail(f"{fixed} items, not {len(items)}", at=cursor.position - 1)
        return items

    def _parse_mapping(self, cursor: Cursor, key: Any, value: Any) -> dict[object, object]:
        cursor.expect("{")
        pairs: dict[object, object] = {}
        while not cursor.accept("}"):
            if pairs:
                cursor.expect_comma_or("}")
            name = self._parse_value(cursor, key)
            cursor.expect(":")
            pairs[name] = self._parse_value(cursor, value)
        return pairs

    def _parse_union(self, cursor: Cursor, alternatives: Sequence[Any]) -> object:
        """The first alternative that takes the text up to a delimiter.

        Names come last, as they take most. The error is that of the alternative that got furthest.
        """
        cursor.skip_spaces()
        start = cursor.position
        if types.NoneType in alternatives and cursor.accept_identifier() == "none":
            return None
        real = sorted((a for a in alternatives if a is not types.NoneType), key=_is_name)
        furthest, furthest_error = start, None
        for hint in real:
            cursor.position = start
            try:
                return self._parse_alternative(cursor, hint, alternatives)
            except TextError as error:
                if cursor.position > furthest or len(real) == 1:
                    furthest, furthest_error = cursor.position, error
        cursor.position = furthest
        if furthest_error is not None:
            raise furthest_error
        raise cursor.fail(" or ".join(dict.fromkeys(map(_hint_name, real))))

    def _parse_alternative(self, cursor: Cursor, hint: Any, alternatives: Sequence[Any]) -> object:
        wrapped = self._is_wrapped(hint, alternatives)
        if wrapped:
            cursor.expect("(")
        value = self._parse_value(cursor, hint)
        if wrapped:
            cursor.expect(")")
        if not cursor.at_value_end():
            raise cursor.fail("the end of the value")
        return value

    def _is_wrapped(self, hint: Any, alternatives: Sequence[Any]) -> bool:
        codec = self._codec_for(hint)
        others = [a for a in alternatives if a is not hint and a is not types.NoneType]
        return codec is not None and codec.wrapped and bool(others)

    def _codec_for(self, hint: Any) -> Codec | None:
        codec = self._codecs.get(hint)
        if codec is not None:
            return codec
        if _is_name(hint):
            return NAME_CODEC
        if isinstance(hint, type) and issubclass(hint, Enum):
            self._codecs[hint] = enum_codec(hint)
            return self._codecs[hint]
        return None


def _accept_keyword(cursor: Cursor) -> str | None:
    start = cursor.position
    name = cursor.accept_identifier()
    if name is not None and cursor.looking_at("=") and not cursor.looking_at("=="):
        cursor.expect("=")
        return name
    cursor.position = start
    return None


# Shapes: what a dataclass' fields are in text.


@final
@frozen_dataclass
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
        raise TypeError(f"{_hint_name(cls)} is no dataclass and has no codec")
    roles = _roles_of(cls)
    plain = [f for f in dataclasses.fields(cls) if f.name not in roles]

    def names_with(role: object) -> tuple[str, ...]:
        return tuple(name for name, found in roles.items() if found == role)

    return _Shape(
        outs=names_with(_Role.out),
        op=next((name for name, role in roles.items() if isinstance(role, OpNames)), None),
        positional=tuple(f.name for f in plain if not _has_default(f)),
        rest=next(iter(names_with(_Role.rest)), None),
        block=next(iter(names_with(_Role.block)), None),
        keywords={f.name: _default(f) for f in plain if _has_default(f)},
        hints=typing.get_type_hints(cls),
    )


def _roles_of(cls: type) -> dict[str, _Role | OpNames]:
    """The fields that have a role in the statement's form."""
    hints = typing.get_type_hints(cls, include_extras=True)
    marks = {name: getattr(hints[name], "__metadata__", ()) for name in _field_names(cls)}
    return {
        name: mark
        for name, found in marks.items()
        for mark in found
        if isinstance(mark, _Role | OpNames)
    }


def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _op_names(cls: type) -> Collection[str]:
    given = [role for role in _roles_of(cls).values() if isinstance(role, OpNames)]
    return given[0].names if given else (_snake(cls.__name__),)


def _snake(name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return words.removesuffix("_statement")


def _is_name(hint: Any) -> bool:
    """Whether `hint` is a NewType: names are NewTypes of str."""
    return hasattr(hint, "__supertype__")


def _hint_name(hint: Any) -> str:
    return "a name" if _is_name(hint) else str(getattr(hint, "__name__", hint))


def _is_instance(value: object, hint: Any) -> bool:
    if hint is types.NoneType:
        return value is None
    if _is_name(hint):
        return isinstance(value, hint.__supertype__)
    origin = typing.get_origin(hint)
    wanted = origin if origin is not None else hint
    if isinstance(value, bool) and wanted in (int, float):
        return False
    return isinstance(value, wanted)
