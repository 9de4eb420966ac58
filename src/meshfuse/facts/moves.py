"""The moves of redistribution: where each may lead, and what it brings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, ceildiv, const, floordiv, is_const, known_equal, mul
from meshfuse.expr.polynomial import quotient_if_exact
from meshfuse.facts.digits import is_one_block, is_whole, weights
from meshfuse.facts.received import exchanged, gathered, largest_part, nominal
from meshfuse.facts.sharding import (
    Digit,
    Digits,
    Sharding,
    canonical,
    keep_owners,
    local_extent,
    owners_of,
)
from meshfuse.ir.comm import (
    AllGather,
    AllReduce,
    Communication,
    Exchange,
    LocalSlice,
    ReduceScatter,
)
from meshfuse.ir.mesh import DeviceMesh, ParallelType


@final
@frozen_dataclass
class Move:
    """One communication, the sharding it leaves, and the elements that a rank receives, at most.

    `mesh_axis` is None for an exchange. `axis` is the tensor axis gathered, scattered or sliced, -1
    for others; `function` the reduction's name, "" where there is none. An all-reduce counts as
    reduce-scatter and all-gather. `kind` is the word for notes: the communication's name, but for
    an exchange what it amounts to (all_to_all, send_recv, broadcast, scatter, gather, exchange).
    `is_in_blocks` is False where a rank's part of `axis` is not in one piece.
    """

    communication: type[Communication]
    mesh_axis: ParallelType | None
    after: Sharding
    elements: IntExpr
    kind: str
    axis: int = -1
    function: str = ""
    is_in_blocks: bool = True


@final
@frozen_dataclass
class Moves:
    """The moves of a tensor of these extents, from shardings on `mesh`. Partial axes ride along."""

    mesh: DeviceMesh
    extents: tuple[IntExpr, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(mesh: DeviceMesh, extents: tuple[IntExpr, ...]) -> Moves:
        """With the numbers that unknown sizes are taken for."""
        return Moves(mesh, extents, tuple(map(nominal, extents)))

    def slice(self, current: Sharding, mesh_axis: ParallelType, axis: int, digits: Digits) -> Move:
        """Keep what `digits`, in place of those of `axis`, leave to a rank."""
        after = _with_axis(current, axis, digits)
        blocks = is_one_block(digits, mesh_axis)
        return Move(
            LocalSlice, mesh_axis, after, const(0), "local_slice", axis, is_in_blocks=blocks
        )

    def gather(self, current: Sharding, mesh_axis: ParallelType, axis: int) -> Move | None:
        """None where the parts of a team do not make up a part that digits can say."""
        before = current.axes[axis]
        kept = [owner for owner in owners_of(before, self.mesh) if owner != mesh_axis]
        digits = keep_owners(before, kept, self.extents[axis], self.mesh)
        if not cut_alike(before, digits):
            return None
        after = _with_axis(current, axis, digits)
        if is_const(self.extents[axis]):
            others = tuple(d for k, d in enumerate(current.axes) if k != axis)
            lacking = gathered(before, digits, mesh_axis, self.mesh, self.sizes[axis])
            received = self._largest(others, axis) * lacking
        else:
            received = self._largest(current.axes) * (self.mesh.axis_size(mesh_axis) - 1)
        blocks = is_one_block(before, mesh_axis)
        return Move(AllGather, mesh_axis, after, received, "all_gather", axis, is_in_blocks=blocks)

    def reduce(self, current: Sharding, mesh_axis: ParallelType) -> Move:
        """Combine the terms, on every rank."""
        ranks = self.mesh.axis_size(mesh_axis)
        received = floordiv(2 * (ranks - 1) * self._largest(current.axes), ranks)
        after, function = _without_terms(current, mesh_axis), current.partial[mesh_axis]
        return Move(AllReduce, mesh_axis, after, received, "all_reduce", function=function)

    def scatter(
        self, current: Sharding, mesh_axis: ParallelType, axis: int, digits: Digits
    ) -> Move:
        """Combine the terms of what `digits`, in place of those of `axis`, leave to a rank."""
        after = _with_axis(_without_terms(current, mesh_axis), axis, digits)
        received = self._largest(after.axes) * (self.mesh.axis_size(mesh_axis) - 1)
        function = current.partial[mesh_axis]
        blocks = is_one_block(digits, mesh_axis)
        return Move(
            ReduceScatter, mesh_axis, after, received, "reduce_scatter", axis, function, blocks
        )

    def exchange(self, current: Sharding, dst: Sharding) -> Move:
        """Bring what a rank lacks of `dst`; where sizes are not known, the share that it is of its
        part at the nominal ones.
        """
        lacking = exchanged(current, dst, self.sizes)
        received: IntExpr = const(lacking)
        if not all(map(is_const, self.extents)) and lacking:
            whole = largest_part(dst.axes, self.sizes)
            received = floordiv(self._largest(dst.axes) * lacking, whole)
        return Move(Exchange, None, dst, received, _kind(current, dst))

    def _largest(self, axes: tuple[Digits, ...], without: int | None = None) -> IntExpr:
        """Elements of the largest part; `axes` lack the axis `without`."""
        kept = [k for k in range(len(self.extents)) if k != without]
        if all(is_const(self.extents[k]) for k in kept):
            return const(largest_part(axes, [self.sizes[k] for k in kept]))
        return mul(const(1), *map(local_extent, axes))


def nominal_cost(move: Move) -> int:
    """The elements a move brings, at the nominal sizes."""
    return nominal(move.elements)


# How a mesh axis may cut a tensor axis.


def cut_as(
    digits: Digits, goal: Digits, mesh_axis: ParallelType, extent: IntExpr, mesh: DeviceMesh
) -> Digits | None:
    """`digits`, also cut along `mesh_axis` as `goal` is.

    None where that does not cut `goal`, or where digits cannot say it.
    """
    if all(digit.owner != mesh_axis for digit in goal):
        return None
    present, wanted = owners_of(digits, mesh), owners_of(goal, mesh)
    ranks = const(mesh.axis_size(mesh_axis))
    if all(owner in wanted for owner in present):
        made = [keep_owners(goal, (*present, mesh_axis), extent, mesh)]
    else:
        weight = weights(goal)[mesh_axis]
        made = [
            canonical(_cut_inside(digits, position, mesh_axis, ranks, below), extent, mesh)
            for position, lower in _local_digits(digits)
            if (below := quotient_if_exact(weight, lower)) not in (None, const(0))
        ]
    fitting = (d for d in made if cut_alike(digits, d) and cut_alike(goal, d))
    return next(fitting, None)


def cuts_for(
    digits: Digits, mesh_axis: ParallelType, extent: IntExpr, mesh: DeviceMesh
) -> Iterator[Digits]:
    """`digits`, also cut along `mesh_axis`: each local digit into blocks, and cyclically.

    [2@y, 6], x  ->  [2@y, 3@x, 2] and [2@y, 2, 3@x]
    """
    ranks = const(mesh.axis_size(mesh_axis))
    for position, _ in _local_digits(digits):
        most = ceildiv(digits[position].extent, ranks)
        blocks = (Digit(ranks, mesh_axis), Digit(most))
        cycle = (Digit(most), Digit(ranks, mesh_axis))
        for inside in (blocks, cycle) if most is not const(1) else (blocks,):
            cut = (*digits[:position], *inside, *digits[position + 1 :])
            found = canonical(cut, extent, mesh)
            if cut_alike(digits, found):
                yield found


def cut_alike(before: Digits, after: Digits) -> bool:
    """Whether the mesh axes that both have cut the axis alike: a digit says of an index
    `index // weight % extent`, so it is enough that weights are equal, for every size.
    """
    left, right = weights(before), weights(after)
    return all(
        weight is right[owner] or known_equal(weight, right[owner])
        for owner, weight in left.items()
        if owner in right
    )


def _cut_inside(
    digits: Digits, position: int, mesh_axis: ParallelType, ranks: IntExpr, below: IntExpr
) -> Digits:
    """`digits` with a mesh digit inside the local one at `position`, `below` left under it."""
    above = ceildiv(digits[position].extent, ranks * below)
    inside = (Digit(above), Digit(ranks, mesh_axis), Digit(below))
    return (*digits[:position], *inside, *digits[position + 1 :])


def _local_digits(digits: Digits) -> Iterator[tuple[int, IntExpr]]:
    """Positions of local digits, with the weight of one step of each."""
    weight: IntExpr = const(1)
    found: list[tuple[int, IntExpr]] = []
    for position in reversed(range(len(digits))):
        if digits[position].owner is None:
            found.append((position, weight))
        weight = weight * digits[position].extent
    yield from reversed(found)


def replaced(axes: tuple[Digits, ...], axis: int, digits: Digits) -> tuple[Digits, ...]:
    """`axes`, one of them with other digits."""
    return (*axes[:axis], digits, *axes[axis + 1 :])


def _with_axis(sharding: Sharding, axis: int, digits: Digits) -> Sharding:
    return replace(sharding, axes=replaced(sharding.axes, axis, digits))


def _without_terms(sharding: Sharding, mesh_axis: ParallelType) -> Sharding:
    partial = {owner: fn for owner, fn in sharding.partial.items() if owner != mesh_axis}
    return replace(sharding, partial=partial)


# Words.


def _kind(src: Sharding, dst: Sharding) -> str:
    """What an exchange amounts to."""
    if src.mesh is None or dst.mesh is None or src.mesh == dst.mesh:
        return "all_to_all"
    if src.mesh.shape == dst.mesh.shape and src.axes == dst.axes:
        return "send_recv"
    if src.mesh.size == 1:
        return "broadcast" if _is_whole(dst) else "scatter"
    return "gather" if dst.mesh.size == 1 and not _is_whole(src) else "exchange"


def _is_whole(sharding: Sharding) -> bool:
    return all(map(is_whole, sharding.axes))
