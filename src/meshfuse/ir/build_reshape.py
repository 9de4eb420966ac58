"""The reshape verb: sizes worked out, and axes merged and split no more than they have to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshfuse.base.errors import UserError
from meshfuse.expr import IntExpr, const, const_value, floordiv, known_equal, mul
from meshfuse.expr.polynomial import quotient_if_exact
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, ScalarName, TensorName
from meshfuse.ir.build_reduction import reduction
from meshfuse.ir.build_shape import broadcast, expand, requested_extent, set_, squeeze_ones
from meshfuse.ir.describe import describe_call
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.infer import tensor_shape
from meshfuse.ir.ops import Reshape
from meshfuse.ir.program import Program, fresh_name
from meshfuse.ir.rewrite import add_tensor, append, fresh_axes, fresh_tensor_name
from meshfuse.ir.schedule import Merge, Split, Step


def reshape(
    program: Program, src: TensorName, shape: Sequence[int | IntExpr | ScalarName]
) -> tuple[Program, TensorName]:
    """The elements of `src`, in row-major order, under other axes; one size may be -1.

    Axes of size 1 are squeezed and broadcast, what is left is merged and split. To its own shape it
    is a copy. Numbers of elements that are known only when run are compared then. Raises UserError
    for two sizes of -1 and for another number of elements.
    """
    call = describe_call(program, "reshape", [src], new_shape=list(shape))
    own = [extent for _, extent in tensor_shape(program, src)]
    wanted = _sizes(call, own, shape)
    if 0 in (const_value(mul(const(1), *own)), const_value(mul(const(1), *wanted))):
        return _reshape_empty(program, src, wanted)
    kept = [extent for kind, extent in tensor_shape(program, src) if kind is AxisKind.iteration]
    solid = [extent for extent in wanted if const_value(extent) != 1]
    if not kept and solid:
        raise UserError(f"{call}: one element has no axes of sizes known when run; give them as 1")
    ones = [
        dim
        for dim, (kind, _) in enumerate(tensor_shape(program, src))
        if kind is AxisKind.broadcast or not solid
    ]
    result = src
    if ones:
        program, result = squeeze_ones(program, result, ones)
    if solid and not _are_equal(kept, solid):
        program, result = _merge_and_split(program, result, solid)
    program, result = broadcast(program, result, [const_value(extent) == 1 for extent in wanted])
    return set_(program, src) if result == src else (program, result)


def _sizes(
    call: str, own: Sequence[IntExpr], shape: Sequence[int | IntExpr | ScalarName]
) -> list[IntExpr]:
    """The requested sizes, with what -1 stands for."""
    inferred = [place for place, size in enumerate(shape) if _is_minus_one(size)]
    if len(inferred) > 1:
        raise UserError(f"{call}: at most one size may be -1")
    given = [requested_extent(call, size) for size in shape if not _is_minus_one(size)]
    have, others = mul(const(1), *own), mul(const(1), *given)
    if not inferred:
        _check_count(call, have, others)
        return given
    if const_value(others) == 0:
        raise UserError(f"{call}: beside a size of 0, -1 may stand for any size")
    rest = quotient_if_exact(have, others)
    if rest is None:
        if const_value(have) is not None and const_value(others) is not None:
            raise UserError(f"{call}: {have} elements do not divide by {others}")
        rest = floordiv(have, others)
    return [*given[: inferred[0]], rest, *given[inferred[0] :]]


def _is_minus_one(size: object) -> bool:
    return isinstance(size, int) and size == -1


def _check_count(call: str, have: IntExpr, want: IntExpr) -> None:
    if const_value(have) is not None and const_value(want) is not None and have is not want:
        raise UserError(f"{call}: the tensor has {have} elements, the new shape {want}")


def _are_equal(own: Sequence[IntExpr], wanted: Sequence[IntExpr]) -> bool:
    return len(own) == len(wanted) and all(map(known_equal, own, wanted))


def _reshape_empty(
    program: Program, src: TensorName, wanted: Sequence[IntExpr]
) -> tuple[Program, TensorName]:
    """No elements have no order: a value of the right type, repeated no times.

    What is not known to have none becomes one axis of size 0, which a run checks.
    """
    own = [extent for kind, extent in tensor_shape(program, src) if kind is AxisKind.iteration]
    count = mul(const(1), *own)
    if const_value(count) is None:
        program, src = reshape(program, src, [count])
        program, src = expand(program, src, [0])
    program, value = reduction(program, "max", src)
    return expand(program, value, wanted)


# Merges and splits.


def _merge_and_split(
    program: Program, src: TensorName, wanted: Sequence[IntExpr]
) -> tuple[Program, TensorName]:
    program, logical = fresh_axes(program, [(AxisKind.iteration, extent) for extent in wanted])
    own = [extent for _, extent in tensor_shape(program, src)]
    program, root, steps = derive_reshape(program, own, logical)
    program, out = fresh_tensor_name(program)
    definition = TensorDef(program.tensor(src).dtype, logical, root, steps)
    return append(add_tensor(program, out, definition), Reshape(out, src)), out


def derive_reshape(
    program: Program, own: Sequence[IntExpr], logical: Sequence[IterDomain]
) -> tuple[Program, tuple[IterDomain, ...], tuple[Step, ...]]:
    """Root axes of sizes `own`, and the steps that lead from them to `logical`.

    An axis that stays as it is has one name: it is root and logical axis.
    """
    root: list[IterDomain] = []
    steps: list[Step] = []
    for theirs, ours in _groups(own, [axis.extent for axis in logical]):
        made = logical[ours.start : ours.stop]
        if len(theirs) == len(made) == 1:
            root.append(replace(made[0], extent=own[theirs.start]))
            continue
        extents = [(AxisKind.iteration, own[k]) for k in theirs]
        program, parts = fresh_axes(program, extents)
        root += parts
        program, whole = _merge_all(program, parts, made, steps)
        program = _split_off(program, whole, made, steps)
    return program, tuple(root), tuple(steps)


def _groups(own: Sequence[IntExpr], wanted: Sequence[IntExpr]) -> Iterator[tuple[range, range]]:
    """The smallest runs of axes that have as many elements on both sides, in order.

    They are found from the left, then from the right. What is left between is one run.
    """
    left = list(_runs(own, wanted))
    i, j = (left[-1][0].stop, left[-1][1].stop) if left else (0, 0)
    m, n = len(own), len(wanted)
    right = [
        (range(m - a.stop, m - a.start), range(n - b.stop, n - b.start))
        for a, b in _runs(own[i:][::-1], wanted[j:][::-1])
    ]
    end, stop = (right[-1][0].start, right[-1][1].start) if right else (m, n)
    yield from left
    if i < end or j < stop:
        yield range(i, end), range(j, stop)
    yield from reversed(right)


def _runs(own: Sequence[IntExpr], wanted: Sequence[IntExpr]) -> Iterator[tuple[range, range]]:
    """The smallest runs from the left that are known to have as many elements.

    Neither side is used up before the other: no run is empty.
    """
    i = j = 0
    while i < len(own) and j < len(wanted):
        found = next(
            (
                (a, total - a)
                for total in range(2, len(own) - i + len(wanted) - j + 1)
                for a in range(1, total)
                if a <= len(own) - i
                and total - a <= len(wanted) - j
                and (a == len(own) - i) == (total - a == len(wanted) - j)
                and known_equal(mul(*own[i : i + a]), mul(*wanted[j : j + total - a]))
            ),
            None,
        )
        if found is None:
            return
        yield range(i, i + found[0]), range(j, j + found[1])
        i, j = i + found[0], j + found[1]


def _merge_all(
    program: Program,
    parts: Sequence[IterDomain],
    made: Sequence[IterDomain],
    steps: list[Step],
) -> tuple[Program, AxisName]:
    """The product of `parts`: the one axis of `made`, if it is the only one."""
    whole = parts[0].name
    for position, part in enumerate(parts[1:], start=2):
        if position == len(parts) and len(made) == 1:
            product = made[0].name
        else:
            program, fresh = fresh_name(program, "a")
            product = AxisName(fresh)
        steps.append(Merge(whole, part.name, product))
        whole = product
    return program, whole


def _split_off(
    program: Program, whole: AxisName, made: Sequence[IterDomain], steps: list[Step]
) -> Program:
    """Cut the axes of `made` off the end of `whole`, the last first."""
    for position in reversed(range(1, len(made))):
        if position == 1:
            outer = made[0].name
        else:
            program, fresh = fresh_name(program, "a")
            outer = AxisName(fresh)
        axis = made[position]
        steps.append(Split(whole, outer, axis.name, axis.extent, inner_split=True))
        whole = outer
    return program
