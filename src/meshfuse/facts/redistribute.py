"""Plan how a tensor gets from one sharding to another, one mesh axis at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from meshfuse.expr import IntExpr, const, floordiv, mul
from meshfuse.facts.refusal import Refusal
from meshfuse.facts.sharding import (
    Digits,
    Sharding,
    axis_sharded_on,
    describe,
    keep_owners,
    local_extent,
    owners_of,
)
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import AllGather, AllReduce, Communication, LocalSlice, ReduceScatter
from meshfuse.ir.mesh import DeviceMesh, ParallelType

COMMUNICATION_NAMES: Final[dict[type[Communication], str]] = {
    AllGather: "all_gather",
    AllReduce: "all_reduce",
    ReduceScatter: "reduce_scatter",
    LocalSlice: "local_slice",
}


@final
@dataclass(frozen=True, slots=True)
class Move:
    """One communication, the sharding it leaves, and what each rank receives in elements.

    `axis` is the tensor axis gathered, scattered or sliced, -1 for an all-reduce; `function` the
    reduction's name, "" where there is none. An all-reduce counts as reduce-scatter and all-gather.
    """

    communication: type[Communication]
    mesh_axis: ParallelType
    after: Sharding
    elements: IntExpr
    axis: int = -1
    function: str = ""


def plan(src: Sharding, dst: Sharding, extents: Sequence[IntExpr]) -> tuple[Move, ...] | Refusal:
    """The moves from `src` to `dst`, over axes of these (global) extents; () if they are equal.

    Reductions come first and shrink what follows, then slices, then gathers. A mesh axis that goes
    from one tensor axis to another is gathered and sliced. Blocks only: a mesh digit below a local
    one, another mesh or a new partial sum are refused.
    """
    if src.mesh != dst.mesh or src.mesh is None:
        return _refusal(src, dst, "the meshes differ; give both tensors one mesh")
    moves: list[Move] = []
    current = src
    while current != dst:
        move = next(_moves(current, dst, src.mesh, extents), None)
        if move is None:
            return _refusal(src, dst, "only block shardings move: split the axis outermost")
        moves.append(move)
        current = move.after
    return tuple(moves)


def communication_of(move: Move, out: TensorName, src: TensorName) -> Communication:
    """The expression that makes `move`."""
    if move.communication is AllReduce:
        return AllReduce(out, src, move.mesh_axis, move.function)
    if move.communication is ReduceScatter:
        return ReduceScatter(out, src, move.mesh_axis, move.axis, move.function)
    if move.communication is AllGather:
        return AllGather(out, src, move.mesh_axis, move.axis)
    return LocalSlice(out, src, move.mesh_axis, move.axis)


def _moves(
    current: Sharding, dst: Sharding, mesh: DeviceMesh, extents: Sequence[IntExpr]
) -> Iterator[Move]:
    """The legal next moves, best first. Each makes progress, so that the plan ends."""
    for mesh_axis, function in current.partial.items():
        if mesh_axis not in dst.partial:
            yield from _reductions(current, dst, mesh_axis, function, mesh, extents)
    for axis, digits in enumerate(dst.axes):
        for mesh_axis in owners_of(digits, mesh):
            if axis_sharded_on(current, mesh_axis) < 0 and mesh_axis not in current.partial:
                after = _scattered(current, dst, mesh_axis, axis, mesh, extents)
                if after is not None:
                    yield Move(LocalSlice, mesh_axis, after, const(0), axis)
    for axis, digits in enumerate(current.axes):
        owners = owners_of(digits, mesh)
        if keep_owners(dst.axes[axis], owners, extents[axis], mesh) == digits:
            continue  # Slices alone lead from here: a gather would go round in circles.
        for mesh_axis in reversed(owners):
            if _leads(digits, mesh_axis):
                yield _gather(current, mesh_axis, axis, mesh, extents)


def _reductions(
    current: Sharding,
    dst: Sharding,
    mesh_axis: ParallelType,
    function: str,
    mesh: DeviceMesh,
    extents: Sequence[IntExpr],
) -> Iterator[Move]:
    ranks = mesh.axis_size(mesh_axis)
    waiting = {owner: fn for owner, fn in current.partial.items() if owner != mesh_axis}
    axis = axis_sharded_on(dst, mesh_axis)
    if axis >= 0:
        after = _scattered(current, dst, mesh_axis, axis, mesh, extents)
        if after is not None:
            after = replace(after, partial=waiting)
            received = _elements(after) * (ranks - 1)
            yield Move(ReduceScatter, mesh_axis, after, received, axis, function)
    received = floordiv(2 * (ranks - 1) * _elements(current), ranks)
    after = replace(current, partial=waiting)
    yield Move(AllReduce, mesh_axis, after, received, function=function)


def _scattered(
    current: Sharding,
    dst: Sharding,
    mesh_axis: ParallelType,
    axis: int,
    mesh: DeviceMesh,
    extents: Sequence[IntExpr],
) -> Sharding | None:
    """`current` with `axis` also cut along `mesh_axis` as `dst` has it; None if not into blocks."""
    present = owners_of(current.axes[axis], mesh)
    goal, extent = dst.axes[axis], extents[axis]
    if keep_owners(goal, present, extent, mesh) != current.axes[axis]:
        return None
    digits = keep_owners(goal, (*present, mesh_axis), extent, mesh)
    return _with_axis(current, axis, digits) if _leads(digits, mesh_axis) else None


def _gather(
    current: Sharding,
    mesh_axis: ParallelType,
    axis: int,
    mesh: DeviceMesh,
    extents: Sequence[IntExpr],
) -> Move:
    kept = [owner for owner in owners_of(current.axes[axis], mesh) if owner != mesh_axis]
    digits = keep_owners(current.axes[axis], kept, extents[axis], mesh)
    received = _elements(current) * (mesh.axis_size(mesh_axis) - 1)
    return Move(AllGather, mesh_axis, _with_axis(current, axis, digits), received, axis)


def _leads(digits: Digits, mesh_axis: ParallelType) -> bool:
    """Whether the blocks of `mesh_axis` follow one another: no local digit stands above."""
    position = next(k for k, digit in enumerate(digits) if digit.owner == mesh_axis)
    return all(digit.owner is not None for digit in digits[:position])


def _with_axis(sharding: Sharding, axis: int, digits: Digits) -> Sharding:
    return replace(sharding, axes=(*sharding.axes[:axis], digits, *sharding.axes[axis + 1 :]))


def _elements(sharding: Sharding) -> IntExpr:
    return mul(const(1), *(local_extent(digits) for digits in sharding.axes))


def _refusal(src: Sharding, dst: Sharding, reason: str) -> Refusal:
    return Refusal("redistribute", f"{describe(src)} -> {describe(dst)}: {reason}")
