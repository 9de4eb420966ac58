"""Host loops: a stream leaf says that the host works through an axis in chunks.

    a0{7}, split into 3 outer ones, those bound to the stream   ->   chunks 0..2, 3..5, 6
    a0{16}, split [2@stream, 4@mesh_x, 2]                       ->   chunks 0..7, 8..15 of all ranks

A chunk is one piece of what a rank holds of the axis; of a tensor without a stream leaf that meets
one which has it, the piece with the same indices.
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
    """What a rank holds of an axis, `held` elements, in chunks of `size`, the last maybe shorter.

    `above`, `below`: the digits of a chunk before and after the one that is cut. `ranks`: how many
    share a chunk.
    """

    held: IntExpr
    size: IntExpr
    count: IntExpr
    above: Digits
    below: Digits
    ranks: IntExpr

    def start(self, k: IntExpr) -> IntExpr:
        """Where chunk k begins in what the rank holds."""
        return k * self.size

    def held_extent(self, k: IntExpr) -> IntExpr:
        """What the rank holds of chunk k."""
        if known_equal(self.size * self.count, self.held):
            return self.size
        return minimum(self.size, maximum(self.held - k * self.size, 0))

    def extent(self, k: IntExpr) -> IntExpr:
        """What all ranks hold of it."""
        return self.held_extent(k) * self.ranks

    def digits(self, k: IntExpr) -> Digits:
        """Who holds what of chunk k."""
        inner = local_extent(self.below)
        cut = self.held_extent(k) if not self.below else quotient_if_exact(self.size, inner)
        assert cut is not None
        found = (*self.above, Digit(cut), *self.below)
        return canonical(found, self.extent(k), None)


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
            case Split(source, outer, _) if (loop := _loop_over(schedule, outer)) is not None:
                if schedule.leaves.index(loop) > schedule.leaves.index(leaf):
                    return f"{loop} stands inside it, of whose chunks it makes pieces"
                around, axis = around * axes[outer].extent, source
            case Split(source, outer, _):
                if any(digit.owner is None for digit in axis_digits(program, tensor)[outer]):
                    return f"{outer} stands above it: a chunk would be pieces of what a rank holds"
                blocks, axis = blocks * axes[outer].extent, source
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
    if extent is None:
        return f"the chunks of axis {domain} are not all of one size"
    span = Span(extent, blocks, axes[leaf].extent, width, around)
    if cut_axis(program, tensor, axis, span) is None:
        return f"ranks may hold unequal parts of the chunks of axis {domain}"
    return Stream(leaf, axis, span, is_reduced, rotation)


def _loop_over(schedule: Schedule, axis: AxisName) -> AxisName | None:
    """The stream leaf that an axis is, or is as swizzled."""
    swizzles = (step for step in schedule.steps if isinstance(step, Swizzle1d))
    names = {axis, *(step.out for step in swizzles if step.source == axis)}
    return next((a for a in schedule.leaves if a in names and is_stream(schedule, a)), None)


def is_stream(schedule: Schedule, leaf: AxisName) -> bool:
    """Whether a leaf is a loop of the host."""
    return schedule.binding(leaf) == ParallelType.stream


def cut_axis(program: Program, tensor: TensorName, axis: AxisName, span: Span) -> Cut | None:
    """The chunks of `span` in what a rank holds of an axis; None where they are not one piece each,
    or ranks may hold unequal parts."""
    extent, mesh = program.all_axes(tensor)[axis].extent, program.schedule(tensor).mesh
    digits = canonical(axis_digits(program, tensor)[axis], extent, mesh)
    place, blocks = 0, const(1)
    while place < len(digits) and digits[place].owner is not None:
        blocks, place = blocks * digits[place].extent, place + 1
    is_sharded = any(digit.owner is not None for digit in digits)
    if blocks is not span.blocks or place == len(digits):
        return None
    if is_sharded and not is_even(digits, extent):
        return None
    above, below = digits[:place], digits[place + 1 :]
    first = quotient_if_exact(digits[place].extent, span.around)
    if first is None:
        return None
    if not below:
        return Cut(first, span.width, span.count, above, below, blocks)
    inner = local_extent(below)
    outer = quotient_if_exact(first, span.count)
    ranks_below = mul(const(1), *(digit.extent for digit in below if digit.owner is not None))
    if outer is None or not known_equal(outer * inner * ranks_below, span.width):
        return None
    return Cut(first * inner, outer * inner, span.count, above, below, blocks * ranks_below)
