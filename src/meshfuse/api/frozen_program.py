"""A definition's program once it runs, and what is asked of every call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from meshfuse.api.tensor_view import TensorView
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.options import Options, options_from_environment, with_options
from meshfuse.cache import fingerprint
from meshfuse.dist.shard import number_digits
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.expr import Symbol, const, const_value
from meshfuse.facts import sharding as facts
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.program import Program
from meshfuse.runtime.arguments import Expected, ExpectedTensor, expected_inputs

GlobalSizes = Mapping[Any, Sequence[int]]
"""Global shapes of inputs: by their number, or by the TensorView that stands for them."""


@final
@frozen_dataclass
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


def freeze_program(program: Program, enable: Sequence[str] = ()) -> FrozenProgram:
    """Hash the program's text, and read the environment's options; those of `enable` go first."""
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
    options = with_options(options_from_environment(os.environ), enable)
    return FrozenProgram(program, key, expected, shardings, meshes, options)


def check_sharding(frozen: FrozenProgram, position: int, value: DistributedTensor) -> None:
    """UserError unless a DistributedTensor is sharded as the program's input at `position` is."""
    if position >= len(frozen.shardings):
        return  # too many inputs: the count is checked with all of them at hand
    wanted = frozen.shardings[position]
    if wanted is None:
        return
    same = _comparable(wanted, value.global_shape) == _comparable(
        value.sharding, value.global_shape
    )
    if not same:
        raise UserError(
            f"input {position}, {frozen.expected[position]}, must be sharded as "
            f"{facts.describe(wanted)}, but got {facts.describe(value.sharding)}; shard the input "
            "so and have fd.ops.set move it, or cut this rank's part out of full_tensor() with "
            "multidevice.shard_tensor"
        )


def _comparable(sharding: facts.Sharding, shape: Sequence[int]) -> object:
    """A sharding in normal form, without mesh axes of one rank; None if it has another rank or does
    not cover the shape."""
    try:
        numbered = number_digits(sharding, shape)
    except UserError:
        return None
    axes = tuple(
        facts.canonical(digits, const(size), sharding.mesh)
        for digits, size in zip(numbered.axes, shape, strict=True)
    )
    return sharding.mesh, axes, dict(sharding.partial)


# Global sizes.


def given_sizes(frozen: FrozenProgram, global_sizes: GlobalSizes) -> dict[str, int]:
    """The sizes that `execute(..., global_sizes=)` gives, by symbol.

    UserError for what is no input, no shape of it, or disagrees with another; UserTypeError for
    what is no mapping.
    """
    given: dict[str, int] = {}
    call = f"execute(global_sizes={global_sizes!r})"
    if not isinstance(global_sizes, Mapping):
        raise UserTypeError(f"{call}: takes a mapping from an input's number or view to its shape")
    for key, shape in global_sizes.items():
        position = _position_of(frozen, key, call)
        if not isinstance(shape, Sequence | torch.Size) or any(type(n) is not int for n in shape):
            raise UserTypeError(f"{call}: a shape is a list of ints, got {shape!r}")
        note_global_shape(frozen, position, shape, given, call)
    return given


def _position_of(frozen: FrozenProgram, key: object, call: str) -> int:
    names = [want.name for want in frozen.expected]
    if isinstance(key, TensorView) and key.name in names:
        return names.index(key.name)
    if type(key) is int and 0 <= key < len(names):
        if isinstance(frozen.expected[key], ExpectedTensor):
            return key
    tensors = ", ".join(
        f"{k} ({want.name})"
        for k, want in enumerate(frozen.expected)
        if isinstance(want, ExpectedTensor)
    )
    raise UserError(f"{call}: {key!r} is no tensor input; those are {tensors or 'none'}")


def note_global_shape(
    frozen: FrozenProgram, position: int, shape: Sequence[int], given: dict[str, int], call: str
) -> None:
    """Add the sizes that the global shape of one input says to `given`."""
    if position >= len(frozen.expected):
        return  # too many inputs: the count is checked with all of them at hand
    want = frozen.expected[position]
    if not isinstance(want, ExpectedTensor):
        return
    if len(shape) != len(want.extents):
        raise UserError(
            f"{call}: {want} has {len(want.extents)} axes, but its global shape is given as "
            f"{list(shape)}"
        )
    for axis, (extent, size) in enumerate(zip(want.extents, shape, strict=True)):
        known = const_value(extent)
        if isinstance(extent, Symbol) and extent.name not in frozen.program.fusion.scalars:
            known = given.setdefault(extent.name, size)
        if size < 0 or known not in (None, size):
            raise UserError(
                f"{call}: axis {axis} of {want} has size {known}, but its global shape is given as "
                f"{list(shape)}"
            )
