"""Tensors for chunks of others: their sizes, memory and loop nests.

T2 [a0{8}, a1{4}], a0 = [a2{2} on the stream, a3{4}]   ->   T2_j0 [a4{4}, a5{4}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshfuse.expr import IntExpr, const
from meshfuse.expr.polynomial import quotient_if_exact
from meshfuse.facts.layout import Layout, allocation_of, layout_of
from meshfuse.facts.sharding import Sharding, canonical, local_extents, sharding_of
from meshfuse.facts.streams import Cut, stream_leaves
from meshfuse.ir.axes import AxisName, IterDomain, TensorName
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import Expr, Reshape
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import add_tensor, fresh_axes
from meshfuse.ir.schedule import Merge, Split, Step, Swizzle1d
from meshfuse.passes.apply_sharding import new_sharded_tensor
from meshfuse.passes.forget_loops import with_plain_loops


def whole_name(chunk: TensorName) -> TensorName:
    """The tensor that a name is of that `chunk_exprs` has given, or the name of another tensor."""
    return TensorName(chunk.partition("_")[0])


def close_name(chunk: TensorName) -> TensorName:
    """The pieces of a chunk, one behind the other, as a tensor that has an axis more."""
    return TensorName(f"{chunk}_close")


def is_of_pieces(expr: Expr) -> bool:
    """Whether all that `expr` does is to show a chunk as its pieces, or these as the chunk."""
    return isinstance(expr, Reshape) and (
        expr.out == close_name(expr.src) or expr.src == close_name(expr.out)
    )


def add_chunk(
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
    return give_name(placed, temporary, name)


def add_in_pieces(
    program: Program, source: TensorName, name: TensorName, place: int, cut: Cut, k: IntExpr
) -> Program:
    """Enter a tensor for chunk k of `source` along the axis at `place`, which becomes two: which
    block, and what the chunk has of that.

    [8@.., 4], 2 blocks of 4 in chunks of 2   ->   [2, 2, 4]
    """
    definition, sharding = program.tensor(source), sharding_of(program, source)
    blocks, inside = cut.blocks, cut.block_extent(k)
    block_digits = canonical(cut.above, blocks, None)
    inside_digits = canonical(cut.block_digits(k), inside, None)
    axes, digits = list(definition.tensor_axes), list(sharding.axes)
    shapes = [(axis.kind, axis.extent) for axis in axes]
    kind = axes[place].kind
    shapes[place : place + 1] = [(kind, blocks), (kind, inside)]
    digits[place : place + 1] = [block_digits, inside_digits]
    program, axes = fresh_axes(program, shapes)
    like = TensorDef(definition.dtype, axes, is_cpu=definition.is_cpu)
    placed = replace(sharding, axes=tuple(digits))
    program, temporary = new_sharded_tensor(add_tensor(program, name, like), name, placed)
    return give_name(program, temporary, name)


def give_name(program: Program, old: TensorName, new: TensorName) -> Program:
    """A tensor that nothing defines or reads, under another name."""
    tensors, schedules = dict(program.fusion.tensors), dict(program.schedules)
    tensors[new], schedules[new] = tensors.pop(old), schedules.pop(old)
    return replace(program, fusion=replace(program.fusion, tensors=tensors), schedules=schedules)


def shortened(program: Program, tensor: TensorName, axis: AxisName, extent: IntExpr) -> Program:
    """The tensor with another extent of an axis."""
    definition = program.tensor(tensor)

    def short(axes: tuple[IterDomain, ...]) -> tuple[IterDomain, ...]:
        return tuple(replace(a, extent=extent) if a.name == axis else a for a in axes)

    definition = replace(definition, logical=short(definition.logical), root=short(definition.root))
    return add_tensor(program, tensor, definition, program.schedule(tensor))


def lay_out(program: Program, tensor: TensorName, layout: Layout) -> Program:
    """The tensor in memory as a layout says."""
    allocation = allocation_of(program, tensor, layout)
    return program.with_schedule(tensor, replace(program.schedule(tensor), allocation=allocation))


def view_layout(program: Program, tensor: TensorName, place: int) -> Layout:
    """That of a chunk in a tensor: the next slower axis steps over the others."""
    layout, sizes = layout_of(program, tensor), local_extents(program, tensor)
    flags = list(layout.contiguity)
    for position in reversed(range(layout.order.index(place))):
        if flags[position] is not None and sizes[layout.order[position]] is not const(1):
            flags[position] = False
            break
    return Layout(layout.order, tuple(flags))


def merge_pieces(program: Program, tensor: TensorName, place: int, cut: Cut) -> Program:
    """Say of the axis at `place` that a reshape merges it of the two of its pieces."""
    definition = program.tensor(tensor)
    axis = definition.tensor_axes[place]
    inside = quotient_if_exact(axis.extent, cut.blocks)
    assert inside is not None
    program, pair = fresh_axes(program, [(axis.kind, cut.blocks), (axis.kind, inside)])
    root = (pair if a == axis else (a,) for a in definition.logical)
    steps = (Merge(pair[0].name, pair[1].name, axis.name),)
    made = replace(definition, root=tuple(a for axes in root for a in axes), root_steps=steps)
    return add_tensor(program, tensor, made, program.schedule(tensor))


def split_pieces(program: Program, tensor: TensorName, place: int) -> Program:
    """Say of the axes at `place` and behind it that a reshape splits one axis into them."""
    definition = program.tensor(tensor)
    outer, inner = definition.tensor_axes[place : place + 2]
    program, (axis,) = fresh_axes(program, [(outer.kind, outer.extent * inner.extent)])
    root = tuple(axis if a == outer else a for a in definition.logical if a != inner)
    steps = (Split(axis.name, outer.name, inner.name, inner.extent, inner_split=True),)
    made = replace(definition, root=root, root_steps=steps)
    return add_tensor(program, tensor, made, program.schedule(tensor))


def order_in_pieces(order: Sequence[int], place: int) -> tuple[int, ...]:
    """A memory order for a tensor whose axis at `place` is two, which lie side by side."""
    later = ((p + (p > place),) if p != place else (place, place + 1) for p in order)
    return tuple(axis for axes in later for axis in axes)


def pieces_layout(layout: Layout, place: int) -> Layout:
    """That of a chunk in pieces where these lie, `layout` being that of the whole."""
    at = layout.order.index(place)
    flags = (*layout.contiguity[:at], False, *layout.contiguity[at:])
    return Layout(order_in_pieces(layout.order, place), flags)


# Loop nests.


def without_streams(program: Program) -> Program:
    """The program with tensors as they are for who does not loop along them."""
    for tensor in program.fusion.tensors:
        if not stream_leaves(program, tensor):
            continue
        schedule = program.schedule(tensor)
        bindings = {a: to for a, to in schedule.bindings.items() if to != ParallelType.stream}
        if bindings:
            program = program.with_schedule(tensor, replace(schedule, bindings=bindings))
        else:
            program = with_plain_loops(program, tensor)
    return program


def without_leaf(program: Program, tensor: TensorName, leaf: AxisName, size: IntExpr) -> Program:
    """The loop nest of a chunk: the splits that made the stream leaf go, and what is left of the
    axis that they split, `size` of its indices, takes its place.

    a0 -> (a1 on the stream, a2), a2 -> (a3 on the mesh, a4)   becomes   a0 -> (a3 on the mesh, a4)
    """
    schedule = program.schedule(tensor)
    bindings = {name: bound for name, bound in schedule.bindings.items() if name != leaf}
    if not bindings:
        return with_plain_loops(program, tensor)
    steps, leaves = list(schedule.steps), list(schedule.leaves)
    swizzle = next((s for s in steps if isinstance(s, Swizzle1d) and s.out == leaf), None)
    if swizzle is not None:
        steps.remove(swizzle)
        leaves[leaves.index(leaf)] = leaf = swizzle.source
    split = next((s for s in steps if isinstance(s, Split) and s.outer == leaf), None)
    if split is not None:
        steps.remove(split)
        rest, leaf = {split.inner: split.source}, split.source
        steps = [_step_on(step, rest) for step in steps]
        leaves = [rest.get(name, name) for name in leaves if name != split.outer]
        bindings = {rest.get(name, name): bound for name, bound in bindings.items()}
    steps = [_resized(step, leaf, size) for step in steps]
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
