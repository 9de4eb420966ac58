"""Which axes of what an operation reads and makes are one: index k of one meets index k of another.

Of an expression that follows from its class; of a kernel see kernel_joints.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import singledispatch
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, const, known_equal
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
    Welford,
)
from meshfuse.ir.ops_attention import SdpfaBwd, SdpfaFwd
from meshfuse.ir.ops_indexing import Cat, Pad, Scan, Slice, TopK

AxisOf = tuple[TensorName, int]
"""An axis of a tensor."""
Extents = Callable[[str], Sequence[IntExpr]]
"""The global sizes of a tensor's axes; () for a scalar."""


@final
@frozen_dataclass
class Joint:
    """One axis to an operation: those of operands and of results that it is. Without results it is
    one that is summed over, or reduced in another way.

    `is_single`: there is one place along it. Of several such axes of a kernel it is not known which
    is which, but by the extents that the result is known to have.
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
def joints_of(expr: Expr, extents: Extents) -> Joints:
    """Those of an expression; nothing is known of one that has no entry here."""
    return UNKNOWN


@joints_of.register(Pointwise)
def _(expr: Pointwise, extents: Extents) -> Joints:
    tensors = [TensorName(str(name)) for name in expr.args if extents(str(name))]
    return _axis_by_axis(expr.out, tensors, extents)


@joints_of.register(Cast)
@joints_of.register(Set)
@joints_of.register(Expand)
def _(expr: Cast | Set | Expand, extents: Extents) -> Joints:
    return _axis_by_axis(expr.out, [expr.src], extents)


def _axis_by_axis(out: str, operands: Sequence[TensorName], extents: Extents) -> Joints:
    """Operands that align at their last axis."""
    count, made = len(extents(out)), TensorName(out)
    found: list[Joint] = []
    for axis in range(count):
        behind = count - axis
        read = tuple((o, len(extents(o)) - behind) for o in operands if len(extents(o)) >= behind)
        found.append(Joint(read, ((made, axis),)))
    return Joints(tuple(found), sums=True)


@joints_of.register
def _(expr: Broadcast, extents: Extents) -> Joints:
    kept = [axis for axis, inserted in enumerate(expr.inserted) if not inserted]
    return _one_to_one(expr.src, expr.out, enumerate(kept))


@joints_of.register
def _(expr: Permute, extents: Extents) -> Joints:
    return _one_to_one(expr.src, expr.out, ((dim, k) for k, dim in enumerate(expr.dims)))


@joints_of.register
def _(expr: Squeeze, extents: Extents) -> Joints:
    kept = [axis for axis in range(len(extents(expr.src))) if axis not in expr.dims]
    return _one_to_one(expr.src, expr.out, ((axis, k) for k, axis in enumerate(kept)))


def _one_to_one(src: TensorName, out: TensorName, pairs: Iterable[tuple[int, int]]) -> Joints:
    return Joints(tuple(Joint(((src, a),), ((out, b),)) for a, b in pairs), sums=True)


@joints_of.register
def _(expr: Reduction, extents: Extents) -> Joints:
    count = len(extents(expr.src))
    kept = [axis for axis in range(count) if axis not in expr.axes]
    found = [Joint(((expr.src, a),), ((expr.out, k),)) for k, a in enumerate(kept)]
    found += [Joint(((expr.src, axis),)) for axis in expr.axes]
    return Joints(tuple(found), sums=len(kept) == len(extents(expr.out)))


@joints_of.register
def _(expr: Welford, extents: Extents) -> Joints:
    """Of what moments are taken of is not followed."""
    kept = [axis for axis in range(len(extents(expr.src))) if axis not in expr.axes]
    read = [TensorName(str(name)) for name in expr.ins]
    found = (
        Joint(tuple((name, a) for name in read), tuple((TensorName(o), k) for o in expr.outs))
        for k, a in enumerate(kept)
    )
    return Joints(tuple(found))


@joints_of.register
def _(expr: MatMul, extents: Extents) -> Joints:
    """a [*batch, m, k], b [*batch, k, n] -> [*batch, m, n]; batch axes align at the right."""
    a, b, count = len(extents(expr.a)), len(extents(expr.b)), len(extents(expr.out))
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
def _(expr: Linear, extents: Extents) -> Joints:
    """src [*batch, k], weight [n, k], bias [n] -> [*batch, n]."""
    count = len(extents(expr.out))
    if len(extents(expr.weight)) != 2 or len(extents(expr.src)) != count:
        return UNKNOWN
    columns = [(expr.weight, 0)] if expr.bias is None else [(expr.weight, 0), (expr.bias, 0)]
    rows = [Joint(((expr.src, axis),), ((expr.out, axis),)) for axis in range(count - 1)]
    met = (*rows, Joint(tuple(columns), ((expr.out, count - 1),)))
    return Joints((*met, Joint(((expr.src, count - 1), (expr.weight, 1)))), sums=True)


@joints_of.register(Cat)
@joints_of.register(Scan)
@joints_of.register(TopK)
def _(expr: Cat | Scan | TopK, extents: Extents) -> Joints:
    """All axes but that along which it works."""
    read = [TensorName(str(name)) for name in expr.ins if isinstance(name, str)]
    outs = [TensorName(out) for out in expr.outs]
    axes = (axis for axis in range(len(extents(outs[0]))) if axis != expr.axis)
    return Joints(
        tuple(Joint(tuple((r, a) for r in read), tuple((o, a) for o in outs)) for a in axes)
    )


@joints_of.register(Slice)
@joints_of.register(Pad)
def _(expr: Slice | Pad, extents: Extents) -> Joints:
    """All axes that stay as they are."""
    shifts = expr.starts if isinstance(expr, Slice) else expr.before
    sizes = zip(shifts, extents(expr.src), extents(expr.out), strict=True)
    kept = (k for k, (by, had, has) in enumerate(sizes) if by is const(0) and known_equal(had, has))
    return _one_to_one(expr.src, expr.out, ((axis, axis) for axis in kept))


@joints_of.register(SdpfaFwd)
@joints_of.register(SdpfaBwd)
def _(expr: SdpfaFwd | SdpfaBwd, extents: Extents) -> Joints:
    """Batch axes and heads."""
    shared = len(extents(expr.query)) - 2

    def axes(names: Iterable[object], axis: int) -> tuple[AxisOf, ...]:
        found = [TensorName(str(name)) for name in names]
        return tuple((name, axis) for name in found if len(extents(name)) > shared)

    pairs = ((axes(expr.ins, axis), axes(expr.outs, axis)) for axis in range(shared))
    return Joints(tuple(Joint(read, made) for read, made in pairs))
