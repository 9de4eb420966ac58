"""Plan how a tensor gets from one sharding to another: the sequence that moves least.

What counts is the sum over the communications of what the rank receives that receives most. Terms
of a reduction are combined first, by a search over where the results may go. All else can be
reached in one exchange, which brings what is lacking and nothing else; collectives along one mesh
axis take its place where they bring no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from typing import Final, final

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr
from meshfuse.facts.moves import (
    Move,
    Moves,
    cut_alike,
    cut_as,
    cuts_for,
    nominal_cost,
    replaced,
)
from meshfuse.facts.received import largest_part, nominal
from meshfuse.facts.refusal import Refusal
from meshfuse.facts.sharding import Digits, Sharding, describe, keep_owners, owners_of
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import (
    AllGather,
    AllReduce,
    Communication,
    Exchange,
    LocalSlice,
    ReduceScatter,
)
from meshfuse.ir.mesh import DeviceMesh, ParallelType

__all__ = ["COMMUNICATION_NAMES", "Move", "communication_of", "leads", "plan"]

COMMUNICATION_NAMES: Final[dict[type[Communication], str]] = {
    AllGather: "all_gather",
    AllReduce: "all_reduce",
    ReduceScatter: "reduce_scatter",
    LocalSlice: "local_slice",
    Exchange: "exchange",
}


def plan(src: Sharding, dst: Sharding, extents: Sequence[IntExpr]) -> tuple[Move, ...] | Refusal:
    """The moves from `src` to `dst`, over axes of these (global) extents; () if they are equal.

    The fewest elements received; of those the fewest exchanges, then the fewest communications
    (slices are none). Terms of a reduction that `dst` has, too, stay terms.

    Refused is only what no communication makes: terms out of a whole value, terms on another mesh,
    a sharding without a mesh.
    """
    if src == dst:
        return ()
    reason = _impossible(src, dst)
    if reason is not None:
        return Refusal("redistribute", f"{describe(src)} -> {describe(dst)}: {reason}")
    return _planned(src, dst, tuple(extents))


def communication_of(move: Move, out: TensorName, src: TensorName) -> Communication:
    """The expression that makes `move`."""
    if move.mesh_axis is None:
        return Exchange(out, src)
    if move.communication is AllReduce:
        return AllReduce(out, src, move.mesh_axis, move.function)
    if move.communication is ReduceScatter:
        return ReduceScatter(out, src, move.mesh_axis, move.axis, move.function)
    if move.communication is AllGather:
        return AllGather(out, src, move.mesh_axis, move.axis)
    return LocalSlice(out, src, move.mesh_axis, move.axis)


def leads(expr: Communication, have: Sharding, want: Sharding) -> bool:
    """Whether a communication leads from one sharding to another."""
    match expr:
        case AllGather(mesh_axis=mesh_axis, axis=axis):
            return _differ_along(want, have, mesh_axis, axis) and have.partial == want.partial
        case LocalSlice(mesh_axis=mesh_axis, axis=axis):
            return _differ_along(have, want, mesh_axis, axis) and have.partial == want.partial
        case AllReduce(mesh_axis=mesh_axis, function=function):
            combined = {**want.partial, mesh_axis: function} == have.partial
            return combined and have.mesh == want.mesh and have.axes == want.axes
        case ReduceScatter(mesh_axis=mesh_axis, axis=axis, function=function):
            combined = {**want.partial, mesh_axis: function} == have.partial
            return combined and _differ_along(have, want, mesh_axis, axis)
        case Exchange():
            same = have.mesh == want.mesh or not have.partial
            return same and have.partial == want.partial and None not in (have.mesh, want.mesh)
        case _:
            return False


def _differ_along(whole: Sharding, cut: Sharding, mesh_axis: ParallelType, axis: int) -> bool:
    """Whether `cut` is `whole` with `axis` also cut along `mesh_axis`."""
    before, after = whole.axes[axis], cut.axes[axis]
    owners = {*owners_of(before, whole.mesh), mesh_axis}
    return (
        whole.mesh == cut.mesh
        and replaced(whole.axes, axis, after) == cut.axes
        and mesh_axis not in owners_of(before, whole.mesh)
        and owners == set(owners_of(after, cut.mesh))
        and cut_alike(before, after)
    )


def _impossible(src: Sharding, dst: Sharding) -> str | None:
    if src.mesh is None or dst.mesh is None:
        return "one of them has no mesh; call set_device_mesh on both tensors"
    made = [owner for owner in dst.partial if owner not in src.partial]
    if made:
        return f"terms of a reduction over {made[0]} come of computing, not of moving a whole value"
    if dst.partial and src.mesh != dst.mesh:
        return "terms of a reduction stay on their mesh; leave the target whole"
    for owner, function in dst.partial.items():
        if src.partial[owner] != function:
            return f"terms of a {src.partial[owner]} over {owner} are no terms of a {function}"
    return None


@lru_cache(1 << 13)
def _planned(src: Sharding, dst: Sharding, extents: tuple[IntExpr, ...]) -> tuple[Move, ...]:
    if src.mesh is None:
        raise InvariantError("a sharding without a mesh has no plan")
    planner = _Planner(Moves.of(src.mesh, extents), src.mesh, dst)
    return planner.combined(src) if planner.waiting(src) else planner.moved(src)


# The search.

_Cost = tuple[int, int, int, int, int]
"""Elements received, exchanges, communications, moves of parts that are no blocks, and all moves:
the less, the better.
"""

_Path = tuple[_Cost, int, Sharding, tuple[Move, ...], bool]
"""The cost, with what must still come; a number against ties; where it leads; if it is ended."""

_FREE: Final[_Cost] = (0, 0, 0, 0, 0)

_FEW_MESH_AXES: Final = 2
"""On a mesh of more axes the search does not try every cut: that would take seconds."""


def _cost(moves: Sequence[Move]) -> _Cost:
    communicating = [move for move in moves if move.communication is not LocalSlice]
    return (
        sum(map(nominal_cost, communicating)),
        sum(move.communication is Exchange for move in communicating),
        len(communicating),
        sum(not move.is_in_blocks for move in moves),
        len(moves),
    )


@final
@frozen_dataclass
class _Planner:
    """What stays as it is in one search: the moves, the mesh that they start from, the target."""

    moves: Moves
    mesh: DeviceMesh
    dst: Sharding

    @property
    def _is_small(self) -> bool:
        return sum(size > 1 for size in self.mesh.shape) <= _FEW_MESH_AXES

    def waiting(self, current: Sharding) -> list[ParallelType]:
        """The mesh axes over which terms are to be combined."""
        return [owner for owner in current.partial if owner not in self.dst.partial]

    def combined(self, src: Sharding) -> tuple[Move, ...]:
        """The best moves from where terms are waiting, ended by those of `moved`.

        Each mesh axis that waits is reduced or scattered. Each that is free may be cut before, so
        that there is less to combine. A path is ended only once its least cost is the least of all.
        """
        direct = self._single_reduction(src)
        if direct is not None:
            return (direct,)
        number = count()
        queue: list[_Path] = [(_FREE, next(number), src, (), False)]
        seen: set[Sharding] = set()
        while True:
            _, _, current, path, is_ended = heappop(queue)
            if is_ended:
                return path
            if current in seen:
                continue
            seen.add(current)
            if not self.waiting(current):
                whole = (*path, *self.moved(current))
                heappush(queue, (_cost(whole), next(number), self.dst, whole, True))
                continue
            for move in self._combining_moves(current):
                longer = (*path, move)
                cost = _cost(longer)
                cost = (cost[0] + self._least(move.after), *cost[1:])
                heappush(queue, (cost, next(number), move.after, longer, False))

    def _least(self, current: Sharding) -> int:
        """What must be received from here on, at least.

        All is combined by reduce-scatters after all free mesh axes have cut it, and what is there
        then is wanted there: n terms of e elements bring (n - 1) / n * e and leave e / n.
        """
        waiting = self.waiting(current)
        if not waiting:
            return nominal_cost(self.moves.exchange(current, self.dst))
        terms = math.prod(map(self.mesh.axis_size, waiting))
        others = [o for o in self.mesh.parallel_types() if o not in current.partial]
        elements = math.prod(self.moves.sizes) // math.prod(map(self.mesh.axis_size, others))
        wanted = largest_part(self.dst.axes, self.moves.sizes)
        received = elements * (terms - 1) // terms - len(waiting)
        return max(received, 0) + max(wanted - elements // terms, 0)

    def moved(self, src: Sharding) -> tuple[Move, ...]:
        """The best moves where no terms wait: along mesh axes, if they bring no more than one
        exchange, which brings the least that is possible.
        """
        if src == self.dst:
            return ()
        exchange = self.moves.exchange(src, self.dst)
        if self.mesh != self.dst.mesh:
            return (exchange,)
        most, number = nominal_cost(exchange), count()
        queue: list[_Path] = [(_FREE, next(number), src, (), False)]
        seen: set[Sharding] = set()
        while queue:
            _, _, current, path, _ = heappop(queue)
            if current == self.dst:
                return path
            if current in seen:
                continue
            seen.add(current)
            for move in self._steps(current):
                longer = (*path, move)
                cost = _cost(longer)
                if cost[0] <= most:
                    heappush(queue, (cost, next(number), move.after, longer, False))
        return (exchange,)

    def _steps(self, current: Sharding) -> Iterator[Move]:
        """Slices to where the target has a mesh axis, gathers of axes that lie otherwise."""
        free = self._free(current)
        for axis, (digits, goal) in enumerate(zip(current.axes, self.dst.axes, strict=True)):
            if digits == goal:
                continue
            for mesh_axis in owners_of(goal, self.mesh):
                if mesh_axis in free:
                    found = cut_as(digits, goal, mesh_axis, self.moves.extents[axis], self.mesh)
                    if found is not None:
                        yield self.moves.slice(current, mesh_axis, axis, found)
            for mesh_axis in owners_of(digits, self.mesh):
                gather = self.moves.gather(current, mesh_axis, axis)
                if gather is not None:
                    yield gather

    def _combining_moves(self, current: Sharding) -> Iterator[Move]:
        waiting = self.waiting(current)
        for mesh_axis in waiting:
            yield self.moves.reduce(current, mesh_axis)
            for cut in self._cuts(current, mesh_axis):
                yield self.moves.scatter(current, mesh_axis, *cut)
        for mesh_axis in self._free(current):
            for cut in self._cuts(current, mesh_axis):
                yield self.moves.slice(current, mesh_axis, *cut)
        yield from self._balancing_moves(current)

    def _balancing_moves(self, current: Sharding) -> Iterator[Move]:
        """Exchanges of terms along one mesh axis, where it may pay: parts of the tensor axis are
        uneven, so that others are less to combine; or they stand where results are wanted.
        """
        wanted = [
            owner for owner in self.waiting(current) if not self._cut_in_target(current, owner)
        ]
        for axis, digits in enumerate(current.axes):
            extent, size = self.moves.extents[axis], self.moves.sizes[axis]
            goal = self.dst.axes[axis] if self.mesh == self.dst.mesh else ()
            is_even = math.prod(nominal(digit.extent) for digit in digits) == size
            if is_even and not any(digit.owner in wanted for digit in goal):
                continue
            for mesh_axis in owners_of(digits, self.mesh):
                kept = [owner for owner in owners_of(digits, self.mesh) if owner != mesh_axis]
                rest = keep_owners(digits, kept, extent, self.mesh)
                without = replace(current, axes=replaced(current.axes, axis, rest))
                for cut in self._cuts(without, mesh_axis):
                    after = replace(without, axes=replaced(without.axes, *cut))
                    if after.axes != current.axes:
                        yield self.moves.exchange(current, after)

    def _cuts(self, current: Sharding, mesh_axis: ParallelType) -> list[tuple[int, Digits]]:
        """How a mesh axis may cut the tensor: as in the target, if that makes even parts.

        Else so that parts are even, but not where they are larger and what is wanted is no nearer.
        In all ways if all make uneven parts, and on meshes of few axes if some do: each may be the
        best in the end.
        """
        goal = self._cut_in_target(current, mesh_axis)
        cuts = [] if goal is None else [goal]
        if goal is not None and self._is_even(current, mesh_axis, *goal):
            return cuts
        for axis, extent in enumerate(self.moves.extents):
            found = cuts_for(current.axes[axis], mesh_axis, extent, self.mesh)
            cuts.extend((axis, digits) for digits in found)
        even = [cut for cut in cuts if self._is_even(current, mesh_axis, *cut)]
        if not even or (len(even) < len(cuts) and self._is_small):
            return cuts
        cuts = even if goal is None else [goal, *even]
        measured = [(*self._measure(current, *cut), *cut) for cut in cuts]
        kept: list[tuple[int, Digits]] = []
        least: int | None = None
        for _, lacking, axis, digits in sorted(measured, key=lambda cut: cut[:2]):
            if least is None or lacking < least:
                kept.append((axis, digits))
                least = lacking
        return kept

    def _cut_in_target(
        self, current: Sharding, mesh_axis: ParallelType
    ) -> tuple[int, Digits] | None:
        if self.mesh != self.dst.mesh:
            return None
        for axis, goal in enumerate(self.dst.axes):
            extent = self.moves.extents[axis]
            found = cut_as(current.axes[axis], goal, mesh_axis, extent, self.mesh)
            if found is not None:
                return axis, found
        return None

    def _is_even(
        self, current: Sharding, mesh_axis: ParallelType, axis: int, digits: Digits
    ) -> bool:
        size = [self.moves.sizes[axis]]
        part, whole = largest_part([digits], size), largest_part([current.axes[axis]], size)
        return part * self.mesh.axis_size(mesh_axis) == whole

    def _measure(self, current: Sharding, axis: int, digits: Digits) -> tuple[int, int]:
        """Of the parts where `axis` has these digits: the largest, and what it lacks at the end."""
        axes = replaced(current.axes, axis, digits)
        after = replace(current, axes=axes)
        lacking = nominal_cost(self.moves.exchange(after, self.dst))
        return largest_part(axes, self.moves.sizes), lacking

    def _free(self, current: Sharding) -> list[ParallelType]:
        """The mesh axes along which ranks hold the same."""
        used = {owner for digits in current.axes for owner in owners_of(digits, self.mesh)}
        return [
            owner
            for owner in self.mesh.parallel_types()
            if owner not in used and owner not in current.partial and self.mesh.axis_size(owner) > 1
        ]

    def _single_reduction(self, src: Sharding) -> Move | None:
        """The one reduction that leads to the target, where none can be better.

        No mesh axis is free to be cut before, or it would not pay as there are but two terms.
        """
        waiting = self.waiting(src)
        if len(waiting) > 1 or self.mesh != self.dst.mesh:
            return None
        (mesh_axis,) = waiting
        if self._free(src) and self.mesh.axis_size(mesh_axis) > 2:
            return None
        reduction = self.moves.reduce(src, mesh_axis)
        if reduction.after == self.dst:
            return reduction
        cut = self._cut_in_target(src, mesh_axis)
        if cut is None or not self._is_even(src, mesh_axis, *cut):
            return None
        scatter = self.moves.scatter(src, mesh_axis, *cut)
        return scatter if scatter.after == self.dst else None
