"""Which axes of what an operation reads and makes are one: index k of one meets index k of another.

Of an expression that follows from its class; of a kernel from how it indexes its arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, const, const_value, free_symbols
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import (
    Broadcast,
    Cast,
    Expand,
    Expr,
    Linear,
    MatMul,
    Permute,
    Pointwise,
    Reduction,
    Set,
    Squeeze,
)
from meshfuse.ir.ops_attention import SdpfaBwd, SdpfaFwd
from meshfuse.ir.ops_indexing import Scan, TopK
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

AxisOf = tuple[TensorName, int]
"""An axis of a tensor."""
Ranks = Callable[[str], int | None]
"""How many axes a tensor has; None for a scalar."""


@final
@frozen_dataclass
class Joint:
    """One axis to an operation: those of operands and of results that it is. Without results it is
    one that is summed over, or reduced in another way.

    `is_single`: there is one place along it. Of several such axes of a kernel it is not known which
    is which, but by their extents.
    """

    read: tuple[AxisOf, ...]
    made: tuple[AxisOf, ...] = ()
    is_single: bool = False


@final
@frozen_dataclass
class Joints:
    """What is known of an operation. Axes of results that are not `met` are its own.

    `sums`: whether all that is reduced is among the joints; else nothing is known of that. Of the
    result of a kernel, what it is made of is `behind` it.
    """

    met: tuple[Joint, ...] = ()
    sums: bool = False
    behind: frozenset[TensorName] = frozenset()


UNKNOWN = Joints()


# Expressions.


@singledispatch
def joints_of(expr: Expr, ranks: Ranks) -> Joints:
    """Those of an expression; nothing is known of one that has no entry here."""
    return UNKNOWN


@joints_of.register(Pointwise)
def _(expr: Pointwise, ranks: Ranks) -> Joints:
    tensors = [TensorName(str(name)) for name in expr.args if ranks(str(name)) is not None]
    return _axis_by_axis(expr.out, tensors, ranks)


@joints_of.register(Cast)
@joints_of.register(Set)
@joints_of.register(Expand)
def _(expr: Cast | Set | Expand, ranks: Ranks) -> Joints:
    return _axis_by_axis(expr.out, [expr.src], ranks)


def _axis_by_axis(out: str, operands: Sequence[TensorName], ranks: Ranks) -> Joints:
    """Operands that align at their last axis."""
    count, made = ranks(out) or 0, TensorName(out)
    found: list[Joint] = []
    for axis in range(count):
        behind = count - axis
        read = tuple((o, (ranks(o) or 0) - behind) for o in operands if (ranks(o) or 0) >= behind)
        found.append(Joint(read, ((made, axis),)))
    return Joints(tuple(found), sums=True)


@joints_of.register
def _(expr: Broadcast, ranks: Ranks) -> Joints:
    kept = [axis for axis, inserted in enumerate(expr.inserted) if not inserted]
    return _one_to_one(expr.src, expr.out, enumerate(kept))


@joints_of.register
def _(expr: Permute, ranks: Ranks) -> Joints:
    return _one_to_one(expr.src, expr.out, ((dim, k) for k, dim in enumerate(expr.dims)))


@joints_of.register
def _(expr: Squeeze, ranks: Ranks) -> Joints:
    kept = [axis for axis in range(ranks(expr.src) or 0) if axis not in expr.dims]
    return _one_to_one(expr.src, expr.out, ((axis, k) for k, axis in enumerate(kept)))


def _one_to_one(src: TensorName, out: TensorName, pairs: Iterable[tuple[int, int]]) -> Joints:
    return Joints(tuple(Joint(((src, a),), ((out, b),)) for a, b in pairs), sums=True)


@joints_of.register
def _(expr: Reduction, ranks: Ranks) -> Joints:
    count = ranks(expr.src) or 0
    kept = [axis for axis in range(count) if axis not in expr.axes]
    found = [Joint(((expr.src, a),), ((expr.out, k),)) for k, a in enumerate(kept)]
    found += [Joint(((expr.src, axis),)) for axis in expr.axes]
    return Joints(tuple(found), sums=len(kept) == ranks(expr.out))


@joints_of.register
def _(expr: MatMul, ranks: Ranks) -> Joints:
    """a [*batch, m, k], b [*batch, k, n] -> [*batch, m, n]; batch axes align at the right."""
    a, b, count = ranks(expr.a) or 0, ranks(expr.b) or 0, ranks(expr.out) or 0
    if a < 2 or b < 2 or count != max(a, b):
        return UNKNOWN
    found = [
        Joint(((expr.a, a - 2),), ((expr.out, count - 2),)),
        Joint(((expr.b, b - 1),), ((expr.out, count - 1),)),
        Joint(((expr.a, a - 1), (expr.b, b - 2))),
    ]
    for behind in range(3, count + 1):
        pairs = [(name, have - behind) for name, have in ((expr.a, a), (expr.b, b))]
        read = tuple((name, axis) for name, axis in pairs if axis >= 0)
        found.append(Joint(read, ((expr.out, count - behind),)))
    return Joints(tuple(found), sums=True)


@joints_of.register
def _(expr: Linear, ranks: Ranks) -> Joints:
    """src [*batch, k], weight [n, k], bias [n] -> [*batch, n]."""
    count = ranks(expr.out) or 0
    if ranks(expr.weight) != 2 or ranks(expr.src) != count:
        return UNKNOWN
    columns = [(expr.weight, 0)] if expr.bias is None else [(expr.weight, 0), (expr.bias, 0)]
    rows = [Joint(((expr.src, axis),), ((expr.out, axis),)) for axis in range(count - 1)]
    met = (*rows, Joint(tuple(columns), ((expr.out, count - 1),)))
    return Joints((*met, Joint(((expr.src, count - 1), (expr.weight, 1)))), sums=True)


@joints_of.register(Scan)
@joints_of.register(TopK)
def _(expr: Scan | TopK, ranks: Ranks) -> Joints:
    outs = [TensorName(out) for out in expr.outs]
    axes = (axis for axis in range(ranks(expr.src) or 0) if axis != expr.axis)
    return Joints(tuple(Joint(((expr.src, a),), tuple((out, a) for out in outs)) for a in axes))


@joints_of.register(SdpfaFwd)
@joints_of.register(SdpfaBwd)
def _(expr: SdpfaFwd | SdpfaBwd, ranks: Ranks) -> Joints:
    """Batch axes and heads."""
    shared = (ranks(expr.query) or 0) - 2

    def axes(names: Iterable[object], axis: int) -> tuple[AxisOf, ...]:
        found = [TensorName(str(name)) for name in names]
        return tuple((name, axis) for name in found if (ranks(name) or 0) > shared)

    pairs = ((axes(expr.ins, axis), axes(expr.outs, axis)) for axis in range(shared))
    return Joints(tuple(Joint(read, made) for read, made in pairs))


# Kernels.


def joints_of_kernel(kernel: Kernel) -> Mapping[BufferName, Joints]:
    """For each buffer that a kernel writes, by the names of its arguments.

    Axes are one that are indexed alike. What a result is made of is reduced along an axis whose
    index has nothing in common with that of the result.
    """
    work = _Reading()
    work.read(kernel.body)
    return {name: _stored(name, *found) for name, found in work.stored.items()}


_Place = tuple[BufferName, tuple[IntExpr, ...]]


_Loads = set[_Place] | None
_Stored = tuple[list[tuple[IntExpr, ...]], _Loads]


@final
@dataclass(slots=True)
class _Reading:
    """`made_of`: the loads behind each value, None where moments are taken. `stored`: where each
    buffer is written, and the loads behind what it gets."""

    made_of: dict[str, _Loads] = field(default_factory=dict[str, _Loads])
    stored: dict[BufferName, _Stored] = field(default_factory=dict[BufferName, _Stored])

    def behind(self, *values: object) -> _Loads:
        found: set[_Place] = set()
        for value in values:
            loads = self.made_of.get(value, set()) if isinstance(value, str) else set[_Place]()
            if loads is None:
                return None
            found |= loads
        return found

    def read(self, body: Iterable[Statement]) -> None:
        for statement in body:
            match statement:
                case Load(out, buffer, index):
                    self.made_of[out] = {(buffer, index)}
                case Store(buffer, index, value):
                    places, loads = self.stored.get(buffer, ([], set[_Place]()))
                    more = self.behind(value)
                    both = None if loads is None or more is None else loads | more
                    self.stored[buffer] = ([*places, index], both)
                case Compute(out, _, _, args):
                    self.made_of[out] = self.behind(*args)
                case Convert(out, _, src) | Reduce(out, _, src):
                    self.made_of[out] = self.behind(src)
                case Combine(out, _, accumulator, src):
                    self.made_of[out] = self.behind(accumulator, src)
                case For(_, _, carries, inside):
                    for carry in carries:
                        self.made_of[carry.name] = self.behind(carry.initial)
                    self.read(inside)
                    for carry in carries:
                        self.made_of[carry.name] = self.behind(carry.initial, carry.following)
                case WelfordStep(mean, m2, count) | WelfordReduce(mean, m2, count):
                    self.made_of.update(dict.fromkeys((mean, m2, count)))
                case Size(out):
                    self.made_of[out] = set()


def _stored(name: BufferName, places: Sequence[tuple[IntExpr, ...]], loads: _Loads) -> Joints:
    """Of a buffer that is written in one place of the text."""
    if len(places) != 1 or loads is None:
        return UNKNOWN
    (index,) = places
    reads: defaultdict[IntExpr, list[AxisOf]] = defaultdict(list)
    for buffer, found in sorted(loads, key=str):
        for axis, expression in enumerate(found):
            if const_value(expression) is None and buffer != name:
                reads[expression].append((TensorName(buffer), axis))
    out = TensorName(name)
    alike = [(buffer, found) for buffer, found in loads if len(found) == len(index)]
    single = [axis for axis, expression in enumerate(index) if expression is const(0)]
    met = [
        Joint(
            tuple((TensorName(b), a) for b, found in alike if found[a] is const(0)),
            ((out, a),),
            True,
        )
        for a in single
    ]
    met += [Joint(tuple(reads[e]), ((out, a),)) for a, e in enumerate(index) if e in reads]
    rest = [expression for expression in reads if expression not in index]
    varying = _symbols(index)
    met += [Joint(tuple(reads[e])) for e in rest if varying.isdisjoint(_symbols([e]))]
    sums = all(varying.isdisjoint(_symbols([e])) for e in rest)
    return Joints(tuple(met), sums, frozenset(TensorName(buffer) for buffer, _ in loads))


def _symbols(expressions: Iterable[IntExpr]) -> set[str]:
    return {found.name for expression in expressions for found in free_symbols(expression)}
