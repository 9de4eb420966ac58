"""torch's DTensors, read and made. torch.distributed.tensor is loaded only to make the first one.

A DTensor among inputs is recognised through sys.modules: where the module is not loaded, nothing is
a DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from meshfuse.base import optional
from meshfuse.base.errors import Unsupported
from meshfuse.dist.placements import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    sharding_from_placements,
)
from meshfuse.facts.holdings import shape_outside
from meshfuse.facts.sharding import Sharding
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.runtime.allocate import dense_strides

MODULE = "torch.distributed.tensor"
_FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"

_REDUCTIONS = {"sum": "sum", "prod": "product", "max": "max", "min": "min"}
"""Row of REDUCTION_FUNCTIONS -> reduce_op of torch's Partial."""


def is_dtensor(value: object) -> bool:
    module = sys.modules.get(MODULE)
    return module is not None and isinstance(value, module.DTensor)


# Reading. `dtensor` is a torch DTensor: the type cannot be named without loading it.


def local_of(dtensor: Any) -> torch.Tensor:
    """This rank's shard, plain, without grad, sharing memory; waits for one that is under way.

    On a rank outside the device mesh: an empty tensor.
    """
    with torch.no_grad():
        local: Any = dtensor.to_local()
    collectives = sys.modules.get(_FUNCTIONAL_COLLECTIVES)
    if collectives is not None and isinstance(local, collectives.AsyncCollectiveTensor):
        local = local.wait()
    if dtensor.device_mesh.get_coordinate() is None:
        return local.new_zeros(shape_outside(dtensor.ndim))
    return local.detach() if local.requires_grad else local


def sharding_of_dtensor(dtensor: Any) -> Sharding:
    """Raises Unsupported for placements that no sharding says."""
    mesh = mesh_of(dtensor.device_mesh)
    return sharding_from_placements(mesh, placements_of_dtensor(dtensor), dtensor.shape)


def placements_of_dtensor(dtensor: Any) -> tuple[Placement, ...]:
    return tuple(from_torch(placement) for placement in dtensor.placements)


def is_even(dtensor: Any) -> bool:
    """Whether all ranks hold equal blocks, as far as placements show it."""
    divisors = [1] * dtensor.ndim
    for placement, ranks in zip(dtensor.placements, dtensor.device_mesh.shape, strict=True):
        match from_torch(placement):
            case Shard(dim):
                divisors[dim] *= ranks
            case StridedShard(dim, split_factor):
                divisors[dim] *= ranks * split_factor
            case Replicate() | Partial():
                continue
    return all(size % divisor == 0 for size, divisor in zip(dtensor.shape, divisors, strict=True))


@lru_cache(64)  # torch computes its ranks anew each time, in 150 us
def mesh_of(device_mesh: Any) -> DeviceMesh:
    """A torch DeviceMesh as meshfuse has it: ranks of the default process group, shape, names."""
    ranks: torch.Tensor = device_mesh.mesh
    names = device_mesh.mesh_dim_names or ("",) * ranks.ndim
    return DeviceMesh(tuple(ranks.flatten().tolist()), tuple(ranks.shape), tuple(names))


def from_torch(placement: Any) -> Placement:
    """Unsupported for a placement that is none of torch's own four."""
    types = sys.modules[MODULE].placement_types
    kind = type(placement)
    if kind is types.Replicate:
        return Replicate()
    if kind is types._StridedShard:
        factor = int(placement.split_factor)
        return Shard(placement.dim) if factor == 1 else StridedShard(placement.dim, factor)
    if kind is types.Shard:
        return Shard(placement.dim)
    functions = {theirs: ours for ours, theirs in _REDUCTIONS.items()}
    if kind is types.Partial and placement.reduce_op in functions:
        return Partial(functions[placement.reduce_op])
    raise Unsupported(
        f"placement {placement!r}: accepted are Replicate, Shard, _StridedShard, and Partial of "
        f"{', '.join(functions)}; redistribute() the DTensor to one of them"
    )


# Making.


def make_dtensor(
    local: torch.Tensor, device_mesh: Any, placements: Sequence[Placement], shape: Sequence[int]
) -> Any:
    """A DTensor of global `shape` over this rank's shard, sharing memory. Communicates nothing."""
    module = optional.load(MODULE)
    size = torch.Size(shape)
    return module.DTensor.from_local(
        local,
        device_mesh,
        [to_torch(placement, module) for placement in placements],
        run_check=False,
        shape=size,
        stride=dense_strides(size, range(len(size))),
    )


def to_torch(placement: Placement, module: ModuleType) -> Any:
    """The placement as torch.distributed.tensor, given, has it."""
    match placement:
        case Replicate():
            return module.Replicate()
        case Shard(dim):
            return module.Shard(dim)
        case Partial(reduce_op):
            return module.Partial(_REDUCTIONS[reduce_op])
        case StridedShard(dim, split_factor):
            strided: Callable[..., Any] = module.placement_types._StridedShard
            return strided(dim, split_factor=split_factor)
