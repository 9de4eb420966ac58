"""The text grammar: what is printed parses back, and errors say where and what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, NewType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfuse.base.text import Block, Grammar, OpNames, Out, Rest, TextError, raw_codec

Name = NewType("Name", str)
Other = NewType("Other", str)


class Color(Enum):
    red = "red"
    plain = "p"


@dataclass(frozen=True)
class Point:
    x: int
    y: int = 0


@dataclass(frozen=True)
class Box:
    corners: tuple[Point, Point]
    label: str | None = None


@dataclass(frozen=True)
class Formula:
    """Stands for a language of its own."""

    text: str


@dataclass(frozen=True)
class Values:
    number: int
    real: float = 0.0
    flag: bool = False
    text: str = ""
    color: Color = Color.red
    box: Box | None = None
    names: tuple[Name, ...] = ()
    by_name: Mapping[Name, int] = field(default_factory=dict[Name, int])
    size: Formula | None = None


@dataclass(frozen=True)
class Apply:
    out: Out[Name]
    function: Annotated[str, OpNames(("add", "neg"))]
    args: Rest[tuple[Name | int | Formula | Point, ...]]
    note: str = ""


@dataclass(frozen=True)
class TwoResults:
    first: Out[Name]
    second: Out[Name]
    src: Name


@dataclass(frozen=True)
class LoopStatement:
    body: Block[tuple[object, ...]]
    trips: int = 1


def parse_formula(text: str) -> Formula:
    if text.count("(") != text.count(")") or not text:
        raise ValueError("unbalanced")
    return Formula(text)


GRAMMAR = Grammar(
    (Values, Apply, TwoResults, LoopStatement),
    {Formula: raw_codec(lambda formula: formula.text, parse_formula)},
)

EXAMPLES: list[tuple[object, str]] = [
    (Values(-3), "values(-3)"),
    (Values(0, real=1.5e-7), "values(0, real=1.5e-07)"),
    (Values(0, real=-math.inf), "values(0, real=-inf)"),
    (Values(0, real=1e20, flag=True), "values(0, real=1e+20, flag=true)"),
    (Values(0, text='a "b"\n, c)'), r'values(0, text="a \"b\"\n, c)")'),
    (Values(0, color=Color.plain), "values(0, color=p)"),
    (
        Values(0, box=Box((Point(1), Point(2, 3)))),
        "values(0, box=Box([Point(1), Point(2, y=3)]))",
    ),
    (
        Values(0, box=Box((Point(1), Point(2)), label="none")),
        'values(0, box=Box([Point(1), Point(2)], label="none"))',
    ),
    (Values(0, names=(Name("a"), Name("b.c"))), "values(0, names=[a, b.c])"),
    (Values(0, by_name={Name("a"): 1, Name("b"): -2}), "values(0, by_name={a: 1, b: -2})"),
    (Values(0, size=Formula("f(a, b) + 1")), "values(0, size=f(a, b) + 1)"),
    (
        Apply(Name("a"), "add", (Name("b"), 2, Formula("i + (1, 2)"), Point(1))),
        "a = add(b, 2, (i + (1, 2)), Point(1))",
    ),
    (Apply(Name("a"), "neg", (), note="x"), 'a = neg(note="x")'),
    (TwoResults(Name("a"), Name("b"), Name("c")), "a, b = two_results(c)"),
    (LoopStatement(()), "loop() {\n}"),
    (
        LoopStatement((LoopStatement((Values(1),), trips=3), Values(2))),
        "loop() {\n  loop(trips=3) {\n    values(1)\n  }\n  values(2)\n}",
    ),
]


@pytest.mark.parametrize(("statement", "text"), EXAMPLES)
def test_prints_and_parses_back(statement: object, text: str) -> None:
    assert GRAMMAR.print(statement) == text
    assert GRAMMAR.parse(text) == statement


def test_nan_parses_back() -> None:
    text = GRAMMAR.print(Values(0, real=math.nan))
    assert text == "values(0, real=nan)"
    assert math.isnan(GRAMMAR.parse(text).real)


def test_an_integer_is_a_float_where_one_is_wanted() -> None:
    parsed = GRAMMAR.parse("values(0, real=2)")
    assert parsed.real == 2.0
    assert isinstance(parsed.real, float)


def test_comments_and_blank_lines_are_skipped() -> None:
    text = "# head\n\nloop() {  # of one\n\n  values(1)  # a value\n  # end\n}\n# tail\n"
    assert GRAMMAR.parse(text) == LoopStatement((Values(1),))


@pytest.mark.parametrize(
    ("value", "hint", "text"),
    [
        ((), tuple[int, ...], "[]"),
        ({}, Mapping[Name, int], "{}"),
        (None, Name | None, "none"),
        (True, bool | int, "true"),
        (1, bool | int, "1"),
        (1.5, int | float, "1.5"),
        (((1, 2), (3,)), tuple[tuple[int, ...], ...], "[[1, 2], [3]]"),
        (Formula("(a)"), Formula, "(a)"),
    ],
)
def test_values(value: object, hint: Any, text: str) -> None:
    assert GRAMMAR.render(value, hint) == text
    assert GRAMMAR.parse_value(text, hint) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: expected a statement, found the end of the line"),
        ("3", "line 1, column 1: expected a statement, found '3'"),
        (
            "power(1)",
            "line 1, column 1: expected an op, one of add, loop, neg, two_results, values",
        ),
        ("a = power(1)", "line 1, column 5: expected an op, one of"),
        ("a, b values(1)", "line 1, column 1: expected an op"),
        ("a = two_results(c)", "column 5: expected 2 names before '=' for two_results, not 1"),
        ("values", "line 1, column 7: expected '('"),
        ("values()", "line 1, column 8: expected values's argument number, found ')'"),
        ("values(1.5)", "column 8: expected an integer, found '1.5)'"),
        ("values(1, 2)", "column 11: expected ')': values takes 1 positional arguments"),
        ("values(1 2)", "column 10: expected ',' or ')', found '2)'"),
        ("values(1, real=x)", "column 16: expected a number, found 'x)'"),
        ("values(1, flag=maybe)", "column 16: expected true or false, found 'maybe)'"),
        ("values(1, text=abc)", "column 16: expected a string in double quotes"),
        (r'values(1, text="\q")', "column 16: expected a string in double quotes (Invalid"),
        ("values(1, color=blue)", "column 17: expected one of red, p, found 'blue)'"),
        ("values(1, depth=2)", "column 11: expected a keyword of values, one of real, flag"),
        ("values(1, flag=true, flag=true)", "column 22: expected a keyword of values, one of real"),
        ("values(1, box=Bag([]))", "column 15: expected Box, found 'Bag([]))'"),
        ("values(1, box=Box([Point(1)]))", "column 28: expected 2 items, not 1"),
        (
            "values(1, box=Box([Point(1), Point(2), Point(3)]))",
            "column 38: expected ']' after 2 items",
        ),
        ("values(1, by_name={a 1})", "column 22: expected ':'"),
        ("values(1, size=f(a)", "column 20: expected ',' or ')', found the end of the line"),
        ("values(1, names=[a b])", "column 20: expected ',' or ']', found 'b])'"),
        ("values(1, size=)", "column 16: expected an expression (unbalanced), found ')'"),
        ("a = add(b c)", "column 11: expected the end of the value, found 'c)'"),
        ("a = add(?)", "column 9: expected int or Formula or Point or a name, found '?)'"),
        ("values(1) values(2)", "column 11: expected the end of the line, found 'values(2)'"),
        ("values(1)\nvalues(2)", "line 2, column 1: expected the end of the text"),
        ("loop() {\n  values(1)\n", "line 3, column 1: expected a statement, found the end"),
        ("loop() {\n  values(x)\n}", "line 2, column 10: expected an integer, found 'x)'"),
    ],
)
def test_errors_say_where_and_what(text: str, message: str) -> None:
    with pytest.raises(TextError) as caught:
        GRAMMAR.parse(text)
    assert message in str(caught.value)


def test_two_statements_cannot_share_an_op() -> None:
    @dataclass
    class Neg:
        src: int

    with pytest.raises(TypeError, match="op neg is Apply and Neg"):
        Grammar((Apply, Neg)).parse("neg(1)")


def test_a_value_outside_its_union_is_an_error() -> None:
    with pytest.raises(TypeError, match="is none of"):
        GRAMMAR.render(1.5, int | str)


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True).filter(
    lambda name: name not in ("none", "inf", "nan", "true", "false")
)
points = st.builds(Point, st.integers(), st.integers())
values = st.builds(
    Values,
    number=st.integers(),
    real=st.floats(allow_nan=False),
    flag=st.booleans(),
    text=st.text(),
    color=st.sampled_from(Color),
    box=st.none() | st.builds(Box, st.tuples(points, points), st.none() | st.text()),
    names=st.lists(names).map(tuple),
    by_name=st.dictionaries(names, st.integers()),
)
applies = st.builds(
    Apply,
    names,
    st.sampled_from(["add", "neg"]),
    st.lists(names | st.integers() | points).map(tuple),
    st.text(),
)
statements = st.recursive(
    values | applies | st.builds(TwoResults, names, names, names),
    lambda inner: st.builds(LoopStatement, st.lists(inner, max_size=3).map(tuple), st.integers()),
    max_leaves=6,
)


@given(statements)
def test_whatever_prints_parses_back(statement: object) -> None:
    assert GRAMMAR.parse(GRAMMAR.print(statement)) == statement
