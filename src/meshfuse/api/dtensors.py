"""`execute_with_dtensors`: a definition run on torch's DTensors, with DTensors for results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from meshfuse.api.definition import FusionDefinition
from meshfuse.api.dtensor_inputs import take_dtensor
from meshfuse.api.overlap_choice import Overlapping
from meshfuse.base.errors import UserAssertionError, UserTypeError
from meshfuse.dist.dtensor import is_dtensor, is_even, make_dtensor, mesh_of
from meshfuse.dist.placements import Replicate
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.runtime.arguments import list_inputs


def execute_with_dtensors(
    fd: FusionDefinition, in_dtensors: Iterable[Any], *, overlap: Overlapping | None = None
) -> list[Any]:
    """Run a definition on DTensors; return its outputs as DTensors, on meshes of any rank.

    `overlap` is that of `execute`.

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
    check_mesh_names(inputs)
    fd.freeze("execute_with_dtensors")
    frozen = fd.fec.frozen_program()
    shards = [
        take_dtensor(frozen, position, value) if is_dtensor(value) else value
        for position, value in enumerate(inputs)
    ]
    return run_on_shards(fd, inputs, shards, overlap)


def check_mesh_names(inputs: Sequence[Any]) -> None:
    """UserAssertionError for DTensors whose meshes name their dimensions differently."""
    first: Any = None
    for position, value in enumerate(inputs):
        if not is_dtensor(value):
            continue
        first = value.device_mesh if first is None else first
        names, expected = value.device_mesh.mesh_dim_names, first.mesh_dim_names
        if names != expected:
            raise UserAssertionError(
                f"execute_with_dtensors: the mesh of input {position} has mesh_dim_names {names}, "
                f"but that of an earlier input has {expected}: all must be the same"
            )


def run_on_shards(
    fd: FusionDefinition,
    inputs: Sequence[Any],
    shards: Sequence[Any],
    overlap: Overlapping | None = None,
) -> list[Any]:
    """Run on the shards of `inputs`, which are checked; give results on the inputs' meshes."""
    dtensors = {k: value for k, value in enumerate(inputs) if is_dtensor(value)}
    unsaid = {
        k: tuple(dtensor.shape) for k, dtensor in dtensors.items() if not _says_shape(dtensor)
    }
    device_meshes = list({id(d.device_mesh): d.device_mesh for d in dtensors.values()}.values())
    results = fd.execute(shards, global_sizes=unsaid or None, overlap=overlap)
    return [_wrap(result, device_meshes) for result in results]


def _says_shape(dtensor: Any) -> bool:
    """Whether this rank's shard shows how large the whole is."""
    return is_even(dtensor) and dtensor.device_mesh.get_coordinate() is not None


def _wrap(result: torch.Tensor, device_meshes: Sequence[Any]) -> Any:
    """A result of `execute` as a DTensor, on one of these device meshes if it fits."""
    if not isinstance(result, DistributedTensor):
        if not device_meshes:
            return result
        everywhere = (Replicate(),) * device_meshes[0].ndim
        return make_dtensor(result, device_meshes[0], everywhere, result.shape)
    for device_mesh in device_meshes:
        mesh = mesh_of(device_mesh)
        if (mesh.ids, mesh.shape) == (result.mesh.ids, result.mesh.shape):
            return result.to_dtensor(device_mesh)
    return result.to_dtensor()
