"""Expressions of a host loop rewritten for one iteration: they read and make chunks.

T2 = relu(T1), T1 and T2 [a0{7}, a1{4}], a0 in 3 chunks   ->   T2_j0 = relu(T1_j0), both
                                                               [min(3, 7 - 3*j0), 4]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from meshfuse.base.errors import InvariantError
from meshfuse.expr import IntExpr, Symbol, const, known_equal
from meshfuse.facts.facts import output_names, tensor_outputs
from meshfuse.facts.layout import Layout, allocation_of, contiguous_in, layout_of
from meshfuse.facts.peers import delivered_stream, is_fetched, span_read
from meshfuse.facts.sharding import Sharding, local_extents, sharding_of
from meshfuse.facts.shared_loops import cut_operand, loops_of
from meshfuse.facts.streams import (
    Cut,
    Stream,
    cut_axis,
    stream_leaves,
    streams_of,
)
from meshfuse.ir.axes import AxisName, IterDomain, TensorName
from meshfuse.ir.comm import AllGather, Communication, Deliver, Fetch, ReduceScatter
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.infer import is_tensor
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import Expr, Operand, Pointwise
from meshfuse.ir.program import Program
from meshfuse.ir.replay import clone_tensor, without_reductions
from meshfuse.ir.rewrite import Name, add_tensor, map_names, read_names
from meshfuse.ir.schedule import Split, Step, Swizzle1d
from meshfuse.passes.apply_sharding import new_sharded_tensor
from meshfuse.passes.operands import with_operands


@final
@dataclass(slots=True)
class Chunked:
    """The expressions of a loop for one iteration, in a program that has their chunks' tensors.

    `exprs`: for each expression of the loop what takes its place.
    `slices`: chunks of tensors that exist outside, each with that tensor, the place of the axis and
    where it begins. Of those, `made` are made in the loop. `sums`: tensors that iterations add to,
    by the name of the result of the addition; `sums_so_far`: by the name of what is added to.
    `wholes`: tensors without the axis, which each iteration makes alike, by the name of what it
    makes.
    """

    program: Program
    index: Symbol
    exprs: list[tuple[Expr, ...]] = field(default_factory=list[tuple[Expr, ...]])
    slices: dict[TensorName, tuple[TensorName, int, IntExpr]] = field(
        default_factory=dict[TensorName, tuple[TensorName, int, IntExpr]]
    )
    made: list[TensorName] = field(default_factory=list[TensorName])
    sums: dict[TensorName, TensorName] = field(default_factory=dict[TensorName, TensorName])
    sums_so_far: dict[TensorName, TensorName] = field(default_factory=dict[TensorName, TensorName])
    wholes: dict[TensorName, TensorName] = field(default_factory=dict[TensorName, TensorName])
    names: dict[tuple[TensorName, AxisName], TensorName] = field(
        default_factory=dict[tuple[TensorName, AxisName], TensorName]
    )

    @property
    def kept(self) -> tuple[TensorName, ...]:
        """The chunks that are made of tensors that exist outside."""
        made = set(self.made)
        return tuple(name for name, (source, _, _) in self.slices.items() if source in made)


def chunk_exprs(
    program: Program,
    exprs: Sequence[Expr],
    index: Symbol,
    kept: Collection[TensorName] = (),
) -> Chunked:
    """`exprs`, which share a loop, for iteration `index`. The expressions of `program` stay.

    `kept` exist outside, besides results and what other expressions read.
    """
    work = Chunked(program, index)
    inside = set(map(id, exprs))
    outside = {*output_names(program), *kept}
    for expr in program.fusion.exprs:
        if id(expr) not in inside:
            outside.update(TensorName(name) for name in read_names(expr))
    for expr in exprs:
        work.exprs.append(tuple(_rewritten(work, expr, outside)))
    return work


def _rewritten(work: Chunked, expr: Expr, outside: set[TensorName]) -> Iterator[Expr]:
    outs = tensor_outputs(work.program, expr)
    out, stream = outs[0], loops_of(work.program, expr)[0]
    operands: list[Operand] = list(expr.ins)
    for position, operand in enumerate(expr.ins):
        if is_tensor(work.program, operand):
            source = TensorName(str(operand))
            axis = cut_operand(work.program, expr, position, out, stream)
            if axis is not None:
                operands[position] = _chunk_read(work, source, axis, _read_by(work, expr, stream))
    taking = with_operands(expr, operands)
    owner = stream.chunk_number(work.index)
    match expr:
        case ReduceScatter() if isinstance(delivered_stream(work.program, expr), Stream):
            chunk = _like(work, out, _fresh(work, out))
            taking = Deliver(chunk, TensorName(str(operands[0])), expr.mesh_axis, owner)
        case AllGather() if is_fetched(work.program, expr, stream):
            chunk = _chunk_made(work, out, stream, is_kept=out in outside)
            taking = Fetch(chunk, expr.src, expr.mesh_axis, owner)
        case _:
            chunk = _result_made(work, out, is_kept=out in outside)
    others = {name: _result_made(work, name, is_kept=name in outside) for name in outs[1:]}
    renamed: dict[Name, Name] = {out: chunk, **others}
    yield map_names(taking, renamed)
    if stream.is_reduced:
        before, after = (
            _like(work, out, TensorName(f"{chunk}_{when}")) for when in ("before", "after")
        )
        work.sums[after] = work.sums_so_far[before] = out
        yield Pointwise(after, "add", (before, chunk))


def _result_made(work: Chunked, out: TensorName, *, is_kept: bool) -> TensorName:
    """The tensor for what an iteration makes of `out`. One without the axis it makes as a whole."""
    streams = streams_of(work.program, out)
    if streams:
        return _chunk_made(work, out, streams[0], is_kept=is_kept and not streams[0].is_reduced)
    name = _like(work, out, _fresh(work, out))
    if is_kept:
        work.wholes[name] = out
    return name


def _read_by(work: Chunked, expr: Expr, stream: Stream) -> Stream:
    """The loop with the chunks that an expression reads of what it reads in chunks."""
    span = span_read(work.program, expr, stream) if isinstance(expr, Communication) else None
    return stream if span is None else replace(stream, span=span)


# Tensors.


def _chunk_read(work: Chunked, source: TensorName, axis: AxisName, stream: Stream) -> TensorName:
    """The chunk of a tensor that is made in the loop or exists outside."""
    if (source, axis) in work.names:
        return work.names[source, axis]
    cut = _cut(work.program, source, axis, stream)
    k = stream.chunk_number(work.index)
    definition = work.program.tensor(source)
    place = [a.name for a in definition.tensor_axes].index(axis)
    name = _fresh(work, source, place)
    sharding = sharding_of(work.program, source)
    extents = [a.extent for a in definition.tensor_axes]
    extents[place] = cut.extent(k)
    axes = [*sharding.axes]
    axes[place] = cut.digits(k)
    placed = replace(sharding, axes=tuple(axes))
    work.program = _add_chunk(work.program, source, name, extents, placed)
    work.program = _lay_out(work.program, name, _view_layout(work.program, source, place))
    work.names[source, axis] = name
    work.slices[name] = (source, place, cut.start(k))
    return name


def _add_chunk(
    program: Program,
    source: TensorName,
    name: TensorName,
    extents: Sequence[IntExpr],
    sharding: Sharding,
) -> Program:
    """Enter a tensor like `source`, of other extents, that nothing defines."""
    definition = program.tensor(source)
    axes = zip(definition.tensor_axes, extents, strict=True)
    sized = tuple(replace(axis, extent=extent) for axis, extent in axes)
    like = TensorDef(definition.dtype, sized, is_cpu=definition.is_cpu)
    placed, temporary = new_sharded_tensor(add_tensor(program, name, like), name, sharding)
    return _renamed(placed, temporary, name)


def _chunk_made(work: Chunked, out: TensorName, stream: Stream, *, is_kept: bool) -> TensorName:
    """The tensor for what an expression makes of `out`: a chunk, or a term of a sum."""
    cut = _cut(work.program, out, stream.axis, stream)
    k = stream.chunk_number(work.index)
    name = _fresh(work, out)
    program, temporary, renamed = clone_tensor(work.program, out)
    program = _shortened(program, temporary, renamed[stream.axis], cut.extent(k))
    program = _without_leaf(program, temporary, renamed[stream.leaf], cut)
    work.program = _renamed(program, temporary, name)
    if stream.is_reduced:
        return name
    place = [a.name for a in work.program.tensor(out).tensor_axes].index(stream.axis)
    if is_kept:
        work.slices[name] = (out, place, cut.start(k))
        work.made.append(out)
        work.program = _lay_out(work.program, name, _view_layout(work.program, out, place))
    elif work.program.schedule(out).allocation is not None:
        order = layout_of(work.program, out).order
        work.program = _lay_out(work.program, name, contiguous_in(work.program, name, order))
    work.names[out, stream.axis] = name
    return name


def _cut(program: Program, tensor: TensorName, axis: AxisName, stream: Stream) -> Cut:
    cut = cut_axis(program, tensor, axis, stream.span)
    if cut is None:
        raise InvariantError(f"axis {axis} of {tensor} has no chunks {stream.span}")
    return cut


def _fresh(work: Chunked, tensor: TensorName, place: int | None = None) -> TensorName:
    """`T3_j0`; `T3_j0_1` for chunks along another axis, by its number."""
    name = TensorName(f"{tensor}_{work.index.name}")
    if place is not None and name in work.program.fusion.tensors:
        name = TensorName(f"{name}_{place}")
    return name


def whole_name(chunk: TensorName) -> TensorName:
    """The tensor that a name is of that `chunk_exprs` has given, or the name of another tensor."""
    return TensorName(chunk.partition("_")[0])


def _renamed(program: Program, old: TensorName, new: TensorName) -> Program:
    """A tensor that nothing defines or reads, under another name."""
    tensors, schedules = dict(program.fusion.tensors), dict(program.schedules)
    tensors[new], schedules[new] = tensors.pop(old), schedules.pop(old)
    return replace(program, fusion=replace(program.fusion, tensors=tensors), schedules=schedules)


def _like(work: Chunked, tensor: TensorName, name: TensorName) -> TensorName:
    """Enter a tensor like `tensor` without its reduced axes, for what it is between iterations."""
    program, temporary, _ = clone_tensor(work.program, tensor)
    program = without_reductions(program, temporary)
    work.program = _renamed(program, temporary, name)
    return name


def _shortened(program: Program, tensor: TensorName, axis: AxisName, extent: IntExpr) -> Program:
    definition = program.tensor(tensor)

    def short(axes: tuple[IterDomain, ...]) -> tuple[IterDomain, ...]:
        return tuple(replace(a, extent=extent) if a.name == axis else a for a in axes)

    definition = replace(definition, logical=short(definition.logical), root=short(definition.root))
    return add_tensor(program, tensor, definition, program.schedule(tensor))


def _lay_out(program: Program, tensor: TensorName, layout: Layout) -> Program:
    allocation = allocation_of(program, tensor, layout)
    return program.with_schedule(tensor, replace(program.schedule(tensor), allocation=allocation))


def _view_layout(program: Program, tensor: TensorName, place: int) -> Layout:
    """That of a chunk in a tensor: the next slower axis steps over the others."""
    layout, sizes = layout_of(program, tensor), local_extents(program, tensor)
    flags = list(layout.contiguity)
    for position in reversed(range(layout.order.index(place))):
        if flags[position] is not None and sizes[layout.order[position]] is not const(1):
            flags[position] = False
            break
    return Layout(layout.order, tuple(flags))


# Loop nests.


def without_streams(program: Program) -> Program:
    """The program with tensors as they are for who does not loop along them."""
    for tensor in program.fusion.tensors:
        if stream_leaves(program, tensor):
            schedule = program.schedule(tensor)
            bindings = {a: to for a, to in schedule.bindings.items() if to != ParallelType.stream}
            schedule = replace(schedule, bindings=bindings)
            if not bindings:
                leaves = tuple(axis.name for axis in program.tensor(tensor).logical)
                schedule = replace(schedule, leaves=leaves, steps=())
            program = program.with_schedule(tensor, schedule)
    return program


def _without_leaf(program: Program, tensor: TensorName, leaf: AxisName, cut: Cut) -> Program:
    """The loop nest of a chunk: the splits that made the stream leaf go, and what is left of an
    axis takes its place.

    a0 -> (a1 on the stream, a2), a2 -> (a3 on the mesh, a4)   becomes   a0 -> (a3 on the mesh, a4)
    """
    schedule = program.schedule(tensor)
    bindings = {name: bound for name, bound in schedule.bindings.items() if name != leaf}
    steps, leaves = list(schedule.steps), list(schedule.leaves)
    swizzle = next((s for s in steps if isinstance(s, Swizzle1d) and s.out == leaf), None)
    if swizzle is not None:
        steps.remove(swizzle)
        leaves[leaves.index(leaf)] = leaf = swizzle.source
    split = next((s for s in steps if isinstance(s, Split) and s.outer == leaf), None)
    if split is not None:
        rest = {split.inner: split.source}
        inner = program.all_axes(tensor)[split.inner].extent
        steps = [
            _resized(_step_on(step, rest), split.source, inner) for step in steps if step != split
        ]
        leaves = [rest.get(name, name) for name in leaves if name != leaf]
        bindings = {rest.get(name, name): bound for name, bound in bindings.items()}
        if not known_equal(cut.size * cut.count, cut.held) and any(
            _is_sized(step, split.source) for step in steps
        ):
            raise InvariantError(f"{tensor}: the last chunk of {split.source} may be shorter")
    schedule = replace(
        schedule, steps=tuple(steps), leaves=tuple(leaves), bindings=bindings, inline_depth=0
    )
    return program.with_schedule(tensor, schedule)


def _step_on(step: Step, names: Mapping[AxisName, AxisName]) -> Step:
    """A step on axes that have other names; splits only, as a stream leaf is not merged."""
    if isinstance(step, Split):
        return replace(step, source=names.get(step.source, step.source))
    if isinstance(step, Swizzle1d):
        return replace(step, source=names.get(step.source, step.source))
    return step


def _is_sized(step: Step, axis: AxisName) -> bool:
    """Whether the factor of a split is the extent of `axis`."""
    return isinstance(step, Split) and axis == (step.inner if step.inner_split else step.outer)


def _resized(step: Step, axis: AxisName, extent: IntExpr) -> Step:
    if isinstance(step, Split) and _is_sized(step, axis):
        return replace(step, factor=extent)
    return step
