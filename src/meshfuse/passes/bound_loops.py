"""Loops around communications, bound as a form of overlap says: axes are split, leaves bound.

rows of T2 [a0{64}, ..], in 4 chunks            ->   [4 on the stream, 16]
rows that are gathered over 2 ranks, by peers   ->   [2 on the stream, 32], rotated by rank

T3 = all_reduce(T2, mesh_x), by peers           ->   T4 = reduce_scatter(T2, mesh_x, 0);
                                                     T3 = all_gather(T4, mesh_x, 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshfuse.facts.layout import contiguous_in, layout_of
from meshfuse.facts.overlap_form import Overlap, Way
from meshfuse.facts.sharding import sharding_of
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.comm import AllGather, AllReduce, ReduceScatter
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import replace_expr
from meshfuse.ir.schedule import Merge, Schedule, Split, Swizzle1d
from meshfuse.ir.transforms import split, swizzle1d
from meshfuse.passes.apply_sharding import new_sharded_tensor
from meshfuse.passes.chunk_tensors import lay_out
from meshfuse.passes.propagate_streams import on_stream

Reached = AllGather | AllReduce | ReduceScatter
"""Communications that a loop may hold."""


def bind_loop(
    program: Program, communication: Reached, tensor: TensorName, axis: AxisName, form: Overlap
) -> Program:
    """Split an axis of a tensor that is communicated, and bind; as it is where no leaf is free.

    [n] -> [4 on the stream, n/4], or of what is gathered [d, 4 on the stream, n/d/4];
    [n] -> [d on the stream, n/d] for peers, or in pieces [d on the stream, 2 on the stream, n/d/2],
    as the block of each rank is of what is scattered
    """
    if form.way is Way.peers and isinstance(communication, AllReduce):
        return _bind_halves(program, communication, axis, form.count)
    place = _leaf_of(program.schedule(tensor), axis)
    if place is None:
        return program
    if form.way is Way.chunks:
        if isinstance(communication, AllGather) and _is_gathered(program, communication, axis):
            ranks = team_size(program, tensor, communication.mesh_axis)
            program = split(program, tensor, place, ranks, inner_split=False)
            place += 1
        program = split(program, tensor, place, form.count, inner_split=False)
        return on_stream(program, tensor, place)
    ranks = team_size(program, tensor, communication.mesh_axis)
    program = split(program, tensor, place, ranks, inner_split=False)
    if form.count > 1:
        program = split(program, tensor, place + 1, form.count, inner_split=False)
    scatters = isinstance(communication, ReduceScatter)
    program = swizzle1d(program, tensor, place, communication.mesh_axis, int(scatters))
    program = on_stream(program, tensor, place)
    if form.count == 1:
        return program
    program = on_stream(program, tensor, place + 1)
    return _bind_pieces(program, communication, form.count) if scatters else program


def _bind_pieces(program: Program, scatter: ReduceScatter, pieces: int) -> Program:
    """The result of a reduce-scatter in the pieces in which peers deliver its terms.

    rows of T2 [d on mesh_x, n/d]   ->   [d on mesh_x, 2 on the stream, n/d/2]
    """
    out = scatter.out
    place = _leaf_of(program.schedule(out), program.tensor(out).tensor_axes[scatter.axis].name)
    if place is None:
        return program
    return on_stream(split(program, out, place, pieces, inner_split=False), out, place)


def _bind_halves(program: Program, reduce: AllReduce, axis: AxisName, pieces: int) -> Program:
    """An all-reduce as what peers do: each sums a block of each piece of the axis, in a loop that
    delivers terms, and fetches the others' blocks, in another one.

    T3 = all_reduce(T2, mesh_x), rows of both [n], 2 pieces, d ranks
    ->  T4 = reduce_scatter(T2, mesh_x, 0);  T3 = all_gather(T4, mesh_x, 0)
        rows of T2 and T3 [2 on the stream, d on the stream, n/d/2],
        of T4 [2 on the stream, d on mesh_x, n/d/2]
    """
    out, src, mesh_axis, whole = reduce.out, reduce.src, reduce.mesh_axis, program
    position = [own.name for own in program.tensor(out).tensor_axes].index(axis)
    ranks = team_size(program, out, mesh_axis)
    program, part = new_sharded_tensor(program, out, sharding_of(program, out))
    order = layout_of(program, out).order
    program = lay_out(program, part, contiguous_in(program, part, order))
    for tensor, offset in ((src, 1), (part, None), (out, 0)):
        name = program.tensor(tensor).tensor_axes[position].name
        place = _leaf_of(program.schedule(tensor), name)
        if place is None:
            return whole
        if pieces > 1:
            program = split(program, tensor, place, pieces, inner_split=False)
            program = on_stream(program, tensor, place)
            place += 1
        program = split(program, tensor, place, ranks, inner_split=False)
        if offset is None:
            program = _bound(program, tensor, place, mesh_axis)
        else:
            program = swizzle1d(program, tensor, place, mesh_axis, offset)
            program = on_stream(program, tensor, place)
    halves: Sequence[ReduceScatter | AllGather] = (
        ReduceScatter(part, src, mesh_axis, position, reduce.function),
        AllGather(out, part, mesh_axis, position),
    )
    return replace_expr(program, reduce, halves)


def _bound(program: Program, tensor: TensorName, place: int, to: ParallelType) -> Program:
    """A leaf bound to a mesh axis, which need not divide."""
    schedule = program.schedule(tensor)
    bindings = {**schedule.bindings, schedule.leaves[place]: to}
    return program.with_schedule(tensor, replace(schedule, bindings=bindings))


def _is_gathered(program: Program, gather: AllGather, axis: AxisName) -> bool:
    return program.tensor(gather.out).tensor_axes[gather.axis].name == axis


def team_size(program: Program, tensor: TensorName, mesh_axis: ParallelType) -> int:
    """How many ranks there are along a mesh axis of a tensor, which lies on a mesh."""
    mesh = program.schedule(tensor).mesh
    assert mesh is not None
    return mesh.axis_size(mesh_axis)


def _leaf_of(schedule: Schedule, axis: AxisName) -> int | None:
    """The place of the outermost leaf of an axis that no mesh axis has; None if something has."""
    below = [axis]
    for step in schedule.steps:
        match step:
            case Split(source, outer, inner) if source in below:
                place = below.index(source)
                below[place : place + 1] = [outer, inner]
            case Merge(outer, inner) if outer in below or inner in below:
                return None
            case Swizzle1d(source) if source in below:
                return None
            case _:
                pass
    for leaf in below:
        if not schedule.binding(leaf).is_mesh:
            return None if leaf in schedule.bindings else schedule.leaves.index(leaf)
    return None
