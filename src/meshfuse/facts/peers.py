"""Loops with one chunk for each rank along a mesh axis: ranks send chunks to one another.

T1 = all_gather(T0, mesh_x, 0), rows of T0 [3@mesh_x, 4], of T1 [3@stream, 4]
->  T1_j0 = fetch(T0, mesh_x, j0): chunk k is what rank k holds of T0

T2 = reduce_scatter(T1, mesh_x, 0), rows of T1 [3@stream, 4] rotated, of T2 [3@mesh_x, 4]
->  T2_j0 = deliver(T1_j0, mesh_x, ..): chunk k is for rank k, which adds up what it gets

The same, rows of T1 [3@stream, 2@stream, 2], of T2 [3@mesh_x, 2@stream, 2]
->  T2_j0_j1 = deliver(T1_j0_j1, mesh_x, ..): each block in pieces
"""

from __future__ import annotations

from dataclasses import replace

from meshfuse.base.errors import InvariantError
from meshfuse.expr import IntExpr, const, const_value
from meshfuse.expr.polynomial import quotient_if_exact
from meshfuse.facts.digits import Digit, digits_above, local_extent
from meshfuse.facts.sharding import canonical, sharding_of
from meshfuse.facts.streams import Rotation, Span, Stream, cut_axis, stream_leaves, streams_of
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.comm import AllGather, Communication, Deliver, Fetch, ReduceScatter
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import Expr
from meshfuse.ir.program import Program


def is_fetched(program: Program, expr: Expr, stream: Stream) -> bool:
    """Whether `expr` gathers what has one chunk for each rank, all of it: that which the rank
    holds."""
    if not isinstance(expr, AllGather) or stream.axis != _axis_name(program, expr.out, expr.axis):
        return False
    return _is_by_rank(program, expr.out, expr.src, expr.mesh_axis, expr.axis, stream)


def span_read(program: Program, expr: Communication, stream: Stream) -> Span | None:
    """The chunks of its source that an iteration communicates; None where it is all of it.

    Those of a loop inside one that fetches are cut of what each rank holds.
    """
    match expr:
        case AllGather(out, src, mesh_axis, axis) if _axis_name(program, out, axis) == stream.axis:
            if is_fetched(program, expr, stream):
                return None
            ranks, around = _ranks(program, src, mesh_axis), stream.span.around
            rest = quotient_if_exact(around, ranks)
            if rest is None or not _is_inside_fetch(program, expr):
                return stream.span
            return replace(stream.span, blocks=stream.span.blocks * ranks, around=rest)
        case Fetch(out, src, mesh_axis) if _is_cut_by(program, out, src, mesh_axis, stream):
            ranks = _ranks(program, src, mesh_axis)
            return replace(stream.span, blocks=stream.span.blocks * ranks)
        case Deliver(out, src, mesh_axis) if _is_cut_by(program, out, out, mesh_axis, stream):
            return _span_of_block(stream.span, _ranks(program, out, mesh_axis))
        case _:
            return stream.span


def _span_of_block(span: Span, ranks: IntExpr) -> Span | None:
    """The chunks of each rank's block, in one block; None if ranks have no block each."""
    extent, blocks = (quotient_if_exact(whole, ranks) for whole in (span.extent, span.blocks))
    if extent is None or blocks is None:
        return None
    return replace(span, extent=extent, blocks=blocks)


def delivered_stream(program: Program, expr: Expr) -> Stream | str | None:
    """The loop of what a reduce-scatter adds up, if its iterations deliver each a rank's terms; as
    the loop of the result, which is a sum.

    None for another expression, and where the terms are not made in a loop over the axis that is
    scattered; the reason where they are and cannot be delivered. Loops of the result are inside of
    it: they make the terms in pieces.
    """
    if not isinstance(expr, ReduceScatter) or not stream_leaves(program, expr.src):
        return None
    stream, axis = streams_of(program, expr.src)[0], _axis_name(program, expr.src, expr.axis)
    if stream.axis != axis or stream.is_reduced or not _has_loops_inside(program, expr, stream):
        return None
    if not _is_by_rank(program, expr.src, expr.out, expr.mesh_axis, expr.axis, stream):
        return "its chunks are not what ranks get"
    if expr.function != "sum":
        return f"terms are delivered to be added, not for {expr.function}"
    if stream.rotation is None or stream.rotation.mesh_axis != expr.mesh_axis:
        return f"all ranks along {expr.mesh_axis} would send to one at a time; swizzle the loop"
    return replace(stream, is_reduced=True)


