"""The rules of the tile program, checked on a finished kernel.

Every value is defined once, before its use, in a block that is still open; operands have the type
that their statement computes in; tile axes, buffers and index symbols are declared; a value that a
loop carries varies over no more tile axes than it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import final

from meshfuse.base.dtypes import DataType, compute_dtype
from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, free_symbols
from meshfuse.ir.ops import Literal
from meshfuse.ir.pointwise import REDUCTION_FUNCTIONS, SCALAR_FUNCTIONS
from meshfuse.kernel.nodes import (
    Buffer,
    Carry,
    Combine,
    Compute,
    Convert,
    For,
    Kernel,
    KernelOperand,
    Load,
    Mask,
    Reduce,
    Size,
    Statement,
    Store,
    ValueName,
    WelfordReduce,
    WelfordStep,
)


@final
@frozen_dataclass
class ValueFacts:
    """The type a value is held in, and the tile axes it varies over."""

    dtype: DataType
    tiles: frozenset[str]


@final
@dataclass(slots=True, eq=False, repr=False)
class Checker:
    """What is in scope at one place of a kernel: mutable, as statements define values in turn."""

    kernel: Kernel
    tiles: frozenset[str]
    symbols: set[str]
    values: dict[ValueName, ValueFacts]
    ever_defined: set[ValueName] = field(default_factory=set[ValueName])

    def fail(self, statement: object, reason: str) -> InvariantError:
        return InvariantError(f"kernel {self.kernel.name}: {statement}: {reason}")

    def define(self, statement: object, name: ValueName, facts: ValueFacts) -> None:
        if name in self.ever_defined:
            raise self.fail(statement, f"{name} is defined twice")
        self.ever_defined.add(name)
        self.values[name] = facts

    def operand(self, statement: object, operand: KernelOperand) -> ValueFacts:
        if isinstance(operand, Literal):
            return ValueFacts(compute_dtype(operand.dtype), frozenset())
        if operand not in self.values:
            raise self.fail(statement, f"{operand} is not defined here")
        return self.values[operand]

    def typed(self, statement: object, operand: KernelOperand, dtype: DataType) -> ValueFacts:
        """An operand that must be held in `dtype`."""
        facts = self.operand(statement, operand)
        if facts.dtype is not dtype:
            raise self.fail(statement, f"{operand} is {facts.dtype.value}, not {dtype.value}")
        return facts

    def buffer(self, statement: Load | Store) -> Buffer:
        found = next((b for b in self.kernel.buffers if b.name == statement.buffer), None)
        if found is None:
            raise self.fail(statement, f"{statement.buffer} is no buffer")
        if len(statement.index) != len(found.shape):
            raise self.fail(statement, f"{found.name} has {len(found.shape)} axes")
        return found

    def expressions(self, statement: object, *expressions: IntExpr) -> frozenset[str]:
        """The tile axes that integer expressions vary over; their symbols must be known."""
        names = {found.name for e in expressions for found in free_symbols(e)}
        unknown = sorted(names - self.symbols - self.tiles)
        if unknown:
            raise self.fail(statement, f"{', '.join(unknown)} is no size, loop or tile axis here")
        return frozenset(names & self.tiles)

    def mask(self, statement: object, mask: Mask) -> frozenset[str]:
        return self.expressions(statement, *(e for b in mask for e in (b.index, b.limit)))

    def lanes(self, statement: object, tiles: Sequence[str]) -> frozenset[str]:
        """Tile axes named by a statement."""
        unknown = [tile for tile in tiles if tile not in self.tiles]
        if unknown:
            raise self.fail(statement, f"{', '.join(unknown)} is no tile axis")
        return frozenset(tiles)


def verify_kernel(kernel: Kernel) -> None:
    """Raise InvariantError, naming the statement, if a rule is broken."""
    declared = [*kernel.sizes, *(g.name for g in kernel.grid), *(t.name for t in kernel.tiles)]
    names = [*(b.name for b in kernel.buffers), *(s.name for s in kernel.scalars), *declared]
    repeated = sorted({name for name in names if names.count(name) > 1})
    checker = Checker(kernel, frozenset(t.name for t in kernel.tiles), set(kernel.sizes), {})
    if repeated:
        raise checker.fail("arguments", f"{', '.join(repeated)} is declared twice")
    for buffer in kernel.buffers:
        if len(buffer.strides) != len(buffer.shape):
            raise checker.fail(buffer, "one stride for each axis")
        checker.expressions(buffer, *buffer.shape, *buffer.strides)
    for axis in kernel.grid:
        if checker.expressions(axis, axis.extent):
            raise checker.fail(axis, "an extent cannot vary over lanes")
    checker.symbols.update(axis.name for axis in kernel.grid)
    for scalar in kernel.scalars:
        facts = ValueFacts(compute_dtype(scalar.dtype), frozenset())
        checker.define(scalar, scalar.name, facts)
    check_block(kernel.body, checker)


def check_block(body: Sequence[Statement], checker: Checker) -> None:
    for statement in body:
        check_statement(statement, checker)


@singledispatch
def check_statement(statement: object, checker: Checker) -> None:
    """Check one statement and define its outputs."""
    raise checker.fail(statement, "is no statement")


@check_statement.register
def _(statement: Load, checker: Checker) -> None:
    buffer = checker.buffer(statement)
    tiles = checker.expressions(statement, *statement.index)
    tiles |= checker.mask(statement, statement.mask)
    checker.define(statement, statement.out, ValueFacts(compute_dtype(buffer.dtype), tiles))


@check_statement.register
def _(statement: Store, checker: Checker) -> None:
    buffer = checker.buffer(statement)
    if not buffer.written:
        raise checker.fail(statement, f"{buffer.name} is not marked written")
    stored = checker.typed(statement, statement.value, compute_dtype(buffer.dtype))
    where = checker.expressions(statement, *statement.index)
    extra = stored.tiles - where
    if extra:
        raise checker.fail(statement, f"the lanes of {', '.join(sorted(extra))} go to one element")
    checker.mask(statement, statement.mask)


@check_statement.register
def _(statement: Size, checker: Checker) -> None:
    tiles = checker.expressions(statement, statement.value)
    checker.define(statement, statement.out, ValueFacts(DataType.Int, tiles))


@check_statement.register
def _(statement: Compute, checker: Checker) -> None:
    row = SCALAR_FUNCTIONS.get(statement.function)
    if row is None or len(statement.args) != row.arity:
        raise checker.fail(statement, "no such function of so many operands")
    facts = [checker.operand(statement, arg) for arg in statement.args]
    alike = facts
    if statement.function == "where":
        checker.typed(statement, statement.args[0], DataType.Bool)
        alike = facts[1:]
    if len({one.dtype for one in alike}) != 1:
        types = ", ".join(one.dtype.value for one in alike)
        raise checker.fail(statement, f"operands of {types}: convert them to one type first")
    tiles = frozenset[str]().union(*(one.tiles for one in facts))
    checker.define(statement, statement.out, ValueFacts(compute_dtype(statement.dtype), tiles))


@check_statement.register
def _(statement: Convert, checker: Checker) -> None:
    tiles = checker.operand(statement, statement.src).tiles
    checker.define(statement, statement.out, ValueFacts(compute_dtype(statement.dtype), tiles))


@check_statement.register
def _(statement: Combine, checker: Checker) -> None:
    _require_reduction(statement, statement.function, checker)
    accumulator = checker.operand(statement, statement.accumulator)
    src = checker.typed(statement, statement.src, accumulator.dtype)
    tiles = accumulator.tiles | src.tiles | checker.mask(statement, statement.mask)
    checker.define(statement, statement.out, ValueFacts(accumulator.dtype, tiles))


@check_statement.register
def _(statement: Reduce, checker: Checker) -> None:
    _require_reduction(statement, statement.function, checker)
    src = checker.operand(statement, statement.src)
    reduced = checker.lanes(statement, statement.tiles)
    if not reduced <= src.tiles:
        raise checker.fail(statement, f"{statement.src} does not vary over all of {set(reduced)}")
    checker.define(statement, statement.out, ValueFacts(src.dtype, src.tiles - reduced))


def _require_reduction(statement: object, function: str, checker: Checker) -> None:
    if function not in REDUCTION_FUNCTIONS:
        raise checker.fail(statement, "no such reduction")


@check_statement.register
def _(statement: WelfordStep, checker: Checker) -> None:
    mean = checker.operand(statement, statement.old_mean)
    m2 = checker.typed(statement, statement.old_m2, mean.dtype)
    count = checker.typed(statement, statement.old_count, DataType.Int)
    src = checker.typed(statement, statement.src, mean.dtype)
    tiles = src.tiles | checker.mask(statement, statement.mask)
    if (statement.src_m2 is None) != (statement.src_count is None):
        raise checker.fail(statement, "takes the mean alone, or mean, m2 and count")
    if statement.src_m2 is not None and statement.src_count is not None:
        tiles |= checker.typed(statement, statement.src_m2, mean.dtype).tiles
        tiles |= checker.typed(statement, statement.src_count, DataType.Int).tiles
    tiles |= mean.tiles | m2.tiles | count.tiles
    checker.define(statement, statement.mean, ValueFacts(mean.dtype, tiles))
    checker.define(statement, statement.m2, ValueFacts(mean.dtype, tiles))
    checker.define(statement, statement.count, ValueFacts(DataType.Int, tiles))


@check_statement.register
def _(statement: WelfordReduce, checker: Checker) -> None:
    mean = checker.operand(statement, statement.src_mean)
    m2 = checker.typed(statement, statement.src_m2, mean.dtype)
    count = checker.typed(statement, statement.src_count, DataType.Int)
    reduced = checker.lanes(statement, statement.tiles)
    if not reduced <= mean.tiles & m2.tiles & count.tiles:
        raise checker.fail(statement, f"its operands do not vary over all of {set(reduced)}")
    tiles = (mean.tiles | m2.tiles | count.tiles) - reduced
    checker.define(statement, statement.mean, ValueFacts(mean.dtype, tiles))
    checker.define(statement, statement.m2, ValueFacts(mean.dtype, tiles))
    checker.define(statement, statement.count, ValueFacts(DataType.Int, tiles))


@check_statement.register
def _(statement: For, checker: Checker) -> None:
    if checker.expressions(statement.variable, statement.trip):
        raise checker.fail(statement.variable, "a trip count cannot vary over lanes")
    if statement.variable in checker.symbols | checker.tiles:
        raise checker.fail(statement.variable, "is a name that is taken here")
    for carry in statement.carries:
        initial = checker.typed(carry, carry.initial, carry.dtype)
        tiles = checker.lanes(carry, carry.tiles)
        if not initial.tiles <= tiles:
            raise checker.fail(carry, f"{carry.initial} varies over more tile axes")
        checker.define(carry, carry.name, ValueFacts(carry.dtype, tiles))
    outside = dict(checker.values)
    checker.symbols.add(statement.variable)
    check_block(statement.body, checker)
    for carry in statement.carries:
        _check_following(carry, checker)
    checker.symbols.remove(statement.variable)
    checker.values = outside


def _check_following(carry: Carry, checker: Checker) -> None:
    following = checker.typed(carry, carry.following, carry.dtype)
    if not following.tiles <= frozenset(carry.tiles):
        raise checker.fail(carry, f"{carry.following} varies over more tile axes than the carry")
