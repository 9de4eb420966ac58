"""`execute_with_dtensors`: a definition run on torch's DTensors, with DTensors for results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from meshfuse.api.definition import FusionDefinition
from meshfuse.api.dtensor_inputs import take_dtensor
from meshfuse.base.errors import UserAssertionError, UserTypeError
from meshfuse.dist.dtensor import is_dtensor, make_dtensor, mesh_of
from meshfuse.dist.placements import Replicate
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.runtime.arguments import list_inputs


def execute_with_dtensors(fd: FusionDefinition, in_dtensors: Iterable[Any]) -> list[Any]:
    """Run a definition on DTensors; return its outputs as DTensors, on meshes of any rank.

    Numbers and plain tensors among the inputs are taken as `fd.execute` takes them. A result lies
    on the device mesh of the inputs with the same ranks, that very object; without such an input
    one is made, once, for which all ranks of the job must make the call. A result that has no mesh
    is replicated on the inputs' first. Results do not require grad.

    Raises UserAssertionError for device meshes whose dimensions are named differently, UserError
    for a DTensor whose placements are not the sharding of that input.
    """
    if not isinstance(fd, FusionDefinition):
        raise UserTypeError(
            f"execute_with_dtensors({type(fd).__name__}, ...): takes a FusionDefinition first"
        )
    inputs = list_inputs(in_dtensors)
    device_meshes = device_meshes_of(inputs)
    fd.freeze("execute_with_dtensors")
    frozen = fd.fec.frozen_program()
    shards = [
        take_dtensor(frozen, position, value) if is_dtensor(value) else value
        for position, value in enumerate(inputs)
    ]
    return [wrap_as_dtensor(result, device_meshes) for result in fd.execute(shards)]


def device_meshes_of(inputs: Sequence[Any]) -> list[Any]:
    """The device meshes of the DTensors among `inputs`, each once.

    UserAssertionError for two that name their dimensions differently.
    """
    found: list[Any] = []
    for position, value in enumerate(inputs):
        if not is_dtensor(value) or any(value.device_mesh is mesh for mesh in found):
            continue
        found.append(value.device_mesh)
        names, first = value.device_mesh.mesh_dim_names, found[0].mesh_dim_names
        if names != first:
            raise UserAssertionError(
                f"execute_with_dtensors: the mesh of input {position} has mesh_dim_names {names}, "
                f"but that of an earlier input has {first}: all must be the same"
            )
    return found


def wrap_as_dtensor(result: torch.Tensor, device_meshes: Sequence[Any]) -> Any:
    """A result of `execute` as a DTensor, on one of these device meshes if it fits."""
    if not isinstance(result, DistributedTensor):
        if not device_meshes:
            return result
        everywhere = (Replicate(),) * device_meshes[0].ndim
        return make_dtensor(result, device_meshes[0], everywhere, result.shape)
    mesh = result.mesh
    for device_mesh in device_meshes:
        candidate = mesh_of(device_mesh)
        if (candidate.ids, candidate.shape) == (mesh.ids, mesh.shape):
            return result.to_dtensor(device_mesh)
    return result.to_dtensor()
