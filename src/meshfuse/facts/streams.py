"""Host loops: a stream leaf says that the host works through an axis in chunks.

    a0{7}, split into 3 outer ones, those bound to the stream   ->   chunks 0..2, 3..5, 6
    a0{16}, split [2@stream, 4@mesh_x, 2]                       ->   chunks 0..7, 8..15 of all ranks

    a0{16}, split [2, 4@stream, 2]                  ->   chunks 0 1 8 9, 2 3 10 11, ..

A chunk is one piece of each block of an axis, of blocks that are all alike: what a rank holds of it
is one piece where ranks have a block each, else several at equal distances. Of a tensor without a
stream leaf that meets one which has it, it is what has the same indices.
"""

from __future__ import annotations

from dataclasses import field
from functools import partial
from typing import final

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import (
    IntExpr,
    Symbol,
    const,
    const_value,
    known_equal,
    maximum,
    minimum,
    mod,
    mul,
    symbol,
)
from meshfuse.expr.polynomial import quotient_if_exact
from meshfuse.facts.holdings import coordinate_symbol, is_even
from meshfuse.facts.sharding import Digit, Digits, axis_digits, canonical, local_extent
from meshfuse.ir.axes import AxisKind, AxisName, TensorName
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Merge, Schedule, Split, Swizzle1d, step_results


@final
@frozen_dataclass
class Span:
    """Which indices of an axis of `extent` the k-th of `count` chunks has, of all ranks together:
    in each of `blocks` equal blocks, the `width` from k * width on.

    `around`: how many iterations loops around this one have along the same axis; what it says is of
    one of their chunks.
    """

    extent: IntExpr
    blocks: IntExpr
    count: IntExpr
    width: IntExpr
    around: IntExpr = field(default_factory=lambda: const(1))


@final
@frozen_dataclass
class Rotation:
    """A rank begins with the chunk of its own number along `mesh_axis`, or `offset` behind it."""

    mesh: DeviceMesh
    mesh_axis: ParallelType
    offset: int = 0


@final
@frozen_dataclass
class Stream:
    """The loop along root (else logical) axis `axis` of a tensor, that `leaf` is bound to.

    `is_reduced`: the tensor is a sum over the axis; iterations add to it.
    """

    leaf: AxisName
    axis: AxisName
    span: Span
    is_reduced: bool
    rotation: Rotation | None = None

    def chunk_number(self, iteration: IntExpr) -> IntExpr:
        """Which chunk an iteration works on."""
        if self.rotation is None:
            return iteration
        coordinate = coordinate_symbol(self.rotation.mesh, self.rotation.mesh_axis)
        return mod(iteration + coordinate + self.rotation.offset, self.span.count)


@final
@frozen_dataclass
class Cut:
    """What a rank holds of an axis, or of each of its blocks if it has several: `held` elements, in
    chunks of `size`, the last maybe shorter.

    `above`, `below`: the digits of a chunk before and after the one that is cut; of those above,
    local ones count the pieces that a rank holds of a chunk.
    """

    held: IntExpr
    size: IntExpr
    count: IntExpr
    above: Digits
    below: Digits

    @property
    def pieces(self) -> IntExpr:
        """How many pieces a rank holds of a chunk, `held` apart."""
        return local_extent(self.above)

    @property
    def blocks(self) -> IntExpr:
        """Into how many blocks ranks and pieces divide a chunk."""
        return mul(const(1), *(digit.extent for digit in self.above))

    def start(self, k: IntExpr) -> IntExpr:
        """Where chunk k begins in what the rank holds, or in each block of that."""
        return k * self.size

    def held_extent(self, k: IntExpr) -> IntExpr:
        """What the rank holds of chunk k, in one piece."""
        if known_equal(self.size * self.count, self.held):
            return self.size
        return minimum(self.size, maximum(self.held - k * self.size, 0))

    @property
    def ranks_below(self) -> IntExpr:
        """How many ranks share a chunk of one block."""
        return mul(const(1), *(digit.extent for digit in self.below if digit.owner is not None))

    def block_extent(self, k: IntExpr) -> IntExpr:
        """What all ranks hold of chunk k in one block."""
        return self.held_extent(k) * self.ranks_below

    def extent(self, k: IntExpr) -> IntExpr:
        """What all ranks hold of it."""
        return self.block_extent(k) * self.blocks

    def block_digits(self, k: IntExpr) -> Digits:
        """Who holds what of chunk k in one block."""
        inner = local_extent(self.below)
        cut = self.held_extent(k) if not self.below else quotient_if_exact(self.size, inner)
        assert cut is not None
        return (Digit(cut), *self.below)

    def digits(self, k: IntExpr) -> Digits:
        """Who holds what of chunk k."""
        return canonical((*self.above, *self.block_digits(k)), self.extent(k), None)


