"""Interned, immutable nodes of integer expressions, each with its range and known divisor.

Equal structure is the same object, so `is`, `==` and hashing by identity all compare structure.
Symbols are equal when name and facts are equal: the same name with other facts is another symbol.

The classes only intern and derive facts. Calling one does not simplify: write expressions with
operators or with the functions of simplify.py, which keep this normal form:

    Add  constant + sum of coefficient * term; a term is an atom or a Mul of coefficient 1
    Mul  coefficient * product of atoms; an atom is a Symbol, FloorDiv, Mod, Min or Max
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from hashlib import blake2b
from itertools import groupby
from math import gcd
from threading import Lock
from typing import Any, ClassVar, Final, TypeVar, cast, final
from weakref import WeakValueDictionary

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import intervals
from meshfuse.expr.intervals import Interval


class IntExpr(ABC):
    """An integer expression over symbols.

    low, high: inclusive bounds of the value, None if unbounded.
    divisor: the largest known integer that divides every value; 0 for the constant 0.
    order: sort key, the same in every process.
    has_division: the node is a FloorDiv or a Mod, or a product with one.
    """

    __slots__ = ("__weakref__", "divisor", "has_division", "high", "low", "order")

    low: int | None
    high: int | None
    divisor: int
    order: tuple[int, str]
    has_division: bool

    # Set once, by expr/__init__.py: operators build through simplify.py, which imports this file.
    algebra: ClassVar[Algebra]

    @property
    @abstractmethod
    def operands(self) -> tuple[IntExpr, ...]:
        """The nodes that this one is made of."""

    @abstractmethod
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy through the constructor, so that a copy is the interned node."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot set {name}")

    def __bool__(self) -> bool:
        raise TypeError(
            f"the truth value of {self!r} is unknown: compare with known_equal, known_less or `is`"
        )

    def __repr__(self) -> str:
        return self.algebra.render(self)

    def __add__(self, other: IntLike) -> IntExpr:
        return self.algebra.add(self, other)

    def __radd__(self, other: int) -> IntExpr:
        return self.algebra.add(other, self)

    def __sub__(self, other: IntLike) -> IntExpr:
        return self.algebra.add(self, self.algebra.mul(-1, other))

    def __rsub__(self, other: int) -> IntExpr:
        return self.algebra.add(other, self.algebra.mul(-1, self))

    def __neg__(self) -> IntExpr:
        return self.algebra.mul(-1, self)

    def __mul__(self, other: IntLike) -> IntExpr:
        return self.algebra.mul(self, other)

    def __rmul__(self, other: int) -> IntExpr:
        return self.algebra.mul(other, self)

    def __floordiv__(self, other: IntLike) -> IntExpr:
        return self.algebra.floordiv(self, other)

    def __rfloordiv__(self, other: int) -> IntExpr:
        return self.algebra.floordiv(other, self)

    def __mod__(self, other: IntLike) -> IntExpr:
        return self.algebra.mod(self, other)

    def __rmod__(self, other: int) -> IntExpr:
        return self.algebra.mod(other, self)


IntLike = int | IntExpr


@final
@frozen_dataclass
class Algebra:
    """The simplifying constructors and the printer behind IntExpr's operators and repr."""

    add: Callable[[IntLike, IntLike], IntExpr]
    mul: Callable[[IntLike, IntLike], IntExpr]
    floordiv: Callable[[IntLike, IntLike], IntExpr]
    mod: Callable[[IntLike, IntLike], IntExpr]
    render: Callable[[IntExpr], str]


@final
class Const(IntExpr):
    """An integer."""

    __slots__ = ("value",)
    value: int

    def __new__(cls, value: int) -> Const:
        key = (cls, value)
        if (found := _TABLE.get(key)) is not None:
            return cast(Const, found)
        node = object.__new__(cls)
        _set(node, "value", value)
        _set_facts(node, (value, value), abs(value), (0, str(value)))
        return _intern(key, node)

    @property
    def operands(self) -> tuple[IntExpr, ...]:
        return ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Const, (self.value,)


@final
class Symbol(IntExpr):
    """A named integer in [low, high] that is a multiple of `multiple`.

    The bounds are tightened to multiples before interning. Raises ValueError for a name that is no
    (dotted) identifier, a multiple below 1, or a range without a value.
    """

    __slots__ = ("multiple", "name")
    name: str
    multiple: int

    def __new__(cls, name: str, low: int | None, high: int | None, multiple: int) -> Symbol:
        if multiple < 1:
            raise ValueError(f"symbol({name!r}, multiple={multiple}): multiple must be at least 1")
        low, high = _tighten((low, high), multiple)
        key = (cls, name, low, high, multiple)
        if (found := _TABLE.get(key)) is not None:
            return cast(Symbol, found)
        if not _NAME.fullmatch(name) or name in ("min", "max"):
            raise ValueError(f"symbol({name!r}): a name is an identifier, not min or max")
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"symbol({name!r}, low={low}, high={high}, multiple={multiple}): no such integer"
            )
        node = object.__new__(cls)
        _set(node, "name", name)
        _set(node, "multiple", multiple)
        order = (-1, f"{_sortable(name)}[{low},{high},{multiple}]")
        _set_facts(node, (low, high), multiple, order)
        return _intern(key, node)

    @property
    def operands(self) -> tuple[IntExpr, ...]:
        return ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Symbol, (self.name, self.low, self.high, self.multiple)


