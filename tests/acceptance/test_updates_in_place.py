"""Outputs that are written into inputs: every reader sees the value from before the call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernel_paths import PATHS
from meshfuse import DistributedTensor, FusionDefinition, ParallelType, TensorView
from meshfuse.dist.shard import shard_tensor
from meshfuse.multidevice import DeviceMesh, simulate
from sharded_runs import Cuts, X, mesh_of, place

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.clone,
    "transposed": lambda a: a.t().clone().t(),
    "with_gaps": lambda a: torch.zeros(a.shape[0], 2 * a.shape[1])[:, ::2].copy_(a),
    "unaligned": lambda a: torch.zeros(a.numel() + 1)[1:].view(a.shape).copy_(a),
}
Define = Callable[..., None]


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 9, shape).float()


def define(count: int, build: Define) -> FusionDefinition:
    with FusionDefinition() as fd:
        build(fd, *[fd.define_tensor([-1, -1]) for _ in range(count)])
    return fd


def exchange(fd: FusionDefinition, x: TensorView, y: TensorView) -> None:
    """Each becomes the other; x itself is returned, too."""
    fd.add_output(y, x)
    fd.add_output(x, y)
    fd.add_output(x)


def transpose_and_add(fd: FusionDefinition, x: TensorView, y: TensorView) -> None:
    """The update reads elements that it overwrites elsewhere; later outputs read x, too."""
    fd.add_output(fd.ops.add(fd.ops.permute(x, [1, 0]), y), x)
    fd.add_output(fd.ops.sum(x, [0]))
    fd.add_output(x)


def normalise(fd: FusionDefinition, x: TensorView, y: TensorView) -> None:
    """One tensor is the update of x and a result; y, updated from x, gets the old value."""
    shifted = fd.ops.sub(x, fd.ops.max(x, [1], keepdim=True))
    fd.add_output(shifted, x)
    fd.add_output(shifted)
    fd.add_output(fd.ops.add(x, y), y)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("view", VIEWS)
def test_readers_see_the_value_from_before(view: str, path: str) -> None:
    first, second = integers(9, 9), integers(9, 9)

    def run(build: Define) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        x, y = VIEWS[view](first), VIEWS[view](second)
        return x, y, PATHS[path](define(2, build), [x, y])

    x, y, [old] = run(exchange)
    assert torch.equal(x, second) and torch.equal(y, first) and torch.equal(old, first)

    x, y, [total, old] = run(transpose_and_add)
    assert torch.equal(x, first.t() + second)
    assert torch.equal(total, first.sum(0)) and torch.equal(old, first)

    x, y, [shifted] = run(normalise)
    assert torch.equal(x, first - first.amax(1, keepdim=True)) and torch.equal(shifted, x)
    assert torch.equal(y, first + second)


def test_one_tensor_for_two_inputs() -> None:
    data = integers(9, 9)
    x = data.clone()
    fd = define(2, transpose_and_add)
    total, _ = fd.execute([x, x])
    assert torch.equal(x, data.t() + data) and torch.equal(total, data.sum(0))


def test_elements_that_share_memory_are_refused() -> None:
    """Whether the declaration says that the input is expanded or not."""
    fd = define(1, lambda fd, x: fd.add_output(fd.ops.relu(x), x))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"elements lie apart.* strides \[0, 1\].* a clone"):
            fd.execute([torch.ones(4).expand(3, 4)])
    one_row = torch.ones(4).expand(1, 4)
    assert fd.execute([one_row]) == []


def test_a_view_is_sent_before_its_input_is_updated() -> None:
    """Ranks slice x in place and send that: the update waits until it is gone."""
    mesh = DeviceMesh(range(2))
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 3], contiguity=True)
        part = fd.ops.set(x)
        whole = fd.ops.set(part)
        fd.add_output(whole)
        fd.add_output(fd.ops.neg(x), x)
        for tensor in (x, part, whole):
            tensor.set_device_mesh(mesh)
        part.outer_split(0, 2)
        part.axis(0).parallelize(ParallelType.mesh_x)
    data = integers(4, 3)
    results = simulate(fd, [data])
    assert [step.collective.value for step in fd.fec.communications()] == ["all_gather"]
    for [gathered], [updated] in zip(results, results.inputs, strict=True):
        assert torch.equal(gathered, data) and torch.equal(updated, -data)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("theirs", [{}, {0: X}, {1: X}])
@pytest.mark.parametrize("ours", [{}, {0: X}, {1: X}])
def test_updates_go_where_the_input_lies(ours: Cuts, theirs: Cuts, mesh: tuple[int, ...]) -> None:
    """One result, placed otherwise, updates two inputs and is returned as it is placed."""
    data = [integers(5, 4), integers(5, 4)]
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([5, 4], contiguity=True) for _ in data)
        z = fd.ops.add(x, y)
        fd.add_output(z, x)
        fd.add_output(z, y)
        fd.add_output(z)
        place(mesh_of(4), ours, x)
        place(mesh_of(4), {0: X}, y)
        place(mesh_of(*mesh), theirs, z)
    total = data[0] + data[1]
    results = simulate(fd, data)
    for rank, ([returned], [first, second]) in enumerate(zip(results, results.inputs, strict=True)):
        assert isinstance(returned, DistributedTensor)
        if rank in returned.mesh.ids:
            assert torch.equal(returned.local, shard_tensor(total, returned.sharding, rank))
        assert torch.equal(first, block_of_four(total, next(iter(ours), None), rank))
        assert torch.equal(second, block_of_four(total, 0, rank))


def block_of_four(whole: torch.Tensor, axis: int | None, rank: int) -> torch.Tensor:
    """The last blocks are shorter or empty."""
    if axis is None:
        return whole
    length = -(-whole.shape[axis] // 4)
    indices = torch.arange(whole.shape[axis])
    return whole.index_select(axis, indices[indices // length == rank])
