"""Expressions that pick, place or number elements along one axis, and what they define.

Torch runs them. Where ranks share the axis that an index runs over, each takes what it holds, and
the results are terms of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, final

from meshfuse.base.dtypes import DataType, is_integral
from meshfuse.base.errors import UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.text import OpNames, Out, Rest
from meshfuse.expr import IntExpr, add, const, const_value, known_equal, known_less
from meshfuse.ir.axes import AxisKind, ScalarName, TensorName
from meshfuse.ir.describe import describe_call
from meshfuse.ir.infer import ONE, AxisShape, Result, infer, meet, meet_extents, tensor_shape
from meshfuse.ir.ops import LibraryExpr, Literal, Operand
from meshfuse.ir.program import Program

ScalarOperand = Literal | ScalarName | IntExpr
"""A constant, a scalar of the program, or an integer in its (global) sizes."""

SCAN_FUNCTIONS: dict[str, str] = {
    "cumsum": "x + y; for bool, or",
    "cumprod": "x * y; for bool, and",
    "cummax": "the larger; NaN wins",
    "cummin": "the smaller; NaN wins",
}
"""What combines the elements up to each."""


@final
@frozen_dataclass
class Slice(LibraryExpr):
    """As many elements as `out` has on each axis of `src`, from `starts` on."""

    out: Out[TensorName]
    src: TensorName
    starts: tuple[IntExpr, ...]

    @property
    def outs(self) -> tuple[TensorName, ...]:
        return (self.out,)

    @property
    def ins(self) -> tuple[Operand, ...]:
        return (self.src, *self.starts)


@final
@frozen_dataclass
class Pad(LibraryExpr):
    """`src` behind `before` elements of `value` on each axis, and before as many as `out` wants.

    Less than none are cut off.
    """

    out: Out[TensorName]
    src: TensorName
    before: tuple[IntExpr, ...]
    value: ScalarOperand

    @property
    def outs(self) -> tuple[TensorName, ...]:
        return (self.out,)

    @property
    def ins(self) -> tuple[Operand, ...]:
        return (self.src, *self.before, self.value)


@final
@frozen_dataclass
class Cat(LibraryExpr):
    """Tensors of one element type one after the other on `axis`; other axes have equal sizes."""

    out: Out[TensorName]
    axis: int
    args: Rest[tuple[TensorName, ...]]

    @property
    def outs(self) -> tuple[TensorName, ...]:
        return (self.out,)

    @property
    def ins(self) -> tuple[Operand, ...]:
        return self.args


class IndexedExpr(LibraryExpr):
    """Abstract: picks elements of `src` by the indices in `index`, on an axis of `size`."""

    __slots__ = ()
    out: Out[TensorName]
    src: TensorName
    index: TensorName
    size: IntExpr

    @property
    def outs(self) -> tuple[TensorName, ...]:
        return (self.out,)

    @property
    def ins(self) -> tuple[Operand, ...]:
        return (self.src, self.index, self.size)


@final
@frozen_dataclass
class IndexSelect(IndexedExpr):
    """numpy.take: `src` [*a, size, *b] at `index` [*c] on its axis: out [*a, *c, *b, reduced size].

    The last axis of `out`, kind reduction, is the indexed one: a sum ("max" of bool) of which
    `index` picks one term. `size` is its (global) extent; an index must lie in [0, size).
    """

    out: Out[TensorName]
    src: TensorName
    index: TensorName
    axis: int
    size: IntExpr
    function: str = "sum"


@final
@frozen_dataclass
class TakeAlongAxis(IndexedExpr):
    """numpy.take_along_axis: out [..., reduced size]; axes but `axis` meet, broadcast ones stretch.

    As for IndexSelect, but an index in [-size, 0) counts from the end.
    """

    out: Out[TensorName]
    src: TensorName
    index: TensorName
    axis: int
    size: IntExpr
    function: str = "sum"


@final
@frozen_dataclass
class Scan(LibraryExpr):
    """Each element combined with all before it on `axis`, by a row of `SCAN_FUNCTIONS`.

    The element type stays; floats of 16 bits accumulate in float32.
    """

    out: Out[TensorName]
    function: Annotated[str, OpNames(SCAN_FUNCTIONS)]
    src: TensorName
    axis: int

    @property
    def outs(self) -> tuple[TensorName, ...]:
        return (self.out,)

    @property
    def ins(self) -> tuple[Operand, ...]:
        return (self.src,)


@final
@frozen_dataclass
class Iota(LibraryExpr):
    """start + k * step at index k of the one axis of `out`, rounded once."""

    out: Out[TensorName]
    start: ScalarOperand
    step: ScalarOperand

    @property
    def outs(self) -> tuple[TensorName, ...]:
        return (self.out,)

    @property
    def ins(self) -> tuple[Operand, ...]:
        return (self.start, self.step)


@final
@frozen_dataclass
class TopK(LibraryExpr):
    """The `k` largest (or smallest) elements on `axis`, and their indices. NaN is the largest.

    Without `sorted` they stand in any order.
    """

    values: Out[TensorName]
    indices: Out[TensorName]
    src: TensorName
    axis: int
    k: IntExpr
    largest: bool = True
    sorted: bool = False

    @property
    def outs(self) -> tuple[TensorName, ...]:
        return (self.values, self.indices)

    @property
    def ins(self) -> tuple[Operand, ...]:
        return (self.src, self.k)


def axis_of(extent: IntExpr) -> AxisShape:
    """A tensor axis of this extent."""
    return ONE if const_value(extent) == 1 else (AxisKind.iteration, extent)


def is_whole(program: Program, expr: Slice | Pad, axis: int) -> bool:
    """Whether `axis` is as it was."""
    shifts = expr.starts if isinstance(expr, Slice) else expr.before
    had, has = (program.tensor(name).tensor_axes[axis].extent for name in (expr.src, expr.out))
    return const_value(shifts[axis]) == 0 and known_equal(had, has)


# What each defines.


@infer.register(Slice)
@infer.register(Pad)
def _(expr: Slice | Pad, program: Program) -> tuple[Result, ...]:
    """The sizes are those that `out` says."""
    src, out = tensor_shape(program, expr.src), tensor_shape(program, expr.out)
    shifts = expr.starts if isinstance(expr, Slice) else expr.before
    if not len(src) == len(out) == len(shifts):
        name = type(expr).__name__.lower()
        raise UserError(f"{name} of {len(src)} axes by {len(shifts)} numbers to {len(out)} axes")
    return (Result(program.tensor(expr.src).dtype, out),)


@infer.register
def _(expr: Cat, program: Program) -> tuple[Result, ...]:
    call = describe_call(program, "cat", expr.args, dim=expr.axis)
    shapes = [tensor_shape(program, tensor) for tensor in expr.args]
    dtypes = {program.tensor(tensor).dtype for tensor in expr.args}
    if len(dtypes) > 1:
        raise UserError(f"{call}: operands must have one element type; cast some of them")
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        raise UserError(f"{call}: operands must have equally many axes")
    axes = [_one_size(call, column) for column in zip(*_without(shapes, expr.axis), strict=True)]
    joined = add(*(shape[expr.axis][1] for shape in shapes))
    return (Result(dtypes.pop(), (*axes[: expr.axis], axis_of(joined), *axes[expr.axis :])),)


def _without(shapes: Sequence[Sequence[AxisShape]], axis: int) -> list[tuple[AxisShape, ...]]:
    return [(*shape[:axis], *shape[axis + 1 :]) for shape in shapes]


def _one_size(call: str, axes: Sequence[AxisShape]) -> AxisShape:
    """An axis that does not stretch."""
    extent = meet_extents(call, *(extent for _, extent in axes))
    return ONE if ONE in axes else (AxisKind.iteration, extent)


@infer.register
def _(expr: IndexSelect, program: Program) -> tuple[Result, ...]:
    src, index = tensor_shape(program, expr.src), tensor_shape(program, expr.index)
    reduced = _indexed_axis(program, expr)
    axes = (*src[: expr.axis], *index, *src[expr.axis + 1 :], reduced)
    return (Result(program.tensor(expr.src).dtype, axes),)


@infer.register
def _(expr: TakeAlongAxis, program: Program) -> tuple[Result, ...]:
    call = _indexing_call(program, expr)
    src, index = tensor_shape(program, expr.src), tensor_shape(program, expr.index)
    if len(src) != len(index):
        raise UserError(f"{call}: index must have as many axes as the tensor")
    pairs = enumerate(zip(src, index, strict=True))
    axes = (own if k == expr.axis else meet(call, had, own) for k, (had, own) in pairs)
    return (Result(program.tensor(expr.src).dtype, (*axes, _indexed_axis(program, expr))),)


def _indexed_axis(program: Program, expr: IndexSelect | TakeAlongAxis) -> AxisShape:
    call = _indexing_call(program, expr)
    if not is_integral(program.tensor(expr.index).dtype):
        raise UserError(f"{call}: index must have integers; cast it to Int")
    extent = tensor_shape(program, expr.src)[expr.axis][1]
    return AxisKind.reduction, meet_extents(call, extent, expr.size)


def _indexing_call(program: Program, expr: IndexSelect | TakeAlongAxis) -> str:
    name = "index_select" if isinstance(expr, IndexSelect) else "take_along_axis"
    return describe_call(program, name, [expr.src, expr.index], dim=expr.axis)


@infer.register
def _(expr: Scan, program: Program) -> tuple[Result, ...]:
    return (Result(program.tensor(expr.src).dtype, tensor_shape(program, expr.src)),)


@infer.register
def _(expr: Iota, program: Program) -> tuple[Result, ...]:
    """The size is the one that `out` says."""
    shape = tensor_shape(program, expr.out)
    if len(shape) != 1:
        raise UserError(f"iota of {len(shape)} axes: it has one")
    return (Result(program.tensor(expr.out).dtype, shape),)


@infer.register
def _(expr: TopK, program: Program) -> tuple[Result, ...]:
    shape = tensor_shape(program, expr.src)
    if known_less(shape[expr.axis][1], expr.k) or known_less(expr.k, const(0)):
        call = describe_call(program, "topk", [expr.src], k=expr.k, dim=expr.axis)
        raise UserError(f"{call}: k must lie in [0, {shape[expr.axis][1]}]")
    axes = (*shape[: expr.axis], axis_of(expr.k), *shape[expr.axis + 1 :])
    return (Result(program.tensor(expr.src).dtype, axes), Result(DataType.Int, axes))
