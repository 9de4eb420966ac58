"""Results as users get them: a tensor on a mesh knows its sharding, one without is plain."""

from __future__ import annotations

import torch

from meshfuse.api.mesh import DeviceMesh
from meshfuse.api.sharding import Sharding
from meshfuse.dist.shard import number_digits
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.facts import sharding as facts


def plain_result(output: torch.Tensor) -> torch.Tensor:
    """`output`, of one device, without grad: itself, or a tensor on its memory that torch does not
    know as a view.

    Programs run while no grad is recorded, and what torch makes a view then it refuses to change in
    place where grad is. Which results are views the compiler decides, not the user.
    """
    return output.detach() if output.requires_grad or output._is_view() else output


def wrap_result(
    local: torch.Tensor, sharding: facts.Sharding, shape: tuple[int, ...]
) -> torch.Tensor:
    """A `plain_result`, or a DistributedTensor over `local` where it lies on a mesh.

    `shape` is the global one; extents of the sharding are numbered by it.
    """
    if sharding.mesh is None:
        return plain_result(local)
    return DistributedTensor(local, number_digits(sharding, shape), shape)


def public_sharding(sharding: facts.Sharding) -> Sharding | None:
    """Which tensor axis each mesh axis of several ranks shards; None without a mesh."""
    mesh = sharding.mesh
    if mesh is None:
        return None
    axes = {owner: facts.axis_sharded_on(sharding, owner) for owner in mesh.parallel_types()}
    return Sharding(DeviceMesh(mesh), {owner: axis for owner, axis in axes.items() if axis >= 0})
