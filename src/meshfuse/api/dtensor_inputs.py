"""DTensors as inputs of a definition: their shards, once their placements are found to agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshfuse.api.frozen_program import FrozenProgram
from meshfuse.base.errors import UserError
from meshfuse.dist.dtensor import local_of, mesh_of, placements_of_dtensor
from meshfuse.dist.placements import Placement, Replicate, describe_placements, placements_of
from meshfuse.facts.sharding import describe
from meshfuse.ir.mesh import DeviceMesh


def take_dtensor(frozen: FrozenProgram, position: int, dtensor: Any) -> torch.Tensor:
    """This rank's shard of a DTensor that lies as the program's input at `position` is sharded.

    UserError, naming both placements, for one that lies differently.
    """
    if position < len(frozen.shardings) and frozen.shardings[position] is not None:
        _check_placements(frozen, position, dtensor)
    return local_of(dtensor)


def _check_placements(frozen: FrozenProgram, position: int, dtensor: Any) -> None:
    wanted = frozen.shardings[position]
    assert wanted is not None
    if dtensor.ndim != len(wanted.axes):
        return  # the check of shards says so, with all else that it asks of them
    mesh, found = mesh_of(dtensor.device_mesh), placements_of_dtensor(dtensor)
    if wanted.mesh is None:
        expected: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
        text = f"replicated, for {frozen.expected[position]} has no mesh"
        same_mesh = True
    else:
        expected = placements_of(wanted, dtensor.shape)
        text = f"{describe_placements(expected)} on {wanted.mesh}, which is {describe(wanted)}"
        same_mesh = (wanted.mesh.ids, wanted.mesh.shape) == (mesh.ids, mesh.shape)
    if not same_mesh or _that_count(expected, mesh) != _that_count(found, mesh):
        raise UserError(
            f"input {position}, {frozen.expected[position]}, must be {text}; got a DTensor with "
            f"{describe_placements(found)} on {mesh}: redistribute() it, or annotate the input"
        )


def _that_count(placements: Sequence[Placement], mesh: DeviceMesh) -> list[Placement]:
    """Those along mesh axes of several ranks."""
    return [p for p, size in zip(placements, mesh.shape, strict=True) if size > 1]
