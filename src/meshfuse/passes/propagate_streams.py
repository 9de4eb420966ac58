"""Spread stream leaves to the tensors that can be in the same host loop, and drop those of no use.

T2 = matmul(T1, ..), rows of T2 in 4 chunks; T1 = all_gather(T0)   ->   rows of T1 in 4 chunks, too,
                                                 where the parts of T0 can be cut in the same way
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshfuse.base.trace import Note
from meshfuse.expr import IntExpr, ceildiv, const, const_value, known_equal, mul
from meshfuse.expr.polynomial import quotient_if_exact
from meshfuse.facts.axis_map import output_places
from meshfuse.facts.digits import digits_above
from meshfuse.facts.facts import tensor_outputs
from meshfuse.facts.peers import delivered_stream, is_fetched, span_read
from meshfuse.facts.sharding import sharding_of
from meshfuse.facts.shared_loops import carried_to
from meshfuse.facts.streams import (
    Rotation,
    Span,
    Stream,
    cut_axis,
    find_stream,
    has_streams,
    is_stream,
    stream_leaves,
    streams_of,
)
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.comm import AllGather, AllReduce, Communication, ReduceScatter
from meshfuse.ir.infer import is_tensor
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import (
    Broadcast,
    Cast,
    Expand,
    Expr,
    Linear,
    Literal,
    MatMul,
    Operand,
    Permute,
    Pointwise,
    Reduction,
    Reshape,
    Set,
    Squeeze,
    Welford,
)
from meshfuse.ir.ops_attention import SdpfaBwd, SdpfaFwd
from meshfuse.ir.ops_indexing import Cat, IndexSelect, Pad, Scan, Slice, TakeAlongAxis, TopK
from meshfuse.ir.program import Program, fresh_name
from meshfuse.ir.schedule import Merge, Schedule, Split, Swizzle1d
from meshfuse.ir.transforms import swizzle1d
from meshfuse.passes.forget_loops import with_plain_loops

STAGE = "propagate_streams"

IN_LOOPS = (
    AllGather,
    AllReduce,
    Broadcast,
    Cast,
    Cat,
    Expand,
    IndexSelect,
    Linear,
    MatMul,
    Pad,
    Permute,
    Pointwise,
    ReduceScatter,
    Reduction,
    Reshape,
    Scan,
    SdpfaBwd,
    SdpfaFwd,
    Set,
    Slice,
    Squeeze,
    TakeAlongAxis,
    TopK,
    Welford,
)
"""Expressions that make the same of a chunk, wherever it stands in the whole: along axes that they
carry from an operand. Random numbers are made of places in the whole."""


def propagate_streams(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Let tensors without a stream leaf take those of what they are made of, then of what is made
    of them; leave no leaf that no loop can have.

    Inputs take none: others' chunks of them are views. A leaf on a reduced axis stays where it is,
    for it changes the order of a sum. Leaves that go are noted with the reason.
    """
    if not has_streams(program):
        return program, ()
    notes: list[Note] = []
    inputs = set(program.fusion.inputs)
    for expr in program.fusion.exprs:
        program = _with_terms_by_rank(program, expr)
    for expr in program.fusion.exprs:
        for out in tensor_outputs(program, expr):
            program = _without_illegal(program, expr, out, notes)
    for expr in program.fusion.exprs:
        program = _spread_aside(_spread_forward(program, expr), expr)
    for expr in reversed(program.fusion.exprs):
        program = _spread_backward(_spread_aside(program, expr), expr)
    for expr in program.fusion.exprs:
        program = _without_single(program, expr, notes)
    for expr in program.fusion.exprs:
        delivered = delivered_stream(program, expr)
        if isinstance(delivered, str):
            reason = f"its terms are added when all are there: {delivered}"
            notes.append(Note(STAGE, expr.outs[0], "not_streamed", reason))
    for tensor in inputs.intersection(program.fusion.tensors):
        for leaf in stream_leaves(program, TensorName(tensor)):
            program = unbind_stream(program, TensorName(tensor), leaf)
    return program, tuple(notes)


# Sums that are scattered.