@final
class Add(IntExpr):
    """constant + sum of coefficient * term, terms distinct and sorted, at least two addends."""

    __slots__ = ("constant", "terms")
    constant: int
    terms: tuple[tuple[IntExpr, int], ...]

    def __new__(cls, constant: int, terms: tuple[tuple[IntExpr, int], ...]) -> Add:
        key = (cls, constant, terms)
        if (found := _TABLE.get(key)) is not None:
            return cast(Add, found)
        node = object.__new__(cls)
        _set(node, "constant", constant)
        _set(node, "terms", terms)
        interval: Interval = (constant, constant)
        divisor = abs(constant)
        for term, coefficient in terms:
            scaled = intervals.scale((term.low, term.high), coefficient)
            interval = intervals.add(interval, scaled)
            divisor = gcd(divisor, coefficient * term.divisor)
        text = ",".join(f"{coefficient}*{term.order[1]}" for term, coefficient in terms)
        _set_facts(node, interval, divisor, (0, _digest(f"+({constant},{text})")))
        return _intern(key, node)

    @property
    def operands(self) -> tuple[IntExpr, ...]:
        return tuple(term for term, _ in self.terms)

    def __reduce__(self) -> tuple[Any, ...]:
        return Add, (self.constant, self.terms)


@final
class Mul(IntExpr):
    """coefficient * product of sorted atoms: two atoms or more, or one and a coefficient not 1."""

    __slots__ = ("coefficient", "factors")
    coefficient: int
    factors: tuple[IntExpr, ...]

    def __new__(cls, coefficient: int, factors: tuple[IntExpr, ...]) -> Mul:
        key = (cls, coefficient, factors)
        if (found := _TABLE.get(key)) is not None:
            return cast(Mul, found)
        node = object.__new__(cls)
        _set(node, "coefficient", coefficient)
        _set(node, "factors", factors)
        interval: Interval = (coefficient, coefficient)
        divisor = abs(coefficient)
        for factor, group in groupby(factors):
            exponent = sum(1 for _ in group)
            power = intervals.power((factor.low, factor.high), exponent)
            interval = intervals.multiply(interval, power)
            divisor *= factor.divisor**exponent
        text = ",".join(factor.order[1] for factor in factors)
        order = (-len(factors), _digest(f"*({coefficient},{text})"))
        _set_facts(node, interval, divisor, order, any(f.has_division for f in factors))
        return _intern(key, node)

    @property
    def operands(self) -> tuple[IntExpr, ...]:
        return self.factors

    def __reduce__(self) -> tuple[Any, ...]:
        return Mul, (self.coefficient, self.factors)


@final
class FloorDiv(IntExpr):
    """numerator // denominator, rounded towards minus infinity."""

    __slots__ = ("denominator", "numerator")
    numerator: IntExpr
    denominator: IntExpr

    def __new__(cls, numerator: IntExpr, denominator: IntExpr) -> FloorDiv:
        key = (cls, numerator, denominator)
        if (found := _TABLE.get(key)) is not None:
            return cast(FloorDiv, found)
        node = object.__new__(cls)
        _set(node, "numerator", numerator)
        _set(node, "denominator", denominator)
        interval = intervals.floordiv(
            (numerator.low, numerator.high), (denominator.low, denominator.high)
        )
        divisor = 1
        if isinstance(denominator, Const) and numerator.divisor % denominator.value == 0:
            divisor = numerator.divisor // abs(denominator.value)
        order = (-1, _digest(f"~/({numerator.order[1]},{denominator.order[1]})"))
        _set_facts(node, interval, divisor, order, has_division=True)
        return _intern(key, node)

    @property
    def operands(self) -> tuple[IntExpr, ...]:
        return self.numerator, self.denominator

    def __reduce__(self) -> tuple[Any, ...]:
        return FloorDiv, (self.numerator, self.denominator)


