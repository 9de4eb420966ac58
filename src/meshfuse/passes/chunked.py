"""What host loops make of their tensors: chunks, for one iteration.

T1 [a0{7}, a1{4}] exists outside, a0 in 3 chunks    ->   T1_j0 [min(3, 7 - 3*j0), 4], a view of T1

T1 [a0{8}, a1{4}], chunks of 2 of each of 2 blocks  ->   T1_j0_apart [2, 2, 4], a view of T1;
                                                         T1_j0_close, a copy; T1_j0 [4, 4] of that
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import final

from meshfuse.base.errors import InvariantError
from meshfuse.expr import IntExpr, Symbol, const
from meshfuse.expr.polynomial import quotient_if_exact
from meshfuse.facts.layout import contiguous_in, layout_of
from meshfuse.facts.sharding import sharding_of
from meshfuse.facts.streams import Cut, Stream, cut_axis, extent_below
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.ops import Expr, Reshape, Set
from meshfuse.ir.program import Program
from meshfuse.ir.replay import clone_tensor, without_reductions
from meshfuse.passes.chunk_tensors import (
    add_chunk,
    add_in_pieces,
    close_name,
    give_name,
    lay_out,
    merge_pieces,
    order_in_pieces,
    pieces_layout,
    shortened,
    split_pieces,
    view_layout,
    without_leaf,
)
from meshfuse.passes.forget_loops import with_plain_loops

Place = tuple[TensorName, int, IntExpr, IntExpr | None]
"""Where a chunk is: tensor, axis, start, number of pieces if it is no single one."""


@final
@dataclass(slots=True, eq=False, repr=False)
class Chunked:
    """The expressions of a loop for one iteration, in a program that has their chunks' tensors.

    `exprs`: for each expression of the loop what takes its place; `reads` and `writes`: what brings
    the pieces of chunks together in front of it, and takes them apart behind it.
    `slices`: chunks of tensors that exist outside, each with that tensor, the place of the axis,
    where it begins, and how many blocks have a piece of it if they are several. Of those, `made`
    are made in the loop. `sums`: tensors that iterations add to, by the name of the result of the
    addition; `sums_so_far`: by the name of what is added to.
    `wholes`: tensors without the axis, which each iteration makes alike, by the name of what it
    makes.
    """

    program: Program
    index: Symbol
    exprs: list[tuple[Expr, ...]] = field(default_factory=list[tuple[Expr, ...]])
    reads: list[list[Expr]] = field(default_factory=list[list[Expr]])
    writes: list[list[Expr]] = field(default_factory=list[list[Expr]])
    slices: dict[TensorName, Place] = field(default_factory=dict[TensorName, Place])
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
        return tuple(name for name, (source, *_) in self.slices.items() if source in made)


# Read.


def chunk_read(work: Chunked, source: TensorName, axis: AxisName, stream: Stream) -> TensorName:
    """The chunk of a tensor that is made in the loop or exists outside."""
    if (source, axis) in work.names:
        return work.names[source, axis]
    cut = cut_of(work.program, source, axis, stream)
    place = place_of(work.program, source, axis)
    name = fresh_chunk(work, source, place)
    if cut.pieces is not const(1):
        close = pieces_close(work, source, name, axis, stream)
        work.reads[-1].append(Set(close, pieces_apart(work, source, name, axis, stream)))
        work.reads[-1].append(chunk_of_pieces(work, source, name, axis, stream))
        return name
    _add_like(work, source, name, place, cut, stream)
    work.program = lay_out(work.program, name, view_layout(work.program, source, place))
    work.slices[name] = (source, place, cut.start(stream.chunk_number(work.index)), None)
    work.names[source, axis] = name
    return name


def _add_like(
    work: Chunked, source: TensorName, name: TensorName, place: int, cut: Cut, stream: Stream
) -> None:
    """Enter a tensor for the chunk that `source` has along the axis at `place`."""
    k, sharding = stream.chunk_number(work.index), sharding_of(work.program, source)
    extents = [a.extent for a in work.program.tensor(source).tensor_axes]
    axes = [*sharding.axes]
    extents[place], axes[place] = cut.extent(k), cut.digits(k)
    placed = replace(sharding, axes=tuple(axes))
    work.program = add_chunk(work.program, source, name, extents, placed)


# Made.


def chunk_made(work: Chunked, out: TensorName, stream: Stream, *, is_kept: bool) -> TensorName:
    """The tensor for what an expression makes of `out`: a chunk, or a term of a sum."""
    cut = cut_of(work.program, out, stream.axis, stream)
    k = stream.chunk_number(work.index)
    name = fresh_chunk(work, out)
    program, temporary, renamed = clone_tensor(work.program, out)
    program = shortened(program, temporary, renamed[stream.axis], cut.extent(k))
    left = quotient_if_exact(cut.block_extent(k), extent_below(work.program, out, stream.leaf))
    if left is None:
        raise InvariantError(f"chunks of {out} end within what {stream.leaf} was split off")
    program = without_leaf(program, temporary, renamed[stream.leaf], left)
    work.program = give_name(program, temporary, name)
    if stream.is_reduced:
        return name
    place = place_of(work.program, out, stream.axis)
    is_view = is_kept and cut.pieces is const(1)
    if is_view:
        work.slices[name] = (out, place, cut.start(k), None)
        work.made.append(out)
        work.program = lay_out(work.program, name, view_layout(work.program, out, place))
    elif work.program.schedule(out).allocation is not None:
        order = layout_of(work.program, out).order
        work.program = lay_out(work.program, name, contiguous_in(work.program, name, order))
    work.names[out, stream.axis] = name
    if is_kept and not is_view:
        close = pieces_close(work, out, name, stream.axis, stream)
        work.writes[-1].append(pieces_of_chunk(work, name, close, place))
        write_apart(work, out, name, stream)
    return name


# In pieces.


def pieces_apart(
    work: Chunked, source: TensorName, chunk: TensorName, axis: AxisName, stream: Stream
) -> TensorName:
    """The pieces of a chunk where they lie in `source`, which exists outside."""
    name = TensorName(f"{chunk}_apart")
    if name not in work.slices:
        cut = cut_of(work.program, source, axis, stream)
        k, place = stream.chunk_number(work.index), place_of(work.program, source, axis)
        layout = pieces_layout(layout_of(work.program, source), place)
        work.program = add_in_pieces(work.program, source, name, place, cut, k)
        work.program = lay_out(work.program, name, layout)
        work.slices[name] = (source, place, cut.start(k), cut.pieces)
    return name


def pieces_close(
    work: Chunked, source: TensorName, chunk: TensorName, axis: AxisName, stream: Stream
) -> TensorName:
    """The pieces of a chunk of `source` one behind the other, in memory of their own."""
    name = close_name(chunk)
    cut = cut_of(work.program, source, axis, stream)
    k, place = stream.chunk_number(work.index), place_of(work.program, source, axis)
    order = order_in_pieces(layout_of(work.program, source).order, place)
    work.program = add_in_pieces(work.program, source, name, place, cut, k)
    work.program = lay_out(work.program, name, contiguous_in(work.program, name, order))
    return name


def pieces_of_chunk(work: Chunked, chunk: TensorName, close: TensorName, place: int) -> Expr:
    """The pieces of a chunk that lies in memory of its own, as views."""
    work.program = split_pieces(work.program, close, place)
    return Reshape(close, chunk)


def chunk_of_pieces(
    work: Chunked, source: TensorName, name: TensorName, axis: AxisName, stream: Stream
) -> Expr:
    """The chunk `name` of `source`, whose pieces lie one behind the other."""
    cut = cut_of(work.program, source, axis, stream)
    place, order = place_of(work.program, source, axis), layout_of(work.program, source).order
    _add_like(work, source, name, place, cut, stream)
    work.program = lay_out(work.program, name, contiguous_in(work.program, name, order))
    work.program = merge_pieces(work.program, name, place, cut)
    work.names[source, axis] = name
    return Reshape(name, close_name(name))


def write_apart(work: Chunked, out: TensorName, name: TensorName, stream: Stream) -> None:
    """Bring the pieces of a chunk to where they belong in `out`, which exists outside."""
    apart = pieces_apart(work, out, name, stream.axis, stream)
    work.writes[-1].append(Set(apart, close_name(name)))
    work.made.append(out)


# Names.


def place_of(program: Program, tensor: TensorName, axis: AxisName) -> int:
    """The number of a tensor axis."""
    return [a.name for a in program.tensor(tensor).tensor_axes].index(axis)


def cut_of(program: Program, tensor: TensorName, axis: AxisName, stream: Stream) -> Cut:
    """The chunks of an axis that is known to have some."""
    cut = cut_axis(program, tensor, axis, stream.span)
    if cut is None:
        raise InvariantError(f"axis {axis} of {tensor} has no chunks {stream.span}")
    return cut


def fresh_chunk(work: Chunked, tensor: TensorName, place: int | None = None) -> TensorName:
    """`T3_j0`; `T3_j0_1` for chunks along another axis, by its number."""
    name = TensorName(f"{tensor}_{work.index.name}")
    if place is not None and name in work.program.fusion.tensors:
        name = TensorName(f"{name}_{place}")
    return name


def like(work: Chunked, tensor: TensorName, name: TensorName) -> TensorName:
    """Enter a tensor like `tensor` without its reduced axes, for what it is between iterations."""
    program, temporary, _ = clone_tensor(work.program, tensor)
    program = without_reductions(program, temporary)
    if not program.schedule(temporary).bindings:
        program = with_plain_loops(program, temporary)  # what splits the kept axes binds nothing
    work.program = give_name(program, temporary, name)
    return name