def _with_terms_by_rank(program: Program, expr: Expr) -> Program:
    """A stream leaf on the axis that a scattered sum is over, with a part for each rank: the terms
    are added one after the other, as they are made.

    T2 = reduce_scatter(T1, mesh_x, 0), T2 = sum over [3@stream, k]   ->   rows of T1 in 3 chunks

    A rank makes first what is for the rank behind it, and last what it keeps.
    """
    if not isinstance(expr, ReduceScatter) or stream_leaves(program, expr.src):
        return program
    mesh, maker = program.schedule(expr.src).mesh, program.fusion.definition(expr.src)
    for leaf in stream_leaves(program, expr.out):
        stream = find_stream(program, expr.out, leaf)
        if isinstance(stream, str) or stream.rotation or mesh is None or maker is None:
            continue
        ranks = mesh.axis_size(expr.mesh_axis)
        axis = program.tensor(expr.src).tensor_axes[expr.axis]
        if not stream.is_reduced or const_value(stream.span.count) != ranks:
            continue
        span = _span_by_rank(program, expr, axis.extent)
        rotation = Rotation(mesh, expr.mesh_axis, 1)
        by_rank = Stream(axis.name, axis.name, span, is_reduced=False, rotation=rotation)
        taken = _take(program, maker, expr.src, axis.name, by_rank)
        if stream_leaves(taken, expr.src):
            return unbind_stream(taken, expr.out, leaf)
    return program


def _span_by_rank(program: Program, expr: ReduceScatter, extent: IntExpr) -> Span:
    """The chunks of which each rank gets one."""
    digits = sharding_of(program, expr.out).axes[expr.axis]
    above = digits_above(digits, expr.mesh_axis)
    owner, below = digits[len(above)], digits[len(above) + 1 :]
    blocks, width = (mul(const(1), *(d.extent for d in part)) for part in (above, below))
    return Span(extent, blocks, owner.extent, width)


# What can be in a loop.


def _without_illegal(program: Program, expr: Expr, out: TensorName, notes: list[Note]) -> Program:
    for leaf in stream_leaves(program, out):
        stream = find_stream(program, out, leaf)
        reason = stream if isinstance(stream, str) else _reason_against(program, expr, out, stream)
        if reason is not None:
            program = unbind_stream(program, out, leaf)
            notes.append(Note(STAGE, out, "not_streamed", f"it is made as a whole: {reason}"))
    return program


def unbind_stream(program: Program, tensor: TensorName, leaf: AxisName) -> Program:
    """Without a stream leaf, and without the steps that made it if they made nothing else."""
    schedule = program.schedule(tensor)
    bindings = {name: bound for name, bound in schedule.bindings.items() if name != leaf}
    if not bindings:
        return with_plain_loops(program, tensor)
    steps, leaves = [*schedule.steps], schedule.leaves
    swizzle = next((s for s in steps if isinstance(s, Swizzle1d) and s.out == leaf), None)
    if swizzle is not None:
        steps.remove(swizzle)
        leaves = tuple(swizzle.source if name == leaf else name for name in leaves)
        leaf = swizzle.source
    split = next((s for s in steps if isinstance(s, Split) and s.outer == leaf), None)
    if split is not None and split.inner in leaves and split.inner not in bindings:
        steps.remove(split)
        whole = (split.source if name == split.inner else name for name in leaves if name != leaf)
        leaves = tuple(whole)
    schedule = replace(schedule, bindings=bindings, steps=tuple(steps), leaves=leaves)
    return program.with_schedule(tensor, schedule)


def _reason_against(program: Program, expr: Expr, out: TensorName, stream: Stream) -> str | None:
    """Why `expr` cannot be in the loop of a stream leaf of its result."""
    if not isinstance(expr, IN_LOOPS):
        return f"chunks of what {type(expr).__name__} makes depend on where they stand"
    if is_fetched(program, expr, stream):
        return None
    if isinstance(expr, Communication) and stream.rotation is not None:
        return "ranks would communicate different chunks"
    if isinstance(expr, SdpfaFwd | SdpfaBwd) and not _is_zero(expr.dropout_p):
        return "what dropout drops depends on where it stands"
    if stream.is_reduced and not _is_sum(expr):
        return "only plain sums and contractions without a bias add up over a loop"
    if _adds_to_pieces(program, out):
        return "iterations of one loop would add to what another one has in several pieces"
    carried = False
    for position, operand in enumerate(expr.ins):
        if not is_tensor(program, operand):
            continue
        axis = carried_to(program, expr, position, out, stream.axis)
        if axis is None:
            continue
        carried = True
        span = stream.span
        if isinstance(expr, Communication):
            span = span_read(program, expr, stream) or span
        if cut_axis(program, TensorName(str(operand)), axis, span) is None:
            return f"its chunks are no chunks of what ranks hold of {operand}"
    return None if carried else f"no operand of {type(expr).__name__} has that axis"