@final
class Mod(IntExpr):
    """numerator % denominator, with the sign of the denominator."""

    __slots__ = ("denominator", "numerator")
    numerator: IntExpr
    denominator: IntExpr

    def __new__(cls, numerator: IntExpr, denominator: IntExpr) -> Mod:
        key = (cls, numerator, denominator)
        if (found := _TABLE.get(key)) is not None:
            return cast(Mod, found)
        node = object.__new__(cls)
        _set(node, "numerator", numerator)
        _set(node, "denominator", denominator)
        interval = intervals.mod(
            (numerator.low, numerator.high), (denominator.low, denominator.high)
        )
        divisor = gcd(numerator.divisor, denominator.divisor)
        order = (-1, _digest(f"~%({numerator.order[1]},{denominator.order[1]})"))
        _set_facts(node, interval, divisor, order, has_division=True)
        return _intern(key, node)

    @property
    def operands(self) -> tuple[IntExpr, ...]:
        return self.numerator, self.denominator

    def __reduce__(self) -> tuple[Any, ...]:
        return Mod, (self.numerator, self.denominator)


@final
class Min(IntExpr):
    """The smallest of two or more sorted operands."""

    __slots__ = ("_operands",)
    _operands: tuple[IntExpr, ...]

    def __new__(cls, *operands: IntExpr) -> Min:
        key = (cls, *operands)
        if (found := _TABLE.get(key)) is not None:
            return cast(Min, found)
        node = object.__new__(cls)
        _set(node, "_operands", operands)
        _set_extremum_facts(node, "min", operands, intervals.minimum)
        return _intern(key, node)

    @property
    def operands(self) -> tuple[IntExpr, ...]:
        return self._operands

    def __reduce__(self) -> tuple[Any, ...]:
        return Min, self._operands


@final
class Max(IntExpr):
    """The largest of two or more sorted operands."""

    __slots__ = ("_operands",)
    _operands: tuple[IntExpr, ...]

    def __new__(cls, *operands: IntExpr) -> Max:
        key = (cls, *operands)
        if (found := _TABLE.get(key)) is not None:
            return cast(Max, found)
        node = object.__new__(cls)
        _set(node, "_operands", operands)
        _set_extremum_facts(node, "max", operands, intervals.maximum)
        return _intern(key, node)

    @property
    def operands(self) -> tuple[IntExpr, ...]:
        return self._operands

    def __reduce__(self) -> tuple[Any, ...]:
        return Max, self._operands


# Weak, so that a long-lived process does not keep the expressions of every program it compiled.
_TABLE: WeakValueDictionary[tuple[object, ...], IntExpr] = WeakValueDictionary()
_LOCK = Lock()
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)
_DIGITS = re.compile(r"\d+")
_LONGEST_ORDER_TEXT = 512

MEMO_SIZE: Final = 8192
"""Results that each simplifying constructor remembers, most recently used.

A rewrite of a division takes tens of microseconds, and compiling asks for the same few expressions
over and over: kernels alike, a program verified after every pass. Bounded, for the reason above.
"""

_Node = TypeVar("_Node", bound=IntExpr)
_set = object.__setattr__


def _intern(key: tuple[object, ...], node: _Node) -> _Node:
    """Enter a new node, or return the one that another thread entered first."""
    with _LOCK:
        return cast(_Node, _TABLE.setdefault(key, node))


def _set_facts(
    node: IntExpr,
    interval: Interval,
    divisor: int,
    order: tuple[int, str],
    has_division: bool = False,
) -> None:
    low, high = _tighten(interval, divisor)
    _set(node, "low", low)
    _set(node, "high", high)
    _set(node, "divisor", divisor)
    _set(node, "order", order)
    _set(node, "has_division", has_division)


def _set_extremum_facts(
    node: IntExpr,
    name: str,
    operands: tuple[IntExpr, ...],
    combine: Callable[[Interval, Interval], Interval],
) -> None:
    interval: Interval = (operands[0].low, operands[0].high)
    for operand in operands[1:]:
        interval = combine(interval, (operand.low, operand.high))
    text = ",".join(operand.order[1] for operand in operands)
    order = (-1, _digest(f"{name}({text})"))
    _set_facts(node, interval, gcd(*(operand.divisor for operand in operands)), order)


def _tighten(interval: Interval, divisor: int) -> Interval:
    """Move the bounds inwards to multiples of the divisor."""
    low, high = interval
    if divisor > 1:
        low = None if low is None else low + -low % divisor
        high = None if high is None else high - high % divisor
    return low, high


def _sortable(name: str) -> str:
    """Prefix each number with its length, so that i2 sorts before i10."""
    return _DIGITS.sub(lambda match: f"{len(match[0]):02d}{match[0]}", name)


def _digest(text: str) -> str:
    """Bound the sort key of a node, which would double with each level of sharing."""
    if len(text) <= _LONGEST_ORDER_TEXT:
        return text
    return f"~#{blake2b(text.encode(), digest_size=32).hexdigest()}"