def _has_loops_inside(program: Program, expr: ReduceScatter, stream: Stream) -> bool:
    """Whether the loops of a reduce-scatter's result, if it has any, are those that its terms have
    inside of the loop of `stream`: along the axis that is scattered, of each rank's block."""
    wanted: list[tuple[int | None, Span, Rotation | None]] = []
    for loop in streams_of(program, expr.out):
        place, span = _place(program, expr.out, loop.axis), loop.span
        if place == expr.axis and (block := _span_of_block(span, stream.span.count)) is not None:
            span = replace(block, around=stream.span.count)
        wanted.append((place, span, loop.rotation))
    made = [
        (_place(program, expr.src, own.axis), own.span, own.rotation)
        for own in streams_of(program, expr.src)[1:]
    ]
    return not wanted or (wanted == made and all(place is not None for place, *_ in wanted))


def _place(program: Program, tensor: TensorName, axis: AxisName) -> int | None:
    """The number of a tensor axis; None for one that is reduced."""
    names = [own.name for own in program.tensor(tensor).tensor_axes]
    return names.index(axis) if axis in names else None


def delivers(program: Program, expr: Expr) -> bool:
    """Whether iterations deliver the terms of a reduce-scatter: those of its own loop, or of one
    inside of its loops."""
    return isinstance(delivered_stream(program, expr), Stream) or delivers_inside(program, expr)


def delivers_inside(program: Program, expr: Expr) -> bool:
    """Whether a reduce-scatter is in loops, inside of which one delivers its terms: they are made
    in a loop that is rotated along the axis that is scattered, as no other is."""
    if not isinstance(expr, ReduceScatter) or not stream_leaves(program, expr.out):
        return False
    axis = _axis_name(program, expr.src, expr.axis)
    return any(
        stream.axis == axis
        and stream.rotation is not None
        and stream.rotation.mesh_axis == expr.mesh_axis
        for stream in streams_of(program, expr.src)[1:]
    )


def _is_inside_fetch(program: Program, expr: AllGather) -> bool:
    """Whether a loop of the result is one that fetches."""
    return any(is_fetched(program, expr, stream) for stream in streams_of(program, expr.out))


def _is_by_rank(
    program: Program,
    whole: TensorName,
    part: TensorName,
    mesh_axis: ParallelType,
    axis: int,
    stream: Stream,
) -> bool:
    """Whether the k-th chunk of `whole` is what the k-th rank along `mesh_axis` has in `part`; of
    chunks in a chunk of loops around, what it has of that."""
    mesh, span = program.schedule(whole).mesh, stream.span
    if mesh is None or const_value(span.count) != mesh.axis_size(mesh_axis):
        return False
    cut = cut_axis(program, whole, stream.axis, span)
    inner = None if cut is None else quotient_if_exact(cut.size, local_extent(cut.below))
    if cut is None or inner is None:
        return False
    digits = sharding_of(program, part).axes[axis]
    above = tuple(digits_above(digits, mesh_axis))
    around = () if span.around is const(1) else (Digit(span.around),)
    if above != (*cut.above, *around):
        return False  # a rank has pieces of many chunks
    held = (*cut.above, *digits[len(above) + 1 :])
    extent = cut.size * cut.ranks_below * cut.blocks
    chunk = (*cut.above, Digit(inner), *cut.below)
    return canonical(held, extent, mesh) == canonical(chunk, extent, mesh)


def _axis_name(program: Program, tensor: TensorName, axis: int) -> AxisName:
    return program.tensor(tensor).tensor_axes[axis].name


def _is_cut_by(
    program: Program, out: TensorName, src: TensorName, mesh_axis: ParallelType, stream: Stream
) -> bool:
    """Whether `mesh_axis` cuts the axis of a loop in `src`."""
    names = [axis.name for axis in program.tensor(out).tensor_axes]
    digits = sharding_of(program, src).axes[names.index(stream.axis)]
    return any(digit.owner == mesh_axis for digit in digits)


def _ranks(program: Program, tensor: TensorName, mesh_axis: ParallelType) -> IntExpr:
    mesh = program.schedule(tensor).mesh
    if mesh is None:
        raise InvariantError(f"{tensor} is communicated and has no mesh")
    return const(mesh.axis_size(mesh_axis))