def _adds_to_pieces(program: Program, out: TensorName) -> bool:
    found = [find_stream(program, out, leaf) for leaf in stream_leaves(program, out)]
    streams = [stream for stream in found if isinstance(stream, Stream)]
    cuts = [cut_axis(program, out, each.axis, each.span) for each in streams if not each.is_reduced]
    in_pieces = any(cut is not None and cut.pieces is not const(1) for cut in cuts)
    return in_pieces and any(stream.is_reduced for stream in streams)


def _is_sum(expr: Expr) -> bool:
    if isinstance(expr, Reduction):
        return expr.function == "sum"
    return isinstance(expr, MatMul) or (isinstance(expr, Linear) and expr.bias is None)


def _is_zero(operand: Operand) -> bool:
    return isinstance(operand, Literal) and operand.value == 0


# Expressions with several results: all are made in one loop, or none.


def _images(
    program: Program, expr: Expr, out: TensorName, axis: AxisName
) -> dict[TensorName, AxisName]:
    """`axis` of a result, and what it is in the other results that have it."""
    places = {name: output_places(expr, program, name) for name in tensor_outputs(program, expr)}
    own = [a.name for a in program.tensor(out).maybe_root]
    place = places[out][own.index(axis)]
    return {
        name: program.tensor(name).maybe_root[found.index(place)].name
        for name, found in places.items()
        if place is not None and place in found
    }


def _spread_aside(program: Program, expr: Expr) -> Program:
    """Results without a stream leaf take those of the first that has some."""
    outs = tensor_outputs(program, expr)
    first = next((out for out in outs if stream_leaves(program, out)), None)
    if first is None or len(outs) == 1:
        return program
    for stream in _offered(program, first):
        for name, axis in _images(program, expr, first, stream.axis).items():
            if len(stream_leaves(program, name)) < len(stream_leaves(program, first)):
                program = _take(program, expr, name, axis, stream)
    return program


def _without_single(program: Program, expr: Expr, notes: list[Note]) -> Program:
    """No leaves on the results of an expression that are not in the same loops."""
    outs = tensor_outputs(program, expr)
    if len(outs) < 2 or _have_same_loops(program, expr, outs):
        return program
    for out in outs:
        for leaf in stream_leaves(program, out):
            program = unbind_stream(program, out, leaf)
            others = ", ".join(name for name in outs if name != out)
            why = f"it is made as a whole: {others} of the same operation cannot be in its loop"
            notes.append(Note(STAGE, out, "not_streamed", why))
    return program


def _have_same_loops(program: Program, expr: Expr, outs: Sequence[TensorName]) -> bool:
    first = streams_of(program, outs[0])
    wanted: dict[TensorName, list[tuple[AxisName, Span, Rotation | None]]] = {}
    for own in first:
        for name, axis in _images(program, expr, outs[0], own.axis).items():
            wanted.setdefault(name, []).append((axis, own.span, own.rotation))
    return all(
        [(own.axis, own.span, own.rotation) for own in streams_of(program, out)]
        == wanted.get(out, [])
        for out in outs
    )


# Spreading.


def _spread_forward(program: Program, expr: Expr) -> Program:
    for out in tensor_outputs(program, expr):
        for position, operand in enumerate(expr.ins):
            if stream_leaves(program, out) or not is_tensor(program, operand):
                continue
            maker = program.fusion.definition(TensorName(str(operand)))
            if maker is not None and isinstance(delivered_stream(program, maker), Stream):
                continue  # a sum, of which no piece is there before the last iterations
            for stream in _offered(program, TensorName(str(operand))):
                images = [
                    axis.name
                    for axis in program.tensor(out).tensor_axes
                    if carried_to(program, expr, position, out, axis.name) == stream.axis
                ]
                for axis in images:
                    program = _take(program, expr, out, axis, stream)
    return program


def _spread_backward(program: Program, expr: Expr) -> Program:
    makers = {out: other for other in program.fusion.exprs for out in other.outs}
    for out in tensor_outputs(program, expr):
        for position, operand in enumerate(expr.ins):
            if operand not in makers or not is_tensor(program, operand):
                continue
            source = TensorName(str(operand))
            for stream in () if stream_leaves(program, source) else streams_of(program, out):
                axis = carried_to(program, expr, position, out, stream.axis)
                if axis is not None:
                    program = _take(program, makers[source], source, axis, stream)
    return program


