"""Verbs that copy or change the axes of one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.base.orders import wrap_dims, wrap_permutation
from meshfuse.expr import IntExpr, const, const_value, known_equal, symbol
from meshfuse.ir.axes import AxisKind, ScalarName, TensorName
from meshfuse.ir.describe import describe_call
from meshfuse.ir.infer import ONE, AxisShape, tensor_shape
from meshfuse.ir.ops import Broadcast, Expand, Permute, Reshape, Set, Squeeze
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import append, define, fresh_tensor_name, new_tensor

_INT64_LIMIT = 1 << 63


def set_(program: Program, src: TensorName) -> tuple[Program, TensorName]:
    """A copy."""
    program, out = fresh_tensor_name(program)
    return define(program, Set(out, src)), out


def broadcast(
    program: Program, src: TensorName, flags: Sequence[bool]
) -> tuple[Program, TensorName]:
    """Insert an axis of size 1 at every true flag. Without one it is `src` itself.

    Raises UserError unless there are as many false flags as axes.
    """
    rank = program.tensor(src).ndim
    if flags.count(False) == rank and len(flags) == rank:
        return program, src
    program, out = fresh_tensor_name(program)
    return define(program, Broadcast(out, src, tuple(flags))), out


def broadcast_in_dim(
    program: Program,
    src: TensorName,
    shape: Sequence[int | IntExpr | ScalarName],
    dims: Sequence[int],
) -> tuple[Program, TensorName]:
    """A tensor of `shape` whose axis dims[k] is axis k of `src`, as in JAX; the others repeat.

    An axis of `src` must have the wanted size or size 1. Where nothing grows it is a broadcast
    alone. Raises UserError if a size, the number of dims or their order does not fit.
    """
    call = describe_call(program, "broadcast_in_dim", [src], shape=list(shape), dims=dims)
    rank = program.tensor(src).ndim
    wrapped = wrap_dims(dims, len(shape), call)
    if len(wrapped) != rank:
        raise UserError(f"{call}: got {len(wrapped)} dims for {rank} axes")
    if list(wrapped) != sorted(wrapped):
        raise UserError(f"{call}: dims must increase; permute the tensor first")
    wanted = [requested_extent(call, size) for size in shape]
    program, aligned = broadcast(program, src, [dim not in wrapped for dim in range(len(shape))])
    return _expand(program, aligned, wanted, call)


def expand(
    program: Program, src: TensorName, shape: Sequence[int | IntExpr | ScalarName]
) -> tuple[Program, TensorName]:
    """torch.expand: axes of size 1 repeat, -1 keeps an axis, more sizes add leading axes.

    `src` itself where nothing repeats. Raises UserError for fewer sizes than axes, a size that does
    not fit, and -1 for a new axis.
    """
    call = describe_call(program, "expand", [src], shape=list(shape))
    own = tensor_shape(program, src)
    added = len(shape) - len(own)
    if added < 0:
        raise UserError(f"{call}: got {len(shape)} sizes for {len(own)} axes")
    kept = [None] * added + [extent for _, extent in own]
    wanted: list[IntExpr] = []
    for size, extent in zip(shape, kept, strict=True):
        if isinstance(size, int) and size == -1:
            if extent is None:
                raise UserError(f"{call}: -1 keeps the size of an axis, and this one is new")
            wanted.append(extent)
        else:
            wanted.append(requested_extent(call, size))
    program, aligned = broadcast(program, src, [True] * added + [False] * len(own))
    return _expand(program, aligned, wanted, call)


def requested_extent(call: str, size: int | IntExpr | ScalarName) -> IntExpr:
    """A size as users give it. Raises UserError, restating the call, for a negative one."""
    match size:
        case IntExpr():
            return size
        case str():
            return symbol(size)
        case int() if not isinstance(size, bool):
            if not 0 <= size < _INT64_LIMIT:
                raise UserError(f"{call}: size {size} is negative, or no int64")
            return const(size)
        case _:
            raise UserTypeError(f"{call}: a size is an int or a scalar, got {size!r}")


def _expand(
    program: Program, src: TensorName, wanted: Sequence[IntExpr], call: str
) -> tuple[Program, TensorName]:
    """Repeat broadcast axes to the wanted extents; `src` itself if there is none to repeat."""
    axes: list[AxisShape] = []
    for position, ((kind, extent), want) in enumerate(
        zip(tensor_shape(program, src), wanted, strict=True)
    ):
        if kind is AxisKind.broadcast:
            axes.append(ONE if const_value(want) == 1 else (AxisKind.iteration, want))
            continue
        have, ask = const_value(extent), const_value(want)
        if have is not None and ask is not None and have != ask:
            raise UserError(
                f"{call}: axis {position} has size {have}; only size 1 expands to {ask}"
            )
        axes.append((kind, extent if known_equal(extent, want) else want))  # equal when run
    if axes == list(tensor_shape(program, src)):
        return program, src
    program, out = new_tensor(program, program.tensor(src).dtype, axes)
    return append(program, Expand(out, src)), out


def permute(program: Program, src: TensorName, dims: Sequence[int]) -> tuple[Program, TensorName]:
    """Axis k of the result is axis dims[k] of `src`. Raises UserError if dims is no permutation."""
    call = describe_call(program, "permute", [src], dims=dims)
    wrapped = wrap_permutation(dims, program.tensor(src).ndim, call)
    program, out = fresh_tensor_name(program)
    return define(program, Permute(out, src, wrapped)), out


def squeeze(
    program: Program, src: TensorName, dims: Sequence[int], squeeze_expanded: bool = False
) -> tuple[Program, TensorName]:
    """Drop axes declared of size 1; a copy if `dims` is empty.

    With `squeeze_expanded` also those that `expand` repeats. Raises UserError for others.
    """
    call = describe_call(program, "squeeze", [src], dims=dims)
    wrapped = wrap_dims(dims, program.tensor(src).ndim, call)
    if not wrapped:
        return set_(program, src)
    expanded = _expanded_axes(program, src).intersection(wrapped)
    if expanded and not squeeze_expanded:
        axis = min(expanded)
        raise UserError(f"{call}: axis {axis} is expanded; pass squeeze_expanded=True to drop it")
    if expanded:
        return _squeeze_below_expansion(program, src, wrapped, call)
    for dim in wrapped:
        _check_is_one(program, src, dim, call)
    return squeeze_ones(program, src, wrapped)


def squeeze_ones(
    program: Program, src: TensorName, dims: Sequence[int]
) -> tuple[Program, TensorName]:
    """Drop axes of size 1, or of a size that must be 1 when run."""
    program, out = fresh_tensor_name(program)
    return define(program, Squeeze(out, src, tuple(sorted(dims)))), out


def _check_is_one(program: Program, src: TensorName, dim: int, call: str) -> None:
    """A size that a reshape gives is known when run; others must be declared."""
    axis = program.tensor(src).tensor_axes[dim]
    reshaped = isinstance(program.fusion.definition(src), Reshape)
    if axis.kind is AxisKind.broadcast or (reshaped and const_value(axis.extent) is None):
        return
    raise UserError(
        f"{call}: axis {dim} has size {axis.extent}; only axes declared of size 1 can go"
    )


def _expanded_axes(program: Program, tensor: TensorName) -> frozenset[int]:
    """The axes that the definition of a tensor repeats."""
    expr = program.fusion.definition(tensor)
    if not isinstance(expr, Expand):
        return frozenset()
    pairs = zip(
        program.tensor(expr.src).tensor_axes, program.tensor(tensor).tensor_axes, strict=True
    )
    return frozenset(axis for axis, (had, has) in enumerate(pairs) if had.kind is not has.kind)


def _squeeze_below_expansion(
    program: Program, src: TensorName, dims: Sequence[int], call: str
) -> tuple[Program, TensorName]:
    """squeeze(expand(x))  ->  expand(squeeze(x))"""
    expr = program.fusion.definition(src)
    assert isinstance(expr, Expand)
    shape = tensor_shape(program, src)
    wanted = [extent for axis, (_, extent) in enumerate(shape) if axis not in dims]
    program, squeezed = squeeze(program, expr.src, dims)
    return _expand(program, squeezed, wanted, call)
