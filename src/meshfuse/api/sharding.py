"""Sharding as users see it: which tensor axis each mesh axis shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast, final

import torch

from meshfuse.api.mesh import DeviceMesh
from meshfuse.api.tensor_view import TensorView
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.dist import shard
from meshfuse.dist.communicator import Communicator
from meshfuse.expr import const_value
from meshfuse.facts.sharding import sharding_of
from meshfuse.ir.mesh import ParallelType


@final
class Sharding:
    """A mesh, and the tensor axis (reduced ones not counted) that each of its axes shards.

    Takes a mapping, or pairs of a mesh axis and a tensor axis.
    """

    __slots__ = ("_axes", "_mesh")

    def __init__(
        self,
        mesh: DeviceMesh,
        axes: Mapping[ParallelType, int] | Iterable[tuple[ParallelType, int]],
    ) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise UserError(f"Sharding({mesh!r}, {axes!r}): a sharding needs a mesh")
        pairs = _read_pairs(mesh, axes)
        call = f"Sharding({mesh!r}, {axes if isinstance(axes, Mapping) else list(pairs)!r})"
        found: dict[ParallelType, int] = {}
        for parallel_type, axis in pairs:
            _check_mesh_type(call, parallel_type)
            if not mesh.ranks.has(parallel_type):
                raise UserError(f"{call}: {mesh} has no axis {parallel_type}")
            if parallel_type in found:
                raise UserError(
                    f"{call}: {parallel_type} is already used to shard axis {found[parallel_type]}"
                )
            if type(axis) is not int:
                raise UserTypeError(f"{call}: a tensor axis is an int, got {axis!r}")
            if axis < 0:
                raise UserError(f"{call}: a tensor axis is 0 or more, got {axis}")
            found[parallel_type] = axis
        self._mesh = mesh
        self._axes = found

    @property
    def mesh(self) -> DeviceMesh:
        return self._mesh

    def axis_sharded_on(self, parallel_type: ParallelType) -> int:
        """The tensor axis that `parallel_type` shards; -1 if the tensor is replicated along it."""
        _check_mesh_type(f"axis_sharded_on({parallel_type})", parallel_type)
        return self._axes.get(parallel_type, -1)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sharding) and self._mesh == other._mesh and self._axes == other._axes
        )

    def __hash__(self) -> int:
        return hash((self._mesh, tuple(sorted((str(k), v) for k, v in self._axes.items()))))

    def __repr__(self) -> str:
        axes = ", ".join(f"{parallel}: {axis}" for parallel, axis in self._axes.items())
        return f"Sharding({self._mesh!r}, {{{axes}}})"


def shard_tensor(tensor: torch.Tensor, tv: TensorView) -> torch.Tensor:
    """This rank's part of a global tensor, sharded as `tv` is; contiguous, on the tensor's device.

    Parts may differ in size, and be empty. A rank outside the mesh gets an empty tensor. UserError
    for a `tv` without a mesh or of another shape.
    """
    if not isinstance(tensor, torch.Tensor) or not isinstance(tv, TensorView):
        raise UserTypeError(
            f"shard_tensor({type(tensor).__name__}, {type(tv).__name__}): takes a torch tensor and "
            "a TensorView"
        )
    program = tv.recording.program
    sharding = sharding_of(program, tv.name)
    if sharding.mesh is None:
        raise UserError(
            f"shard_tensor(tensor of shape {list(tensor.shape)}, {tv.name}): {tv.name} has no "
            "mesh; call its set_device_mesh first"
        )
    for axis, domain in enumerate(program.tensor(tv.name).tensor_axes[: tensor.ndim]):
        size = const_value(domain.extent)
        if size not in (None, tensor.size(axis)):
            raise UserError(
                f"shard_tensor(tensor of shape {list(tensor.shape)}, {tv.name}): axis {axis} of "
                f"{tv.name} has size {size}"
            )
    return shard.shard_tensor(tensor, sharding, Communicator.instance().rank())


def _read_pairs(mesh: DeviceMesh, axes: object) -> tuple[tuple[ParallelType, int], ...]:
    """Pairs of a mesh axis and a tensor axis, out of a mapping or an iterable of pairs."""
    given: object = axes.items() if isinstance(axes, Mapping) else axes
    items = tuple(cast(Iterable[object], given)) if isinstance(given, Iterable) else (given,)
    if not all(_is_pair(item) for item in items):
        raise UserTypeError(
            f"Sharding({mesh!r}, {axes!r}): takes a mapping from mesh axis to tensor axis, or pairs"
        )
    return cast(tuple[tuple[ParallelType, int], ...], items)


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple | list) and len(cast(Sequence[object], item)) == 2


def _check_mesh_type(call: str, parallel_type: ParallelType) -> None:
    if not isinstance(parallel_type, ParallelType) or not parallel_type.is_mesh:
        raise UserError(f"{call}: {parallel_type} is no device type (mesh_x, mesh_y, ...)")
