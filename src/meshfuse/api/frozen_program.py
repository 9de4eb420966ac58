"""A definition's program once it runs, and what is asked of every call."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import final

from meshfuse.base.errors import UserError
from meshfuse.base.options import Options, options_from_environment
from meshfuse.cache import fingerprint
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.facts import sharding as facts
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.program import Program
from meshfuse.runtime.arguments import Expected, ExpectedTensor, expected_inputs


@final
@dataclass(frozen=True, slots=True)
class FrozenProgram:
    """The program of a definition that runs, and what is asked of every call.

    `shardings` are those of the inputs; `meshes` has each mesh with the first tensor that lies on
    it; `options` are the environment's, when the program was fixed.
    """

    program: Program
    key: str
    expected: tuple[Expected, ...]
    shardings: tuple[facts.Sharding | None, ...]
    meshes: dict[DeviceMesh, TensorName]
    options: Options


def freeze_program(program: Program) -> FrozenProgram:
    """Hash the program's text, and read the environment's options."""
    meshes: dict[DeviceMesh, TensorName] = {}
    for tensor in program.fusion.tensors:
        mesh = program.schedule(tensor).mesh
        if mesh is not None:
            meshes.setdefault(mesh, tensor)
    expected = expected_inputs(program)
    shardings = tuple(
        facts.sharding_of(program, want.name) if isinstance(want, ExpectedTensor) else None
        for want in expected
    )
    key = fingerprint(program)
    options = options_from_environment(os.environ)
    return FrozenProgram(program, key, expected, shardings, meshes, options)


def check_sharding(frozen: FrozenProgram, position: int, value: DistributedTensor) -> None:
    """UserError unless a DistributedTensor is sharded as the program's input at `position` is."""
    if position >= len(frozen.shardings):
        return  # too many inputs: the count is checked with all of them at hand
    wanted = frozen.shardings[position]
    if wanted is None:
        return
    if _placement(wanted) != _placement(value.sharding):
        raise UserError(
            f"input {position}, {frozen.expected[position]}, must be sharded as "
            f"{facts.describe(wanted)}, but got {facts.describe(value.sharding)}"
        )


def _placement(sharding: facts.Sharding) -> object:
    """What two shardings of a tensor must share: not its sizes, nor mesh axes of one rank."""
    mesh = sharding.mesh
    owners = tuple(
        tuple(d.owner for d in digits if d.owner and mesh and mesh.axis_size(d.owner) > 1)
        for digits in sharding.axes
    )
    return sharding.mesh, owners, dict(sharding.partial)