def loop_index(name: str, count: IntExpr) -> Symbol:
    """The index of a loop of `count` iterations."""
    known = const_value(count)
    return symbol(name, 0, None if known is None else max(known - 1, 0))


# Deriving.


def stream_leaves(program: Program, tensor: TensorName) -> tuple[AxisName, ...]:
    """The leaves bound to the stream, outermost first."""
    schedule = program.schedule(tensor)
    if ParallelType.stream not in schedule.bindings.values():
        return ()
    return tuple(a for a in schedule.leaves if is_stream(schedule, a))


def has_streams(program: Program) -> bool:
    """Whether any tensor has a stream leaf."""
    return any(stream_leaves(program, tensor) for tensor in program.fusion.tensors)


def streams_of(program: Program, tensor: TensorName) -> tuple[Stream, ...]:
    """The host loops of a tensor, outermost first, where passes have left those that can be."""
    return program.remember("streams", tensor, partial(_find_streams, program))


def _find_streams(program: Program, tensor: TensorName) -> tuple[Stream, ...]:
    found = [find_stream(program, tensor, leaf) for leaf in stream_leaves(program, tensor)]
    for stream in found:
        if isinstance(stream, str):
            raise InvariantError(f"stream leaf of {tensor}: {stream}")
    return tuple(stream for stream in found if isinstance(stream, Stream))


def find_stream(program: Program, tensor: TensorName, leaf: AxisName) -> Stream | str:
    """The loop that a stream leaf asks for, or why there is none."""
    schedule, axes = program.schedule(tensor), program.all_axes(tensor)
    axis, width, blocks, around, rotation = leaf, const(1), const(1), const(1), None
    for step in reversed(schedule.steps):
        if axis not in step_results(step):
            continue
        match step:
            case Swizzle1d(source, _, mesh_axis, offset):
                if axis != leaf or schedule.mesh is None or not schedule.mesh.has(mesh_axis):
                    return f"axis {axis} is swizzled by {mesh_axis} outside the loop"
                rotation, axis = Rotation(schedule.mesh, mesh_axis, offset), source
            case Split(source, outer, inner) if axis == outer:
                width, axis = width * axes[inner].extent, source
            case Split(source, outer, _):
                loops = _loops_over(schedule, outer)
                late = [a for a in loops if schedule.leaves.index(a) > schedule.leaves.index(leaf)]
                if late:
                    return f"{late[0]} stands inside it, of whose chunks it makes pieces"
                passes = mul(const(1), *(axes[loop].extent for loop in loops))
                above = quotient_if_exact(axes[outer].extent, passes)
                if above is None:
                    return f"the chunks of axis {axes[outer]} are not all of one size"
                around, blocks, axis = around * passes, blocks * above, source
            case Merge(outer, inner):
                return f"{axis} is merged of {outer} and {inner}"
    names = {a.name for a in program.tensor(tensor).maybe_root}
    if axis not in names:
        return f"axis {axis} is what a reshape makes of others"
    domain = axes[axis]
    is_reduced = domain.kind is AxisKind.reduction
    if not is_reduced and not domain.kind.is_tensor_axis:
        return f"axis {domain} has the terms of ranks"
    extent = quotient_if_exact(domain.extent, around)
    if extent is None or not _ends_with_an_index(program, tensor, leaf):
        return f"the chunks of axis {domain} are not all of one size"
    span = Span(extent, blocks, axes[leaf].extent, width, around)
    if cut_axis(program, tensor, axis, span) is None:
        return f"ranks may hold unequal parts of the chunks, or blocks, of axis {domain}"
    return Stream(leaf, axis, span, is_reduced, rotation)


