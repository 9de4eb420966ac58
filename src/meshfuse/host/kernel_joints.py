"""Which axes of a kernel's arguments are one: those that it indexes alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, const, const_value, free_symbols
from meshfuse.host.joints import UNKNOWN, AxisOf, Joint, Joints
from meshfuse.ir.axes import TensorName
from meshfuse.kernel.nodes import (
    BufferName,
    Combine,
    Compute,
    Convert,
    For,
    Kernel,
    Load,
    Reduce,
    Size,
    Statement,
    Store,
    WelfordReduce,
    WelfordStep,
)

_Index = tuple[IntExpr, ...]


def joints_of_kernel(kernel: Kernel) -> Mapping[BufferName, Joints]:
    """For each buffer that a kernel writes, by the names of its arguments.

    What a result is made of is reduced along an axis whose index has nothing in common with that of
    the result.
    """
    work = _Reading()
    work.read(kernel.body)
    return {name: _joints(name, stored) for name, stored in work.stored.items()}


@final
@frozen_dataclass
class _Behind:
    """The loads that a value is made of. `is_moment`: or of moments of them."""

    loads: tuple[tuple[BufferName, _Index], ...] = ()
    is_moment: bool = False

    def __or__(self, other: _Behind) -> _Behind:
        loads = tuple(dict.fromkeys((*self.loads, *other.loads)))
        return _Behind(loads, self.is_moment or other.is_moment)


@final
@frozen_dataclass
class _Stored:
    """Where a buffer is written, and what is behind what it gets."""

    places: tuple[_Index, ...] = ()
    behind: _Behind = _Behind()


@final
@dataclass(slots=True, eq=False, repr=False)
class _Reading:
    """What is behind each value, and what has been stored so far."""

    values: dict[str, _Behind] = field(default_factory=dict[str, _Behind])
    stored: dict[BufferName, _Stored] = field(default_factory=dict[BufferName, _Stored])

    def behind(self, *values: object) -> _Behind:
        found = _Behind()
        for value in values:
            if isinstance(value, str):
                found |= self.values.get(value, found)
        return found

    def read(self, body: Iterable[Statement]) -> None:
        for statement in body:
            match statement:
                case Load(out, buffer, index):
                    self.values[out] = _Behind(((buffer, index),))
                case Store():
                    self._store(statement)
                case Compute(out, _, _, args):
                    self.values[out] = self.behind(*args)
                case Convert(out, _, src) | Reduce(out, _, src):
                    self.values[out] = self.behind(src)
                case Combine(out, _, accumulator, src):
                    self.values[out] = self.behind(accumulator, src)
                case For():
                    self._repeat(statement)
                case WelfordStep(mean, m2, count):
                    parts = (statement.src, statement.src_m2, statement.src_count)
                    before = (statement.old_mean, statement.old_m2, statement.old_count)
                    found = self.behind(*parts, *before) | _Behind(is_moment=True)
                    self.values.update(dict.fromkeys((mean, m2, count), found))
                case WelfordReduce(mean, m2, count, src_mean, src_m2, src_count):
                    found = self.behind(src_mean, src_m2, src_count) | _Behind(is_moment=True)
                    self.values.update(dict.fromkeys((mean, m2, count), found))
                case Size(out):
                    self.values[out] = _Behind()

    def _store(self, node: Store) -> None:
        before = self.stored.get(node.buffer, _Stored())
        places = tuple(dict.fromkeys((*before.places, node.index)))
        behind = before.behind | self.behind(node.value)
        self.stored[node.buffer] = _Stored(places, behind)

    def _repeat(self, loop: For) -> None:
        """Twice: what an iteration carries to the next is behind what that makes."""
        for _ in range(2):
            for carry in loop.carries:
                following = self.values.get(carry.following, _Behind())
                self.values[carry.name] = self.behind(carry.initial) | following
            self.read(loop.body)
        for carry in loop.carries:
            self.values[carry.name] = self.behind(carry.initial, carry.following)


def _joints(name: BufferName, stored: _Stored) -> Joints:
    """Of a buffer that is written in one place of the text."""
    if len(stored.places) != 1:
        return UNKNOWN
    (index,), loads = stored.places, stored.behind.loads
    reads: defaultdict[IntExpr, list[AxisOf]] = defaultdict(list)
    for buffer, found in loads:
        for axis, expression in enumerate(found):
            if const_value(expression) is None:
                reads[expression].append((TensorName(buffer), axis))
    made = ((TensorName(name), axis) for axis in range(len(index)))
    kept = [Joint(tuple(reads[e]), (o,)) for e, o in zip(index, made, strict=True) if e in reads]
    rest = [expression for expression in reads if expression not in index]
    varying = _symbols(index)
    apart = [expression for expression in rest if varying.isdisjoint(_symbols([expression]))]
    over = [Joint(tuple(reads[expression])) for expression in apart]
    is_followed = len(apart) == len(rest) and not stored.behind.is_moment
    met = (*kept, *_single(name, index, stored.behind), *over)
    return Joints(met, is_followed, frozenset(TensorName(buffer) for buffer, _ in loads))


def _single(name: BufferName, index: _Index, behind: _Behind) -> Iterator[Joint]:
    """Axes of one place, which stand in the same place of what is read."""
    alike = [(TensorName(b), found) for b, found in behind.loads if len(found) == len(index)]
    for axis, expression in enumerate(index):
        if expression is const(0):
            read = tuple((buffer, axis) for buffer, found in alike if found[axis] is const(0))
            yield Joint(read, ((TensorName(name), axis),), is_single=True)


def _symbols(expressions: Iterable[IntExpr]) -> set[str]:
    return {found.name for expression in expressions for found in free_symbols(expression)}
