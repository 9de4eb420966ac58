"""Verbs that reduce axes of one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from meshfuse.base.dtypes import DataType, compute_dtype, is_floating
from meshfuse.base.errors import UserError
from meshfuse.base.orders import wrap_dims
from meshfuse.expr import IntExpr, const, maximum, mul
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.build_pointwise import cast, pointwise
from meshfuse.ir.build_shape import broadcast, set_, squeeze
from meshfuse.ir.describe import describe_call
from meshfuse.ir.infer import reduction_dtype
from meshfuse.ir.ops import Reduction, Welford
from meshfuse.ir.pointwise import REDUCTION_FUNCTIONS
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import define, fresh_tensor_name


def reduction(
    program: Program,
    function: str,
    src: TensorName,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: DataType | None = None,
) -> tuple[Program, TensorName]:
    """Reduce `dims` (all axes if None) by a row of REDUCTION_FUNCTIONS.

    Sums and products of Int32 and Bool are Int. `dtype` (of those only) casts before reducing. Axes
    declared of size 1 are squeezed; a 0-dim tensor is copied. Raises UserError for dims that are
    empty, out of range or repeated.
    """
    arguments = {"dims": dims, "keepdim": keepdim} | ({"dtype": dtype.value} if dtype else {})
    call = describe_call(program, function, [src], **arguments)
    if function not in REDUCTION_FUNCTIONS:
        raise UserError(f"{call}: no such reduction; there are {', '.join(REDUCTION_FUNCTIONS)}")
    if dtype is not None and function not in ("sum", "prod"):
        raise UserError(f"{call}: {function} keeps the element type; cast the operand instead")
    wanted = dtype or reduction_dtype(function, program.tensor(src).dtype)
    axes = _reduced_dims(program, src, dims, call)
    if dtype is not None and program.tensor(src).dtype is not dtype:
        program, src = cast(program, src, dtype)
    program, squeezed, remaining = _squeeze_reduced(program, src, axes)
    if remaining:
        program, out = fresh_tensor_name(program)
        program = define(program, Reduction(out, function, squeezed, remaining))
    elif program.tensor(squeezed).dtype is not wanted:
        program, out = cast(program, squeezed, wanted)
    elif not axes:
        program, out = set_(program, squeezed)
    else:
        out = squeezed
    return _keep_dims(program, out, axes, keepdim)


def mean(
    program: Program, src: TensorName, dims: Sequence[int] | None = None, keepdim: bool = False
) -> tuple[Program, TensorName]:
    """The sum over `dims` (all axes if None), by the number of elements; NaN of none.

    Double stays Double, all else gives Float. Raises UserError for dims that are empty, out of
    range or repeated.
    """
    call = describe_call(program, "mean", [src], dims=dims, keepdim=keepdim)
    axes = _reduced_dims(program, src, dims, call)
    extents = [program.tensor(src).tensor_axes[axis].extent for axis in axes]
    wanted = compute_dtype(program.tensor(src).dtype)
    wanted = wanted if is_floating(wanted) else DataType.Float
    if is_floating(program.tensor(src).dtype) and program.tensor(src).dtype is not wanted:
        program, src = cast(program, src, wanted)
    program, total = reduction(program, "sum", src, dims, keepdim)
    if program.tensor(total).dtype is not wanted:
        program, total = cast(program, total, wanted)
    program, quotient = pointwise(program, "div", [total, mul(const(1), *extents)])
    return program, TensorName(quotient)


def welford(
    program: Program, src: TensorName, dims: Sequence[int]
) -> tuple[Program, TensorName, TensorName, TensorName]:
    """Mean, sum of squared deviations and (Int) number of elements over `dims`, in one sweep.

    16-bit floats are computed and returned as Float. Raises UserError for other than floating
    types and for dims that are empty, out of range or repeated.
    """
    call = describe_call(program, "welford", [src], dims=dims)
    axes = _reduced_dims(program, src, dims, call)
    program, src = _floating_operand(program, src, call)
    program, average = fresh_tensor_name(program)
    program, m2 = fresh_tensor_name(program)
    program, count = fresh_tensor_name(program)
    return define(program, Welford(average, m2, count, src, axes)), average, m2, count


def var_mean(
    program: Program,
    src: TensorName,
    dims: Sequence[int],
    correction: int = 1,
    keepdim: bool = False,
) -> tuple[Program, TensorName, TensorName]:
    """Variance, then mean, over `dims`: m2 / max(count - correction, 0), NaN or inf as in torch.

    16-bit floats are computed and returned as Float. Raises UserError for other than floating
    types and for dims that are empty, out of range or repeated.
    """
    call = describe_call(
        program, "var_mean", [src], dims=dims, correction=correction, keepdim=keepdim
    )
    axes = _reduced_dims(program, src, dims, call)
    program, src = _floating_operand(program, src, call)
    program, squeezed, remaining = _squeeze_reduced(program, src, axes)
    extents = [program.tensor(squeezed).tensor_axes[axis].extent for axis in remaining]
    program, average, m2 = _mean_and_deviations(program, squeezed, remaining)
    divisor: IntExpr = maximum(mul(*extents) - correction, 0)
    program, quotient = pointwise(program, "div", [m2, divisor])
    program, variance = _keep_dims(program, TensorName(quotient), axes, keepdim)
    program, average = _keep_dims(program, average, axes, keepdim)
    return program, variance, average


def _floating_operand(program: Program, src: TensorName, call: str) -> tuple[Program, TensorName]:
    """`src` in the type that statistics of it are computed in."""
    dtype = program.tensor(src).dtype
    if not is_floating(dtype):
        raise UserError(f"{call}: takes floating types; cast the operand first")
    wanted = compute_dtype(dtype)
    return (program, src) if wanted is dtype else cast(program, src, wanted)


def _mean_and_deviations(
    program: Program, src: TensorName, axes: tuple[int, ...]
) -> tuple[Program, TensorName, TensorName]:
    """Mean and sum of squared deviations (m2)."""
    if not axes:
        # A single element deviates by x - x: 0, or NaN for an infinite one.
        program, deviation = pointwise(program, "sub", [src, src])
        program, average = set_(program, src)
        return program, average, TensorName(deviation)
    program, average = fresh_tensor_name(program)
    program, m2 = fresh_tensor_name(program)
    program, count = fresh_tensor_name(program)
    return define(program, Welford(average, m2, count, src, axes)), average, m2


def _reduced_dims(
    program: Program, src: TensorName, dims: Sequence[int] | None, call: str
) -> tuple[int, ...]:
    """The reduced axes, ascending. A 0-dim tensor accepts dims 0 and -1, as in torch."""
    rank = program.tensor(src).ndim
    if dims is None:
        return tuple(range(rank))
    wrapped = wrap_dims(dims, max(rank, 1), call)
    if not wrapped and rank:
        raise UserError(f"{call}: names no dim to reduce; leave dims out to reduce all {rank}")
    return tuple(sorted(wrapped)) if rank else ()


def _squeeze_reduced(
    program: Program, src: TensorName, axes: tuple[int, ...]
) -> tuple[Program, TensorName, tuple[int, ...]]:
    """Drop reduced axes of size 1. The last result is what is left of `axes`, renumbered."""
    kinds = [axis.kind for axis in program.tensor(src).tensor_axes]
    ones = [axis for axis in axes if kinds[axis] is AxisKind.broadcast]
    if not ones:
        return program, src, axes
    remaining = tuple(axis - sum(one < axis for one in ones) for axis in axes if axis not in ones)
    program, squeezed = squeeze(program, src, ones)
    return program, squeezed, remaining


def _keep_dims(
    program: Program, reduced: TensorName, axes: tuple[int, ...], keepdim: bool
) -> tuple[Program, TensorName]:
    if not keepdim:
        return program, reduced
    rank = program.tensor(reduced).ndim + len(axes)
    return broadcast(program, reduced, [dim in axes for dim in range(rank)])