def _loops_over(schedule: Schedule, axis: AxisName) -> tuple[AxisName, ...]:
    """The stream leaves, outermost first, that an axis is or was split and swizzled into."""
    names = {axis}
    for step in schedule.steps:
        if isinstance(step, Split | Swizzle1d) and step.source in names:
            names.update(step_results(step))
    return tuple(a for a in schedule.leaves if a in names and is_stream(schedule, a))


def extent_below(program: Program, tensor: TensorName, leaf: AxisName) -> IntExpr:
    """How many elements lie below one index of the axis that a stream leaf was split off.

    a0{12} -> [a1{4}, a2{3}], a1 -> [a3{2} on the stream, a4{2}]   ->   3
    """
    axes, (_, further) = program.all_axes(tensor), _splits_above(program.schedule(tensor), leaf)
    return mul(const(1), *(axes[split.inner].extent for split in further))


def _ends_with_an_index(program: Program, tensor: TensorName, leaf: AxisName) -> bool:
    """Whether all chunks are of whole indices of the axis that a leaf was split off. The last one
    is, too, if no split rounds up. Where no other leaf is bound a chunk gets plain loops, which may
    end anywhere."""
    schedule, axes = program.schedule(tensor), program.all_axes(tensor)
    own, further = _splits_above(schedule, leaf)
    if len(schedule.bindings) == 1 or not further:
        return True
    return all(
        known_equal(axes[split.outer].extent * axes[split.inner].extent, axes[split.source].extent)
        for split in (*own, *further)
    )


def _splits_above(
    schedule: Schedule, leaf: AxisName
) -> tuple[tuple[Split, ...], tuple[Split, ...]]:
    """The split by which a leaf, but for a swizzle, is the outer part of an axis, if there is one;
    and those by which that axis is, or is in, the outer part of others, last ones first."""
    axis, own, further = leaf, list[Split](), list[Split]()
    for step in reversed(schedule.steps):
        match step:
            case Swizzle1d(source, out) if out == axis:
                leaf = source if axis == leaf else leaf
                axis = source
            case Split(source, outer, inner) if axis in (outer, inner):
                if axis == outer:
                    (own if outer == leaf else further).append(step)
                axis = source
            case _:
                pass
    return tuple(own), tuple(further)


def is_stream(schedule: Schedule, leaf: AxisName) -> bool:
    """Whether a leaf is a loop of the host."""
    return schedule.binding(leaf) == ParallelType.stream


def cut_axis(program: Program, tensor: TensorName, axis: AxisName, span: Span) -> Cut | None:
    """The chunks of `span` in what a rank holds of an axis; None where they are not equal pieces at
    equal distances, or ranks may hold unequal parts."""
    extent, mesh = program.all_axes(tensor)[axis].extent, program.schedule(tensor).mesh
    digits = canonical(axis_digits(program, tensor)[axis], extent, mesh)
    is_sharded = any(digit.owner is not None for digit in digits)
    if is_sharded and not is_even(digits, extent):
        return None
    parts = _divided(digits, span.blocks)
    if parts is None:
        return None
    above, (cut, *rest) = parts
    first, below = quotient_if_exact(cut.extent, span.around), tuple(rest)
    if cut.owner is not None or first is None:
        return None
    if not below:
        return Cut(first, span.width, span.count, above, below)
    inner = local_extent(below)
    outer = quotient_if_exact(first, span.count)
    if outer is None:
        return None
    found = Cut(first * inner, outer * inner, span.count, above, below)
    return found if known_equal(found.size * found.ranks_below, span.width) else None


def _divided(digits: Digits, blocks: IntExpr) -> tuple[Digits, Digits] | None:
    """The digits that count `blocks`, and those of an index in one.

    [2@x, 6], 2  ->  [2@x], [6]        [6], 2  ->  [2], [3]        [2@x, 6], 4  ->  [2@x, 2], [3]
    [6], 6       ->  [6], [1]
    """
    place, rest = 0, blocks
    while place < len(digits) and rest is not const(1):
        digit = digits[place]
        further = quotient_if_exact(rest, digit.extent)
        if further is None:
            inside = quotient_if_exact(digit.extent, rest)
            if digit.owner is not None or inside is None:
                return None
            return (*digits[:place], Digit(rest)), (Digit(inside), *digits[place + 1 :])
        place, rest = place + 1, further
    if rest is not const(1):
        return None
    return digits[:place], digits[place:] or (Digit(const(1)),)
