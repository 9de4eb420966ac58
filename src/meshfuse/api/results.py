"""Results as users get them: a tensor on a mesh knows its sharding, one without is plain."""

from __future__ import annotations

import math

import torch

from meshfuse.api.mesh import DeviceMesh
from meshfuse.api.sharding import Sharding
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.expr import IntExpr, const, const_value
from meshfuse.facts import sharding as facts
from meshfuse.facts.sharding import Digit, Digits


def wrap_result(local: torch.Tensor, sharding: facts.Sharding) -> torch.Tensor:
    """`local` itself, without grad, or a DistributedTensor over it where it lies on a mesh."""
    local = local.detach() if local.requires_grad else local
    if sharding.mesh is None:
        return local
    axes = tuple(
        _with_size(digits, size) for digits, size in zip(sharding.axes, local.shape, strict=True)
    )
    return DistributedTensor(local, facts.Sharding(sharding.mesh, axes, sharding.partial))


def _with_size(digits: Digits, size: int) -> Digits:
    """Digits in numbers, given the local size. At most one local digit is symbolic.

    [mesh_x{2}, i0 // 2] with 5  ->  [mesh_x{2}, 5]
    """
    known = [const_value(digit.extent) for digit in digits if digit.owner is None]
    others = math.prod(extent for extent in known if extent is not None)
    rest = const(size // others if others else 0)

    def numbered(digit: Digit) -> IntExpr:
        return digit.extent if const_value(digit.extent) is not None else rest

    return tuple(Digit(numbered(digit), digit.owner) for digit in digits)


def public_sharding(sharding: facts.Sharding) -> Sharding | None:
    """Which tensor axis each mesh axis of several ranks shards; None without a mesh."""
    mesh = sharding.mesh
    if mesh is None:
        return None
    axes = {owner: facts.axis_sharded_on(sharding, owner) for owner in mesh.parallel_types()}
    return Sharding(DeviceMesh(mesh), {owner: axis for owner, axis in axes.items() if axis >= 0})
