"""DistributedTensor: a local shard that knows of what it is a part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast, final

import torch

from meshfuse.base.errors import InvariantError, Unsupported, UserError, UserTypeError
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.dtensor import make_dtensor, mesh_of
from meshfuse.dist.placements import Placement, placements_of
from meshfuse.dist.shard import global_shape, local_shape, number_digits, unshard_tensor
from meshfuse.expr import const, const_value
from meshfuse.facts import sharding as facts
from meshfuse.facts.holdings import shape_outside
from meshfuse.facts.sharding import Digit, Sharding, describe
from meshfuse.ir.mesh import DeviceMesh, ParallelType

FULL_TENSOR_NUMBER = -2
"""In place of the host program's number, for what no host program asked for."""


@final
class DistributedTensor(torch.Tensor):
    """This rank's shard of a global tensor: the shard itself, as a torch.Tensor, and its sharding.

    Operations of torch see the shard and return plain tensors. Copies and pickles keep the
    sharding; they hold the mesh as rank numbers and names, and no process group.
    """

    # As torch.nn.Parameter does; torch's stubs know the method form only.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    _sharding: Sharding
    _shape: tuple[int, ...]

    def __new__(
        cls, local: torch.Tensor, sharding: Sharding, shape: Sequence[int] | None = None
    ) -> DistributedTensor:
        """`local` is this rank's shard; its memory is shared.

        `shape` is the global one; without it, all ranks hold as much as this one. Raises UserError
        for another number of axes than the sharding has, or a shape that its digits do not cover,
        InvariantError for a sharding without a mesh or with symbolic extents.
        """
        if sharding.mesh is None:
            raise InvariantError("DistributedTensor: a sharding without a mesh shards nothing")
        is_nothing = not sharding.axes and tuple(local.shape) == shape_outside(0)
        if local.ndim != len(sharding.axes) and not is_nothing:
            raise UserError(
                f"DistributedTensor(tensor of shape {tuple(local.shape)}, {describe(sharding)}): "
                f"the tensor must have {len(sharding.axes)} axes"
            )
        if any(const_value(d.extent) is None for digits in sharding.axes for d in digits):
            raise InvariantError(f"DistributedTensor: {describe(sharding)} has symbolic extents")
        if shape is None:
            shape = () if is_nothing else global_shape(local.shape, sharding)
        else:
            number_digits(sharding, shape)
        self = local.detach().as_subclass(cls)
        self._sharding = sharding
        self._shape = tuple(shape)
        return self

    @classmethod
    def of_checked(
        cls, local: torch.Tensor, sharding: Sharding, shape: tuple[int, ...]
    ) -> DistributedTensor:
        """As the constructor, for a shard without grad of what it has taken before."""
        return cls.made_of(local.detach().as_subclass(cls), sharding, shape)

    @classmethod
    def made_of(
        cls, local: torch.Tensor, sharding: Sharding, shape: tuple[int, ...]
    ) -> DistributedTensor:
        """As `of_checked`, of a tensor that is nobody else's: it becomes the result itself. Another
        tensor on its memory would take ten times as long."""
        made: Any = local  # a cast would be a frame of its own, in every call
        made.__class__ = cls
        self: DistributedTensor = made
        self._sharding = sharding
        self._shape = shape
        return self

    @property
    def sharding(self) -> Sharding:
        return self._sharding

    @property
    def mesh(self) -> DeviceMesh:
        mesh = self._sharding.mesh
        assert mesh is not None
        return mesh

    @property
    def local(self) -> torch.Tensor:
        """The shard as a plain tensor, sharing memory."""
        return self.as_subclass(torch.Tensor)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self._shape

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The sharding as DTensor would say it: one placement for each mesh axis.

        Unsupported for an axis that does not divide, where DTensor would cut other blocks.
        """
        return placements_of(self._sharding, self.global_shape)

    def axis_sharded_on(self, parallel_type: ParallelType) -> int:
        """The tensor axis that a mesh axis shards; -1 if the tensor is not sharded along it."""
        if not isinstance(parallel_type, ParallelType) or not parallel_type.is_mesh:
            raise UserTypeError(
                f"axis_sharded_on({parallel_type!r}): takes a mesh axis, as ParallelType.mesh_x"
            )
        return facts.axis_sharded_on(self._sharding, parallel_type)

    def full_tensor(self, communicator: Communicator | None = None) -> torch.Tensor:
        """The whole tensor, on every rank. All ranks of the mesh must call it.

        One all-gather among the ranks that hold different shards, padded to the largest of them,
        after one all-reduce for each mesh axis along which the tensor is partial. Raises UserError
        on a rank outside the mesh, CommunicationError as Communicator.run and `enter` do.
        """
        communicator = Communicator.instance() if communicator is None else communicator
        rank = communicator.rank()
        if rank not in self.mesh.ids:
            raise UserError(f"full_tensor(): rank {rank} is not in {self.mesh}")
        cause = f"full_tensor of {describe(self._sharding)}"
        is_whole = not self._sharding.partial and len(self._holders(rank)) == 1
        if is_whole or self.mesh.size == 1:
            return self._gather(communicator, rank, cause)
        text = f"{cause}, {list(self._shape)}, {self.dtype}"
        log = communicator.enter(self.mesh.ids, text)
        try:
            return self._gather(communicator, rank, cause)
        finally:
            log.leave()

    def _gather(self, communicator: Communicator, rank: int, cause: str) -> torch.Tensor:
        local = self.local.contiguous()
        for axis, function in self._sharding.partial.items():
            team, total = self.mesh.team(rank, axis), torch.empty_like(local)
            local = communicator.run(
                CollectiveRequest(
                    FULL_TENSOR_NUMBER, "all_reduce", team, local, total, function, cause
                )
            )
        team, reduced = self._holders(rank), Sharding(self.mesh, self._sharding.axes)
        shapes = [local_shape(reduced, self._shape, member) for member in team]
        largest = max(map(math.prod, shapes))
        block = local.new_zeros(largest)
        block[: local.numel()] = local.view(-1)
        gathered = local.new_empty((len(team), largest))
        if largest:
            communicator.run(
                CollectiveRequest(
                    FULL_TENSOR_NUMBER, "all_gather", team, block, gathered, None, cause
                )
            )
        parts = {
            member: row[: math.prod(shape)].view(shape)
            for member, row, shape in zip(team, gathered, shapes, strict=True)
        }
        return unshard_tensor(parts, reduced, self._shape)

    def _holders(self, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along mesh axes that shard the tensor, in mesh
        order."""
        alike = [t for t in self.mesh.parallel_types() if self.axis_sharded_on(t) < 0]
        return tuple(
            other
            for other in self.mesh.ids
            if all(self.mesh.coordinate(other, t) == self.mesh.coordinate(rank, t) for t in alike)
        )

    def to_dtensor(self, device_mesh: Any = None) -> Any:
        """The same shard as a torch DTensor, sharing memory; on `device_mesh`, of the same ranks,
        if given.

        Loads torch.distributed.tensor. Where no device mesh is given and torch has no process
        groups for this mesh yet it makes them, so all ranks of the job must call this alike. Raises
        Unsupported for a sharding that no placements say, and for a mesh with ranks that descend
        along an axis: torch's groups sort ranks, and a DTensor would gather its shards in the wrong
        order, silently.
        """
        placements, shape = self.placements, self.global_shape
        if device_mesh is None:
            _check_ranks_ascend(self.mesh)
            device_mesh = Communicator.instance().torch_mesh(self.mesh, self.device.type)
        else:
            _check_same_ranks(self.mesh, mesh_of(device_mesh))
        return make_dtensor(self.local, device_mesh, placements, shape)

    def __copy__(self) -> DistributedTensor:
        return DistributedTensor(self.local, self._sharding, self._shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedTensor:
        if id(self) not in memo:
            local = self.local.clone(memory_format=torch.preserve_format)
            memo[id(self)] = DistributedTensor(local, self._sharding, self._shape)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return rebuild_distributed_tensor, (self.local, *_to_plain(self._sharding), self._shape)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DistributedTensor({describe(self._sharding)}, local={self.local!r})"


def _check_ranks_ascend(mesh: DeviceMesh) -> None:
    for axis in mesh.parallel_types():
        if any(list(team) != sorted(team) for team in mesh.teams(axis)):
            raise Unsupported(
                f"to_dtensor() on {mesh}: DTensor needs ranks that ascend along every mesh axis; "
                "full_tensor() works for any order"
            )


def _check_same_ranks(mesh: DeviceMesh, given: DeviceMesh) -> None:
    if (mesh.ids, mesh.shape) != (given.ids, given.shape):
        raise UserError(
            f"to_dtensor({given}) of a tensor on {mesh}: the device mesh must have the same ranks "
            "in the same shape"
        )


def rebuild_distributed_tensor(
    local: torch.Tensor,
    mesh: tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]],
    axes: tuple[tuple[tuple[int, str], ...], ...],
    partial: tuple[tuple[str, str], ...],
    shape: tuple[int, ...] | None = None,
) -> DistributedTensor:
    """A DistributedTensor from its pickled parts: plain numbers and names, safe for torch.load.

    A digit is (extent, name of the mesh axis, or "" for local memory).
    """
    digits = tuple(
        tuple(Digit(const(n), ParallelType(owner) if owner else None) for n, owner in axis)
        for axis in axes
    )
    waiting = {ParallelType(owner): function for owner, function in partial}
    return DistributedTensor(local, Sharding(DeviceMesh(*mesh), digits, waiting), shape)


def _to_plain(sharding: Sharding) -> tuple[Any, ...]:
    mesh = cast(DeviceMesh, sharding.mesh)
    axes = tuple(
        tuple((const_value(d.extent), "" if d.owner is None else d.owner.name) for d in digits)
        for digits in sharding.axes
    )
    partial = tuple((owner.name, function) for owner, function in sharding.partial.items())
    return (mesh.ids, mesh.shape, mesh.names), axes, partial


torch.serialization.add_safe_globals([rebuild_distributed_tensor])
