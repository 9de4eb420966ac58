"""`multidevice.symmetric_empty`: tensors that peers can read where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshfuse.api.mesh import DeviceMesh
from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import UserError
from meshfuse.dist.communicator import Communicator
from meshfuse.ir.mesh import ParallelType
from meshfuse.runtime.torch_types import to_torch_dtype


def symmetric_empty(
    shape: Sequence[int],
    dtype: torch.dtype | DataType,
    mesh: DeviceMesh,
    mesh_axis: ParallelType | None = None,
    *,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """An uninitialised tensor of this rank's that its peers along `mesh_axis` can read.

    An input that lies in one, all of it or a contiguous part, is sent from where it is when chunks
    go from peer to peer; any other is copied first. Every rank of the mesh calls this alike and in
    the same order, with the same shape, and all pass the same ones to a call. The memory lasts as
    long as the process group. `device`: this rank's by default. On CPUs, and between GPUs that
    cannot reach one another, it is an ordinary tensor.

    Raises UserError for a rank outside the mesh, and for a mesh of several axes without
    `mesh_axis`.
    """
    communicator = Communicator.instance()
    rank, ranks = communicator.rank(), mesh.ranks
    if rank not in ranks.places:
        raise UserError(f"symmetric_empty: rank {rank} is not in {mesh}")
    if mesh_axis is None:
        if mesh.ndim > 1:
            raise UserError(f"symmetric_empty: {mesh} has several axes; say along which: mesh_axis")
        mesh_axis = mesh.axis(0)
    team = ranks.team(rank, mesh_axis)
    torch_dtype = to_torch_dtype(dtype) if isinstance(dtype, DataType) else dtype
    where = communicator.device() if device is None else torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return communicator.keep(team, shape, torch_dtype, where)
