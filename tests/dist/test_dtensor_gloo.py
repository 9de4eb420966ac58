"""DTensors through definitions, between real processes."""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from gloo_run import run_ranks
from meshfuse import DeviceMesh as MeshfuseMesh
from meshfuse import FusionDefinition, TensorView, execute_with_dtensors
from meshfuse.multidevice import DTensorFunction

BATCH, SEQUENCE, EMBEDDING = 2, 3, 5


def load_example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "dtensor_linear.py"
    spec = importlib.util.spec_from_file_location("dtensor_linear", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()


def integers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-4, 4, shape, generator=generator).to(torch.bfloat16)


def check_linear(
    mesh: DeviceMesh, x: torch.Tensor, w: torch.Tensor, lie: list[tuple[Placement, ...]]
) -> tuple[Any, ...]:
    """A linear and its gradients, compared exactly; returns the placements of all three."""
    inputs = [
        distribute_tensor(whole, mesh, placements).requires_grad_()
        for whole, placements in zip((x, w), lie, strict=True)
    ]
    wholes = [whole.clone().requires_grad_() for whole in (x, w)]
    y: Any = example.Linear.apply(*inputs)
    upstream = integers(*y.shape)
    given = distribute_tensor(upstream, mesh, y.placements)
    expected = torch.nn.functional.linear(*wholes)
    found = [y, *torch.autograd.grad(y, inputs, given)]
    pairs = zip(found, [expected, *torch.autograd.grad(expected, wholes, upstream)], strict=True)
    for mine, whole in pairs:
        assert mine.device_mesh is mesh
        assert mine.shape == whole.shape
        assert torch.equal(mine.full_tensor(), whole)
    return tuple(dtensor.placements for dtensor in found)


def parallel_linears(rank: int, world_size: int) -> None:
    """Column- and row-parallel, twice: the second time no definition is made."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    wide = world_size * EMBEDDING
    column = integers(BATCH, SEQUENCE, EMBEDDING), integers(wide, EMBEDDING)
    row = integers(BATCH, SEQUENCE, wide), integers(EMBEDDING, wide)
    for _ in range(2):
        lie = check_linear(mesh, *column, [(Replicate(),), (Shard(0),)])
        assert lie == ((Shard(2),), (Replicate(),), (Shard(0),))
        lie = check_linear(mesh, *row, [(Shard(2),), (Shard(1),)])
        assert lie == ((Replicate(),), (Shard(2),), (Shard(1),))
    assert len(example.forward_pass) == len(example.backward_pass) == 2
    assert check_plus_one(mesh) == 3
    check_uneven(mesh)
    check_part_of_the_job(rank)
    check_other_mesh(mesh)


def check_plus_one(mesh: DeviceMesh) -> int:
    """Results lie as the input does, on its mesh; symbolic sizes may change."""
    plus_one = DTensorFunction(lambda fd, x, one: fd.add_output(fd.ops.add(x, one)))
    ranks = mesh.size()
    for size in (ranks, 3 * ranks):
        for placements in ([Shard(0)], [Replicate()], [Shard(1)]):
            whole = torch.arange(size * 4 * ranks).view(size, 4 * ranks).float()
            x = distribute_tensor(whole, mesh, placements)
            [y] = plus_one(x, 1.0)
            assert y.device_mesh is mesh
            assert list(y.placements) == placements
            assert torch.equal(y.to_local(), x.to_local() + 1)
            assert torch.equal(y.full_tensor(), whole + 1)
            assert y.device_mesh.mesh_dim_names == ("tp",)
    return len(plus_one)


def check_uneven(mesh: DeviceMesh) -> None:
    """Blocks as torch.chunk makes them, shorter ones and empty ones; one definition for all."""
    ranks = mesh.size()
    for size in (2 * ranks + 1, ranks - 1, 1, 5 * ranks):
        whole = integers(size, 6).float()
        x = distribute_tensor(whole, mesh, [Shard(0)])
        y, total = sums(x)
        assert y.placements == (Shard(0),)
        assert y.shape == whole.shape
        assert torch.equal(y.to_local(), x.to_local() * 2)
        assert torch.equal(y.full_tensor(), whole * 2)
        assert total.placements == (Replicate(),)
        assert torch.equal(total.to_local(), whole.sum(0))


@DTensorFunction
def sums(fd: FusionDefinition, x: TensorView) -> None:
    fd.add_output(fd.ops.add(x, x))
    fd.add_output(fd.ops.sum(x, [0]))


def check_part_of_the_job(rank: int) -> None:
    """On a mesh of rank 1 alone: the others pass and receive empty tensors."""
    mesh = DeviceMesh("cpu", [1])
    whole = integers(4, 6).float()
    x = distribute_tensor(whole, mesh, [Shard(0)])
    y, total = sums(x)
    assert (y.shape, total.shape) == (whole.shape, (6,))
    assert y.device_mesh is mesh
    if rank == 1:
        assert torch.equal(y.to_local(), whole * 2)
        assert torch.equal(total.to_local(), whole.sum(0))
    else:
        assert y.to_local().numel() == total.to_local().numel() == 0


def check_other_mesh(mesh: DeviceMesh) -> None:
    """A result on no input's mesh: torch's for it is made once."""
    line, last = MeshfuseMesh(range(mesh.size())), mesh.size() - 1
    with FusionDefinition() as fd:
        view = fd.define_tensor([-1, 4], contiguity=True)
        copy = fd.ops.set(view)
        fd.add_output(copy)
        fd.add_output(fd.ops.add(view, view))
        view.set_device_mesh(line)
        view.outer_split(0, line.size).axis(0).parallelize(line.axis(0))
        copy.set_device_mesh(MeshfuseMesh([last]))
    whole, found = integers(2 * mesh.size() + 1, 4).float(), []
    for _ in range(2):
        x = distribute_tensor(whole, mesh, [Shard(0)])
        copied, doubled = execute_with_dtensors(fd, [x])
        assert doubled.device_mesh is mesh
        assert torch.equal(doubled.full_tensor(), whole * 2)
        assert (copied.shape, copied.placements) == (whole.shape, (Replicate(),))
        expected = whole if dist.get_rank() == last else whole.new_empty(0)
        assert torch.equal(copied.to_local(), expected)
        found.append(copied.device_mesh)
    assert found[0] is found[1]
    assert found[0].mesh.tolist() == [last]


@pytest.mark.parametrize("ranks", [2, 3])
def test_parallel_linears(ranks: int) -> None:
    run_ranks(parallel_linears, ranks, deadline=110)


def on_a_grid(rank: int, world_size: int) -> None:
    """Data by tensor parallelism, on the grid and on the rank's own line of it."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    column = integers(2 * BATCH, SEQUENCE, EMBEDDING), integers(2 * EMBEDDING, EMBEDDING)
    lie = check_linear(grid, *column, [(Shard(0), Replicate()), (Replicate(), Shard(0))])
    assert lie == ((Shard(0), Shard(2)), (Shard(0), Replicate()), (Replicate(), Shard(0)))
    row = integers(2 * BATCH, SEQUENCE, 2 * EMBEDDING), integers(EMBEDDING, 2 * EMBEDDING)
    lie = check_linear(grid, *row, [(Shard(0), Shard(2)), (Replicate(), Shard(1))])
    assert lie == ((Shard(0), Replicate()), (Shard(0), Shard(2)), (Replicate(), Shard(1)))
    lie = check_linear(grid["tp"], *row, [(Shard(2),), (Shard(1),)])
    assert lie == ((Replicate(),), (Shard(2),), (Shard(1),))


def test_grid() -> None:
    run_ranks(on_a_grid, 4, deadline=110)
