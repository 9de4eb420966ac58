"""What one rank makes of DTensors when nothing is communicated, as any rank of a larger job."""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed import fake_pg

import meshfuse
from gloo_run import observe_ranks
from meshfuse import (
    DistributedTensor,
    FusionDefinition,
    ParallelType,
    Unsupported,
    UserAssertionError,
    UserError,
    UserTypeError,
    execute_with_dtensors,
)
from meshfuse.multidevice import DTensorFunction

RANKS = 8
PLACEMENTS: list[tuple[Placement, ...]] = [
    (Replicate(), Replicate(), Replicate()),
    (Shard(0), Replicate(), Shard(1)),
    (Shard(1), Shard(0), Replicate()),
    (Shard(0), Shard(0), Shard(0)),
    (_StridedShard(0, split_factor=2), Shard(0), Shard(1)),
    (_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)),
    (Shard(0), _StridedShard(0, split_factor=2), Shard(0)),
    (Replicate(), _StridedShard(1, split_factor=3), Replicate()),
    (Replicate(), Replicate(), _StridedShard(1, split_factor=12)),
]


def become(rank: int) -> DeviceMesh:
    assert fake_pg  # importing it registers the backend that communicates nothing
    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=dist.HashStore())
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


def twice_plus(fd: FusionDefinition, x: Any, y: Any) -> None:
    fd.add_output(fd.ops.add(fd.ops.mul(x, 2.0), y))


def run_as_every_rank(rank: int, world_size: int) -> int:
    """Results lie as the inputs do."""
    whole, function, count = torch.arange(16 * 24).view(16, 24).float(), None, 0
    for place in range(RANKS):
        cube = become(place)
        function = DTensorFunction(twice_plus, static_sizes=place % 2 == 0)
        for placements in PLACEMENTS:
            x = distribute_tensor(whole, cube, placements, src_data_rank=None)
            for _ in range(2):
                [y] = function(x, x)
                assert isinstance(y, DTensor)
                assert y.device_mesh is cube
                assert y.placements == placements, (y.placements, placements)
                assert y.shape == whole.shape
                assert torch.equal(y.to_local(), x.to_local() * 3)
            count += 1
        assert len(function) == len(PLACEMENTS)
        dist.destroy_process_group()
    return count


def test_results_lie_as_inputs_do() -> None:
    [outcome] = observe_ranks(run_as_every_rank, 1, initialise=False)
    assert outcome.value == RANKS * len(PLACEMENTS), outcome.error


def doubled(mesh: meshfuse.DeviceMesh | None) -> FusionDefinition:
    """On `mesh`, axis 0 in blocks over mesh_x."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        scale = fd.define_scalar()
        fd.add_output(fd.ops.mul(x, scale))
        if mesh is not None:
            x.set_device_mesh(mesh)
            x.outer_split(0, 2)
            x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def ask_for_errors(rank: int, world_size: int) -> None:
    cube = become(3)
    line, other = cube["tp"], cube["dp"]
    fd, whole = doubled(meshfuse.DeviceMesh([2, 3])), torch.arange(24).view(4, 6).float()
    x = distribute_tensor(whole, line, [Shard(0)], src_data_rank=None)
    [y] = execute_with_dtensors(fd, [x, 2.0])
    assert y.device_mesh is line
    assert y.placements == (Shard(0),)
    assert torch.equal(y.to_local(), whole[2:] * 2)
    [y] = fd.execute([x, 2.0])  # directly: the shard
    assert isinstance(y, DistributedTensor)
    assert torch.equal(y.local, whole[2:] * 2)
    assert y.to_dtensor(line).device_mesh is line

    wrong = distribute_tensor(whole, line, [Shard(1)], src_data_rank=None)
    message = (
        r"input 0, T0 float\[i0, i1\], must be \[Shard\(0\)\] on DeviceMesh\{2 3\}, which is .*; "
        r"got a DTensor with \[Shard\(1\)\] on DeviceMesh\{2 3\}: redistribute\(\) it"
    )
    for run in (fd.execute, lambda inputs: execute_with_dtensors(fd, inputs)):
        with pytest.raises(UserError, match=message):
            run([wrong, 2.0])
    elsewhere = distribute_tensor(whole, other, [Shard(0)], src_data_rank=None)
    with pytest.raises(UserError, match=r"got a DTensor with \[Shard\(0\)\] on DeviceMesh\{1 3\}"):
        execute_with_dtensors(fd, [elsewhere, 2.0])
    with pytest.raises(UserError, match="the device mesh must have the same ranks"):
        y.to_dtensor(other)
    with pytest.raises(UserError, match=r"got a DTensor with \[Partial\(sum\)\]"):
        execute_with_dtensors(fd, [DTensor.from_local(whole, line, [Partial()]), 2.0])
    average = DTensor.from_local(whole, line, [Partial("avg")])
    with pytest.raises(
        Unsupported, match=r"placement Partial\(avg\): accepted are Replicate, Shard, _StridedShard"
    ):
        execute_with_dtensors(fd, [average, 2.0])
    function = DTensorFunction(twice_plus)
    with pytest.raises(UserAssertionError, match=r"mesh_dim_names \('dp',\), but .* \('tp',\)"):
        function(x, elsewhere)
    with pytest.raises(Unsupported, match="a definition has no partial inputs; redistribute"):
        partial = DTensor.from_local(whole, line, [Partial()])
        function(partial, partial)
    with pytest.raises(UserTypeError, match="input 1 is a str"):
        function(x, "y")
    with pytest.raises(UserTypeError, match="takes a FusionDefinition first"):
        execute_with_dtensors(function, [x])  # pyright: ignore[reportArgumentType]  # as users do

    both = [Shard(0), Shard(0), Replicate()]
    for rows in (8, 9):
        cut = distribute_tensor(torch.ones(rows, 4), cube, both, src_data_rank=None)
        if rows == 8:
            assert function(cut, cut)[0].placements == tuple(both)
            continue
        with pytest.raises(Unsupported, match=r"shape \(9, 4\): axis 0 does not divide"):
            function(cut, cut)

    plain = doubled(None)
    replicated = distribute_tensor(whole, line, [Replicate()], src_data_rank=None)
    [y] = execute_with_dtensors(plain, [replicated, 3.0])
    assert (y.device_mesh, y.placements) == (line, (Replicate(),))
    with pytest.raises(UserError, match=r"must be replicated, for T0 .* has no mesh"):
        execute_with_dtensors(plain, [x, 3.0])
    assert execute_with_dtensors(plain, [whole, 3.0])[0].equal(whole * 3)
    dist.destroy_process_group()


def test_errors_name_input_and_both_placements() -> None:
    [outcome] = observe_ranks(ask_for_errors, 1, initialise=False)
    assert outcome.succeeded, outcome.error
