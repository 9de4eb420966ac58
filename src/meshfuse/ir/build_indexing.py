"""Verbs that pick, place or number elements along one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshfuse.base.dtypes import DataType, compute_dtype
from meshfuse.base.errors import UserError
from meshfuse.base.orders import wrap_dim
from meshfuse.expr import IntExpr, add, const, const_value, known_equal, known_less, minimum, symbol
from meshfuse.ir.axes import AxisKind, ScalarName, TensorName
from meshfuse.ir.build_definitions import literal
from meshfuse.ir.build_pointwise import cast, pointwise
from meshfuse.ir.build_reduction import reduction
from meshfuse.ir.build_shape import broadcast, requested_extent, set_, squeeze
from meshfuse.ir.describe import describe_call
from meshfuse.ir.infer import tensor_shape
from meshfuse.ir.ops import Operand
from meshfuse.ir.ops_indexing import (
    Cat,
    IndexSelect,
    Iota,
    Pad,
    ScalarOperand,
    Scan,
    Slice,
    TakeAlongAxis,
    TopK,
    axis_of,
)
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import append, define, fresh_tensor_name, new_tensor

Size = int | IntExpr | ScalarName


def slice_(
    program: Program,
    src: TensorName,
    starts: Sequence[Size],
    stops: Sequence[Size],
    strides: Sequence[Size] | None = None,
    normalized: bool = False,
) -> tuple[Program, TensorName]:
    """Elements start to stop - 1 of each axis; both end at the axis' extent unless `normalized`.

    Raises UserError for lists of another length than the axes, a negative start, a stop before its
    start, and a stride other than 1; what is known only when run is found then.
    """
    arguments = {"start_indices": list(starts), "end_indices": list(stops)}
    arguments |= {} if strides is None else {"strides": list(strides)}
    call = describe_call(program, "slice", [src], **arguments)
    own = [extent for _, extent in tensor_shape(program, src)]
    steps = [1] * len(own) if strides is None else strides
    if not len(own) == len(starts) == len(stops) == len(steps):
        raise UserError(f"{call}: takes one start, end and stride for each of {len(own)} axes")
    if any(const_value(_integer(step)) != 1 for step in steps):
        raise UserError(f"{call}: strides must be 1")
    first = [_integer(start) for start in starts]
    last = [_integer(stop) for stop in stops]
    for start, stop in zip(first, last, strict=True):
        if known_less(start, const(0)) or known_less(stop, start):
            raise UserError(f"{call}: 0 <= start <= end must hold on each axis")
    if not normalized:
        first = [minimum(start, extent) for start, extent in zip(first, own, strict=True)]
        last = [minimum(stop, extent) for stop, extent in zip(last, own, strict=True)]
    if any(known_less(extent, stop) for extent, stop in zip(own, last, strict=True)):
        raise UserError(
            f"{call}: ends lie beyond the tensor; manual_normalization takes them as is"
        )
    axes = [axis_of(stop - start) for start, stop in zip(first, last, strict=True)]
    program, out = new_tensor(program, program.tensor(src).dtype, axes)
    return append(program, Slice(out, src, tuple(first))), out


def _integer(size: Size) -> IntExpr:
    """A size, or a number that may be negative."""
    match size:
        case IntExpr():
            return size
        case str():
            return symbol(size)
        case _:
            return const(size)


def pad(
    program: Program, src: TensorName, widths: Sequence[Size], value: ScalarOperand
) -> tuple[Program, TensorName]:
    """torch.nn.functional.pad with a constant: (before, after) of the last axis first.

    Negative widths cut off. Raises UserError for an odd number of widths, more than two an axis,
    and sizes that become negative.
    """
    call = describe_call(program, "pad", [src], pad_widths=list(widths))
    own = [extent for _, extent in tensor_shape(program, src)]
    if len(widths) % 2 or len(widths) > 2 * len(own):
        raise UserError(f"{call}: takes pairs of widths, at most one for each of {len(own)} axes")
    pairs = [(_integer(a), _integer(b)) for a, b in zip(widths[::2], widths[1::2], strict=True)]
    sides = [(const(0), const(0))] * (len(own) - len(pairs)) + pairs[::-1]
    extents = [add(extent, *side) for extent, side in zip(own, sides, strict=True)]
    if any(known_less(extent, const(0)) for extent in extents):
        raise UserError(f"{call}: the sizes become [{', '.join(map(str, extents))}]")
    program, out = new_tensor(program, program.tensor(src).dtype, list(map(axis_of, extents)))
    before = tuple(side[0] for side in sides)
    return append(program, Pad(out, src, before, value)), out


def cat(
    program: Program, tensors: Sequence[TensorName], dim: int = 0, padded: bool = False
) -> tuple[Program, TensorName]:
    """One after the other along `dim`; a single tensor is copied.

    If `padded`, each is the result of a pad that brings it to its place. Raises UserError for no
    tensors, other element types, ranks or sizes, and for operands that are not so padded.
    """
    call = describe_call(program, "cat", tensors, dim=dim)
    if not tensors:
        raise UserError(f"{call}: No input tensor given")
    axis = wrap_dim(dim, program.tensor(tensors[0]).ndim, call)
    if padded:
        tensors = _before_padding(program, tensors, axis, call)
    if len(tensors) == 1:
        return set_(program, tensors[0])
    program, out = fresh_tensor_name(program)
    return define(program, Cat(out, axis, tuple(tensors))), out


def _before_padding(
    program: Program, tensors: Sequence[TensorName], axis: int, call: str
) -> list[TensorName]:
    """The tensors that were padded, where that put each behind the one before it."""
    found: list[TensorName] = []
    place: IntExpr = const(0)
    for tensor in tensors:
        expr = program.fusion.definition(tensor)
        if not isinstance(expr, Pad):
            raise UserError(f"{call}: manual_padding wants results of pad; {tensor} is none")
        others = (width for k, width in enumerate(expr.before) if k != axis)
        if not known_equal(expr.before[axis], place) or any(const_value(w) != 0 for w in others):
            raise UserError(f"{call}: {tensor} is not padded to its place, {place}")
        found.append(expr.src)
        place = place + program.tensor(expr.src).tensor_axes[axis].extent
    return found


# Indices.


def index_select(
    program: Program, src: TensorName, index: TensorName, dim: int
) -> tuple[Program, TensorName]:
    """Elements `index` of axis `dim`; an index without axes leaves one of size 1.

    Raises UserError for a 0-dim `src`, for an index with more than one axis (but those of size 1 of
    one that is broadcast to the axes of `src`), and for one without integers.
    """
    call = describe_call(program, "index_select", [src, index], dim=dim)
    axis = wrap_dim(dim, program.tensor(src).ndim, call)
    kinds = [kind for kind, _ in tensor_shape(program, index)]
    if not kinds:
        program, index = broadcast(program, index, [True])
    elif len(kinds) > 1:
        others = [k for k in range(len(kinds)) if k != axis]
        if len(kinds) != program.tensor(src).ndim or any(
            kinds[k] is not AxisKind.broadcast for k in others
        ):
            raise UserError(f"{call}: index must have one axis")
        program, index = squeeze(program, index, others)
    return _select(program, src, index, axis)


def _select(
    program: Program, src: TensorName, index: TensorName, axis: int
) -> tuple[Program, TensorName]:
    program, out = fresh_tensor_name(program)
    size = program.tensor(src).tensor_axes[axis].extent
    expr = IndexSelect(out, src, index, axis, size, _combining(program, src))
    return define(program, expr), out


def _combining(program: Program, src: TensorName) -> str:
    """How the terms of ranks combine of which one is an element of `src` and the others are 0."""
    return "max" if program.tensor(src).dtype is DataType.Bool else "sum"


def take_along_axis(
    program: Program, src: TensorName, index: TensorName, dim: int
) -> tuple[Program, TensorName]:
    """numpy.take_along_axis: axes but `dim` are equal, or of size 1 on one side.

    Raises UserError for other ranks or sizes, and for an index without integers.
    """
    call = describe_call(program, "take_along_axis", [src, index], dim=dim)
    axis = wrap_dim(dim, program.tensor(src).ndim, call)
    program, out = fresh_tensor_name(program)
    size = program.tensor(src).tensor_axes[axis].extent
    expr = TakeAlongAxis(out, src, index, axis, size, _combining(program, src))
    return define(program, expr), out


def embedding(
    program: Program,
    index: TensorName,
    weight: TensorName,
    max_norm: float | None = None,
    norm_type: float = 2.0,
) -> tuple[Program, TensorName]:
    """Rows `index` of `weight` [v, e]; rows longer than `max_norm` are scaled to it.

    Unlike torch's, `weight` itself is not scaled. Raises UserError unless it has two axes.
    """
    call = describe_call(program, "embedding_fwd", [index, weight])
    if program.tensor(weight).ndim != 2:
        raise UserError(f"{call}: weight must have two axes, [v, e]")
    program, rows = _select(program, weight, index, 0)
    return (program, rows) if max_norm is None else _shorten(program, rows, max_norm, norm_type)


def _shorten(
    program: Program, rows: TensorName, max_norm: float, norm_type: float
) -> tuple[Program, TensorName]:
    """Rows on the last axis, those longer than `max_norm` scaled to it, as torch does."""
    dtype = program.tensor(rows).dtype
    wanted = compute_dtype(dtype)
    program, rows = _as_dtype(program, rows, wanted)
    program, norm = _norm(program, rows, norm_type)
    program, is_long = pointwise(program, "gt", [norm, literal(max_norm)])
    program, divisor = pointwise(program, "add", [norm, literal(1e-7)])
    program, shrunk = pointwise(program, "div", [literal(max_norm), divisor])
    program, scale = pointwise(program, "where", [is_long, shrunk, literal(1.0)])
    program, scaled = pointwise(program, "mul", [rows, scale])
    return _as_dtype(program, TensorName(scaled), dtype)


def _as_dtype(program: Program, tensor: TensorName, dtype: DataType) -> tuple[Program, TensorName]:
    """`tensor` itself, where it has that type."""
    same = program.tensor(tensor).dtype is dtype
    return (program, tensor) if same else cast(program, tensor, dtype)


def _norm(program: Program, rows: TensorName, p: float) -> tuple[Program, TensorName]:
    """The p-norm over the last axis, which stays, of size 1."""
    program, size = pointwise(program, "abs", [rows])
    if math.isinf(p):
        return reduction(program, "max" if p > 0 else "min", TensorName(size), [-1], True)
    program, power = pointwise(program, "pow", [size, literal(p)])
    if p == 0:  # how many are not 0, though 0 ** 0 is 1
        program, power = pointwise(program, "gt", [size, literal(0.0)])
    program, total = reduction(program, "sum", TensorName(power), [-1], True)
    if p == 0:
        return cast(program, total, program.tensor(rows).dtype)
    program, root = pointwise(program, "pow", [total, literal(1 / p)])
    return program, TensorName(root)


# Along an axis.


_WITH_INIT = {"cumsum": "add", "cumprod": "mul", "cummax": "maximum", "cummin": "minimum"}


def scan(
    program: Program, function: str, src: TensorName, dim: int, init: Operand | None = None
) -> tuple[Program, TensorName]:
    """Each element combined with all before it, and with `init`; the element type stays.

    Raises UserError for a dim that `src` lacks.
    """
    call = describe_call(program, function, [src], dim=dim)
    axis = wrap_dim(dim, program.tensor(src).ndim, call)
    if tensor_shape(program, src)[axis][0] is AxisKind.broadcast:
        program, out = set_(program, src)
    else:
        program, out = fresh_tensor_name(program)
        program = define(program, Scan(out, function, src, axis))
    if init is None:
        return program, out
    program, combined = pointwise(program, _WITH_INIT[function], [out, init])
    return _as_dtype(program, TensorName(combined), program.tensor(src).dtype)


def topk(
    program: Program,
    src: TensorName,
    k: Size,
    dim: int = -1,
    largest: bool = True,
    is_sorted: bool = False,
) -> tuple[Program, TensorName, TensorName]:
    """The k largest or smallest elements of axis `dim`, and their (Int) indices.

    Raises UserError for a dim that `src` lacks and for a k that is negative or more than there are.
    """
    call = describe_call(program, "topk", [src], k=k, dim=dim)
    axis = wrap_dim(dim, program.tensor(src).ndim, call)
    program, values = fresh_tensor_name(program)
    program, indices = fresh_tensor_name(program)
    expr = TopK(values, indices, src, axis, _integer(k), largest, is_sorted)
    return define(program, expr), values, indices


def iota(
    program: Program,
    length: Size,
    start: ScalarOperand,
    step: ScalarOperand,
    dtype: DataType = DataType.Int,
) -> tuple[Program, TensorName]:
    """start, start + step, ... of the given length. Raises UserError for a negative length."""
    extent = requested_extent(f"iota(length={length})", length)
    program, out = new_tensor(program, dtype, [axis_of(extent)])
    return append(program, Iota(out, start, step)), out
