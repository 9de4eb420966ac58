"""DeviceMesh as users make it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from meshfuse.api.recording import nest_ranks
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.dist.communicator import Communicator
from meshfuse.ir import mesh as ir_mesh
from meshfuse.ir.mesh import ParallelType, make_mesh


@final
class DeviceMesh:
    """An array of distinct ranks, of any rank: `DeviceMesh([[0, 1], [2, 3]], names=("dp", "tp"))`.

    Takes a nested list, a range, or anything with `.tolist()`. The last axis is `mesh_x`, the one
    before `mesh_y`, then `mesh_z`. Meshes are equal if they have the same ranks in the same shape
    under the same names, and so is the `mesh` of a DistributedTensor.
    """

    __slots__ = ("ranks",)
    ranks: ir_mesh.DeviceMesh

    def __init__(self, devices: object, names: Sequence[str] = ()) -> None:
        self.ranks = (
            devices if isinstance(devices, ir_mesh.DeviceMesh) else make_mesh(devices, names)
        )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks.size

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ranks.shape

    @property
    def ndim(self) -> int:
        return self.ranks.ndim

    @property
    def names(self) -> tuple[str, ...]:
        """A name per axis, "" for none."""
        return self.ranks.names

    def tolist(self) -> list[object]:
        """The ranks as a nested list."""
        return nest_ranks(self.ranks.ids, self.ranks.shape)

    def axis(self, name_or_index: str | int) -> ParallelType:
        """The ParallelType of the axis of this name, or at this position."""
        return self.ranks.axis(name_or_index)

    def shard_tensor(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """This rank's block of `axis`, of `size` equal blocks; block 0 on a rank outside the mesh.

        UserError for an axis that the tensor does not have or that the mesh does not divide.
        """
        if not isinstance(tensor, torch.Tensor) or type(axis) is not int:
            raise UserTypeError(
                f"{self}.shard_tensor({type(tensor).__name__}, axis={axis!r}): takes a torch "
                "tensor and the number of an axis"
            )
        call = f"{self}.shard_tensor(tensor of shape {list(tensor.shape)}, axis={axis})"
        if not -tensor.dim() <= axis < tensor.dim():
            raise UserError(f"{call}: axis must lie in [-{tensor.dim()}, {tensor.dim()})")
        extent = tensor.size(axis)
        if extent % self.size:
            raise UserError(
                f"{call}: its size {extent} must be evenly divisble by mesh size {self.size}"
            )
        rank = Communicator.instance().rank()
        block = self.ranks.ids.index(rank) if rank in self.ranks.ids else 0
        length = extent // self.size
        return tensor.narrow(axis, block * length, length).contiguous()

    def __eq__(self, other: object) -> bool:
        return self.ranks == (other.ranks if isinstance(other, DeviceMesh) else other)

    def __hash__(self) -> int:
        return hash(self.ranks)

    def __repr__(self) -> str:
        return repr(self.ranks)