def _offered(program: Program, tensor: TensorName) -> Iterator[Stream]:
    """The loops along axes that the tensor has."""
    for leaf in stream_leaves(program, tensor):
        stream = find_stream(program, tensor, leaf)
        if not isinstance(stream, str) and not stream.is_reduced:
            yield stream


def _take(
    program: Program, expr: Expr, tensor: TensorName, axis: AxisName, stream: Stream
) -> Program:
    """`tensor`, which `expr` makes, in the chunks of `stream` along `axis`, if that can be."""
    found = _leaf_to_cut(program, tensor, axis, stream.span)
    if found is None:
        return program
    taken, leaf = _cut_leaf(program, tensor, *found, stream.span)
    at, rotation = taken.schedule(tensor).leaves.index(leaf), stream.rotation
    if rotation is not None:
        taken = swizzle1d(taken, tensor, at, rotation.mesh_axis, rotation.offset)
        leaf = taken.schedule(tensor).leaves[at]
    taken = on_stream(taken, tensor, at)
    found = find_stream(taken, tensor, leaf)
    if isinstance(found, str) or (found.span, found.rotation) != (stream.span, stream.rotation):
        return program
    return program if _reason_against(taken, expr, tensor, found) else taken


def on_stream(program: Program, tensor: TensorName, place: int) -> Program:
    """The leaf at a place of the loop nest bound to the stream."""
    schedule = program.schedule(tensor)
    bindings = {**schedule.bindings, schedule.leaves[place]: ParallelType.stream}
    return program.with_schedule(tensor, replace(schedule, bindings=bindings))


def _leaf_to_cut(
    program: Program, tensor: TensorName, axis: AxisName, span: Span
) -> tuple[AxisName, IntExpr] | None:
    """The leaf of an axis that has its chunks, the first below the blocks that no mesh axis and no
    loop has; and into how many of the blocks it is to be divided itself."""
    schedule = program.schedule(tensor)
    rest, around = span.blocks, const(1)
    for leaf in _leaves_below(schedule, axis):
        extent = program.all_axes(tensor)[leaf].extent
        if is_stream(schedule, leaf):
            around = around * extent
            continue
        further = quotient_if_exact(rest, extent)
        is_mesh, is_free = schedule.binding(leaf).is_mesh, leaf not in schedule.bindings
        if leaf not in schedule.leaves or not (is_mesh or is_free):
            return None
        if further is not None and (is_mesh or rest is not const(1)):
            rest = further
        else:
            return (leaf, rest) if is_free and around is span.around else None
    return None


def _leaves_below(schedule: Schedule, axis: AxisName) -> list[AxisName]:
    """What an axis is split into, most significant first."""
    found = [axis]
    for step in schedule.steps:
        match step:
            case Split(source, outer, inner) if source in found:
                place = found.index(source)
                found[place : place + 1] = [outer, inner]
            case Swizzle1d(source, out) if source in found:
                found[found.index(source)] = out
            case Merge(outer, inner) if outer in found or inner in found:
                return []
            case _:
                pass
    return found


def _cut_leaf(
    program: Program, tensor: TensorName, leaf: AxisName, blocks: IntExpr, span: Span
) -> tuple[Program, AxisName]:
    """A leaf split into blocks, these into the chunks and what is in each; as it is where a chunk
    is one index."""
    if blocks is not const(1):
        program, _, leaf = _split_leaf(program, tensor, leaf, blocks, inner_split=False)
    extent = program.all_axes(tensor)[leaf].extent
    if known_equal(extent, span.count):
        return program, leaf
    by_count = known_equal(ceildiv(extent, span.count), span.width) or span.blocks is not const(1)
    factor = span.count if by_count else span.width
    program, outer, _ = _split_leaf(program, tensor, leaf, factor, inner_split=not by_count)
    return program, outer


def _split_leaf(
    program: Program, tensor: TensorName, leaf: AxisName, factor: IntExpr, *, inner_split: bool
) -> tuple[Program, AxisName, AxisName]:
    program, outer = fresh_name(program, "a")
    program, inner = fresh_name(program, "a")
    step = Split(leaf, AxisName(outer), AxisName(inner), factor, inner_split)
    schedule = program.schedule(tensor)
    place = schedule.leaves.index(leaf)
    leaves = (*schedule.leaves[:place], step.outer, step.inner, *schedule.leaves[place + 1 :])
    schedule = replace(schedule, leaves=leaves, steps=(*schedule.steps, step))
    return program.with_schedule(tensor, schedule), step.outer, step.inner
