"""DistributedTensor between real processes: whole tensors and torch's DTensor."""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from gloo_run import observe_ranks, run_ranks
from index_sets import digits
from meshfuse import FusionDefinition
from meshfuse.base import optional
from meshfuse.base.errors import Unsupported
from meshfuse.dist.placements import StridedShard
from meshfuse.dist.shard import shard_tensor
from meshfuse.dist.tensor import DistributedTensor
from meshfuse.facts.sharding import Sharding
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.multidevice import DeviceMesh
from meshfuse.multidevice import shard_tensor as cut

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
WHOLE = torch.arange(32).view(4, 8)


def gather_back(rank: int, world_size: int) -> int:
    """Every sharding's full tensor, and its DTensor's, is what was cut."""
    line, turned, grid = make_mesh([0, 1]), make_mesh([1, 0]), make_mesh([[0], [1]])
    shardings = (
        Sharding(line, (digits((2, X), 2), digits(8))),
        Sharding(line, (digits(4), digits(8))),
        Sharding(turned, (digits(4), digits((2, X), 4))),
        Sharding(line, (digits(4), digits(2, (2, X), 2))),
        Sharding(line, (digits(2, (2, X)), digits(8))),
        Sharding(grid, (digits(4), digits((2, Y), 4))),
        Sharding(grid, (digits(4), digits(8)), {Y: "sum"}),
    )
    for sharding in shardings:
        tensor = DistributedTensor(shard_tensor(WHOLE, sharding, rank), sharding)
        expected = WHOLE * 2 if sharding.partial else WHOLE
        assert torch.equal(tensor.full_tensor(), expected)
        if sharding.mesh == turned:
            with pytest.raises(
                Unsupported, match=r"DeviceMesh\{1 0\}: DTensor needs ranks that asc"
            ):
                tensor.to_dtensor()
            continue
        dtensor = tensor.to_dtensor()
        assert dtensor.to_local().data_ptr() == tensor.data_ptr()
        assert dtensor.shape == WHOLE.shape
        # torch before 2.13 gathers no strided shards; cut_like_torch compares those.
        if not any(isinstance(placement, StridedShard) for placement in tensor.placements):
            assert torch.equal(dtensor.full_tensor(), expected), sharding
    return len(shardings)


def test_full_tensor_and_dtensor() -> None:
    assert run_ranks(gather_back, 2) == [7, 7]


def gather_uneven(rank: int, world_size: int) -> int:
    """Parts that differ, one of them empty, out of a program whose size a call gives."""
    mesh = DeviceMesh([0, 1, 2])
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 3], contiguity=True)
        fd.add_output(fd.ops.neg(x))
        fd.add_output(fd.ops.set(fd.ops.neg(x)))
        x.set_device_mesh(mesh)
        x.outer_split(0, 3)
        x.axis(0).parallelize(X)
    for rows in (4, 5, 1, 0):
        whole = torch.arange(3.0 * rows).view(rows, 3)
        inputs = [cut(whole, x)]
        for _ in range(2):
            outputs = fd.execute(inputs, global_sizes={0: (rows, 3)})
            for output in outputs:
                assert isinstance(output, DistributedTensor)
                assert torch.equal(output.full_tensor(), -whole)
        [again, _] = fd.execute(outputs[:1])
        assert isinstance(again, DistributedTensor)
        assert torch.equal(again.full_tensor(), whole)
    return rank


def test_full_tensors_of_uneven_parts() -> None:
    assert run_ranks(gather_uneven, 3) == [0, 1, 2]


def cut_like_torch(rank: int, world_size: int) -> int:
    """Four ranks, one after the other: torch cuts the same shards for the same placements."""
    assert fake_pg  # importing it registers the backend that communicates nothing
    tensor_module = optional.load("torch.distributed.tensor")
    grid = make_mesh([[0, 1], [2, 3]], names=("data", "tensor"))
    shardings = (
        Sharding(grid, (digits((2, X), 2), digits((2, Y), 4))),
        Sharding(grid, (digits(4), digits((2, Y), (2, X), 2))),
        Sharding(grid, (digits(4), digits((2, X), (2, Y), 2))),
        Sharding(grid, (digits(4), digits((2, Y), 2, (2, X)))),
        Sharding(grid, (digits((2, Y), 2), digits(8))),
    )
    for place in range(4):
        dist.init_process_group("fake", rank=place, world_size=4, store=dist.HashStore())
        for sharding in shardings:
            mine = DistributedTensor(shard_tensor(WHOLE, sharding, place), sharding).to_dtensor()
            theirs = tensor_module.distribute_tensor(
                WHOLE, mine.device_mesh, mine.placements, src_data_rank=None
            )
            assert torch.equal(theirs.to_local(), mine.to_local()), (place, sharding)
            assert mine.device_mesh.mesh_dim_names == ("data", "tensor")
        dist.destroy_process_group()
    return len(shardings)


def test_shards_are_what_torch_cuts() -> None:
    [outcome] = observe_ranks(cut_like_torch, 1, initialise=False)
    assert outcome.value == 5, outcome.error
