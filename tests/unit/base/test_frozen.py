"""frozen_dataclass: what `dataclass(frozen=True, slots=True)` gives, and refusals of the rest."""

from __future__ import annotations

import copy
import inspect
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from meshfuse.base.frozen import frozen_dataclass


@frozen_dataclass
class Point:
    """Two plain fields, one with a default."""

    x: float
    name: str = "p"


@dataclass(frozen=True, slots=True)
class PlainPoint:
    """As Point, by the standard library."""

    x: float
    name: str = "p"


@frozen_dataclass
class Table:
    """A field that is made anew for each value."""

    rows: Mapping[str, int] = field(default_factory=dict[str, int])


@frozen_dataclass
class Nothing:
    """No field."""


class Named(ABC):
    __slots__ = ()

    @abstractmethod
    def title(self) -> str: ...


@frozen_dataclass
class Word(Named):
    """One field, methods of its own, and a method that a base demands."""

    text: str

    def title(self) -> str:
        return self.text.title()

    def __repr__(self) -> str:
        return f"<{self.text}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Word) and self.text.lower() == other.text.lower()

    def __hash__(self) -> int:
        return hash(self.text.lower())


@frozen_dataclass
class Half(Named):
    """Leaves the method of its base out."""


def test_values_are_equal_and_hash_by_their_fields() -> None:
    assert Point(1.0) == Point(1, "p") and hash(Point(1.0)) == hash(Point(1, "p"))
    assert Point(1.0) != Point(1.0, "q") and Point(1.0) != PlainPoint(1.0)
    assert Nothing() == Nothing() and hash(Nothing()) == hash(Nothing())
    assert {Point(1.0), Point(1.0), Point(2.0)} == {Point(2.0), Point(1.0)}


def test_elements_are_compared_as_in_tuples() -> None:
    """NaN is no NaN but itself."""
    nan = float("nan")
    assert Point(nan) == Point(nan) and Point(nan) != Point(float("nan"))
    assert Table({"a": 1}) == Table({"a": 1}) and Table({"a": 1}) != Table()
    with pytest.raises(TypeError, match="unhashable"):
        hash(Table())


def test_values_are_shown_as_dataclasses_are() -> None:
    assert repr(Point(1.5)) == repr(PlainPoint(1.5)).replace("Plain", "")
    assert repr(Nothing()) == "Nothing()"


def test_what_a_class_defines_stays() -> None:
    assert repr(Word("Tea")) == "<Tea>"


def test_pretty_printers_take_the_repr_as_it_is() -> None:
    texts: list[str] = []
    values: list[Any] = [Table({"x": 1}), Word("Tea")]
    for value in values:
        value._repr_pretty_(SimpleNamespace(text=texts.append), False)
    assert texts == ["Table(rows={'x': 1})", "<Tea>"]
    assert Word("Tea") == Word("tea") and hash(Word("Tea")) == hash(Word("tea"))
    assert Word("tea").title() == "Tea"


def test_abstract_methods_stay_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Half()  # pyright: ignore[reportAbstractUsage]


def test_values_cannot_be_changed() -> None:
    point = Point(1.0)
    for name in ("x", "other"):
        with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(point, name, 2.0)
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
        delattr(point, "x")
    assert point.x == 1.0 and not hasattr(point, "__dict__")


def test_arguments_are_checked_and_named() -> None:
    with pytest.raises(TypeError, match=r"Point\.__init__\(\) missing 1 required"):
        Point()  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        Point(1.0, y=2)  # pyright: ignore[reportCallIssue]
    assert Point(name="q", x=2.0) == Point(2.0, "q")
    assert list(inspect.signature(Point).parameters) == ["x", "name"]


def test_factories_make_a_default_for_each_value() -> None:
    assert Table().rows == {} and Table().rows is not Table().rows
    assert Table({"a": 1}).rows == {"a": 1}


def test_the_functions_of_dataclasses_and_patterns_take_values() -> None:
    assert replace(Point(1.0), name="q") == Point(1.0, "q")
    assert [f.name for f in fields(Point)] == ["x", "name"]
    match Point(3.0, "r"):
        case Point(x, name):
            assert (x, name) == (3.0, "r")


def test_copies_and_pickles_are_equal() -> None:
    for value in (Point(1.0, "q"), Table({"a": 1}), Nothing(), Word("Tea")):
        assert copy.copy(value) == value and copy.deepcopy(value) == value
        assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize("option", ["init", "repr", "compare", "hash"])
def test_fields_that_leave_a_method_are_refused(option: str) -> None:
    options: dict[str, Any] = {option: False}
    namespace = {"__annotations__": {"odd": "int"}, "odd": field(**options)}
    with pytest.raises(TypeError, match="'odd'"):
        frozen_dataclass(type("Odd", (), namespace))


def test_post_init_is_refused() -> None:
    with pytest.raises(TypeError, match="needs dataclass"):
        frozen_dataclass(type("Odd", (), {"__post_init__": lambda self: None}))
