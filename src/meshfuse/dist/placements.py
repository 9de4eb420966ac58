"""A sharding as DTensor's placements: what happens on each mesh axis, in mesh-dimension order.

A Sharding says more than placements can in one place: the order of several mesh axes on one tensor
axis. In placements that order shows as strided shards, read from the first mesh axis to the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, final

from meshfuse.base.errors import Unsupported
from meshfuse.expr import const_value
from meshfuse.facts.sharding import Digits, Sharding, axis_sharded_on, describe
from meshfuse.ir.mesh import DeviceMesh, ParallelType


@final
@dataclass(frozen=True, slots=True)
class Replicate:
    """All ranks along the mesh axis hold the same."""


@final
@dataclass(frozen=True, slots=True)
class Shard:
    """The k-th rank holds the k-th block of tensor axis `dim`."""

    dim: int


@final
@dataclass(frozen=True, slots=True)
class StridedShard:
    """Tensor axis `dim` is cut into `split_factor` equal pieces; the k-th rank holds the k-th
    block of each."""

    dim: int
    split_factor: int


@final
@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank holds one term of a reduction (`sum` or `max`)."""

    reduce_op: str


Placement = Replicate | Shard | StridedShard | Partial


def placements(sharding: Sharding) -> tuple[Placement, ...]:
    """One placement for each axis of the sharding's mesh; none without a mesh."""
    mesh = sharding.mesh
    if mesh is None:
        return ()
    types = mesh.parallel_types()
    return tuple(_place(sharding, mesh, types[:k], axis) for k, axis in enumerate(types))


def _place(
    sharding: Sharding, mesh: DeviceMesh, earlier: tuple[ParallelType, ...], axis: ParallelType
) -> Placement:
    if axis in sharding.partial:
        return Partial(sharding.partial[axis])
    dim = axis_sharded_on(sharding, axis)
    if dim < 0:
        return Replicate()
    pieces = 1
    for digit in _digits_above(sharding.axes[dim], axis):
        if digit.owner in earlier:
            continue  # each rank sees one value of it
        extent = const_value(digit.extent) if digit.owner is None else mesh.axis_size(digit.owner)
        if extent is None:
            raise Unsupported(
                f"placements of {describe(sharding)}: {digit.extent} above {axis} must be a number"
            )
        pieces *= extent
    return Shard(dim) if pieces == 1 else StridedShard(dim, pieces)


def _digits_above(digits: Digits, axis: ParallelType) -> Digits:
    return digits[: next(k for k, digit in enumerate(digits) if digit.owner == axis)]


def to_torch(placement: Placement, tensor_module: ModuleType) -> Any:
    """The placement as torch.distributed.tensor, given, has it."""
    match placement:
        case Replicate():
            return tensor_module.Replicate()
        case Shard(dim):
            return tensor_module.Shard(dim)
        case Partial(reduce_op):
            return tensor_module.Partial(reduce_op)
        case StridedShard(dim, split_factor):
            strided: Callable[..., Any] = tensor_module.placement_types._StridedShard
            return strided(dim, split_factor=split_factor)
