"""What ranks hold, at any digit and of any size: cut locally, moved, and added by value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from meshfuse import DataType, FusionDefinition, TensorView
from meshfuse.host.nodes import Communicate, Pick, View
from meshfuse.multidevice import DeviceMesh, simulate

MESH = DeviceMesh(range(2))
Placing = Callable[[TensorView], None]


def whole(tensor: TensorView) -> None:
    tensor.set_device_mesh(MESH)


def block(tensor: TensorView) -> None:
    whole(tensor)
    tensor.outer_split(1, 2)
    tensor.axis(1).parallelize(MESH.axis(0))


def cyclic(tensor: TensorView) -> None:
    whole(tensor)
    tensor.split(1, 2)
    tensor.axis(2).parallelize(MESH.axis(0))


def strided(tensor: TensorView) -> None:
    whole(tensor)
    tensor.split(1, 3)
    tensor.split(1, 2)
    tensor.axis(2).parallelize(MESH.axis(0))


def define(size: int, before: Placing, after: Placing) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, size], contiguity=True)
        y = fd.ops.set(x)
        before(y)
        before(x)
        z = fd.ops.neg(y)
        after(z)
        fd.add_output(z)
    return fd


def held(place: Placing, size: int, rank: int) -> list[int]:
    if place is whole:
        return list(range(size))
    if place is block:
        length = -(-size // 2)
        return list(range(size))[rank * length : (rank + 1) * length]
    run = 1 if place is cyclic else 3
    return [i for i in range(size) if i // run % 2 == rank]


def check(size: int, before: Placing, after: Placing) -> FusionDefinition:
    """The size is known when compiled, or when run; gives the definition of the first."""
    data = torch.arange(2.0 * size).view(2, size)
    known, symbolic = define(size, before, after), define(-1, before, after)
    for fd in (known, symbolic):
        for rank, (out,) in enumerate(simulate(fd, [data])):
            assert torch.equal(out.as_subclass(torch.Tensor), -data[:, held(after, size, rank)])
    return known


@pytest.mark.parametrize("size", [12, 7, 1])
def test_local_parts_are_views_where_they_can_be(size: int) -> None:
    """Of one index, even a strided part is one piece."""
    for after, node in ((block, View), (cyclic, View), (strided, Pick if size > 1 else View)):
        body = check(size, whole, after).fec.host_program().body
        assert [type(step) for step in body if isinstance(step, View | Pick)] == [node]
        assert not any(isinstance(step, Communicate) for step in body)


@pytest.mark.parametrize("size", [12, 7, 1])
def test_all_parts_are_gathered_and_exchanged(size: int) -> None:
    for before in (block, cyclic, strided):
        fd = check(size, before, whole)
        assert [step.collective.value for step in fd.fec.communications()] == ["all_gather"]
        for after in (block, cyclic, strided):
            if after is not before:
                check(size, before, after)


def summed(dtype: DataType) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 3], contiguity=True, dtype=dtype)
        whole(x)
        x.outer_split(0, 2)
        x.axis(0).parallelize(MESH.axis(0))
        fd.add_output(fd.ops.sum(x, [0]))
    return fd


def in_team_order(dtype: DataType, torch_dtype: torch.dtype) -> list[bool]:
    fd = summed(dtype)
    data = torch.arange(12).view(4, 3).to(torch_dtype)
    for (out,) in simulate(fd, [data]):
        assert torch.equal(out.as_subclass(torch.Tensor), data.sum(0))
    return [step.in_team_order for step in fd.fec.communications()]


def test_options_say_in_which_order_ranks_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_team_order(DataType.Float, torch.float32) == [False]
    monkeypatch.setenv("MESHFUSE_ENABLE", "float32_collectives")
    assert in_team_order(DataType.Float, torch.float32) == [False]
    assert in_team_order(DataType.BFloat16, torch.bfloat16) == [True]
    monkeypatch.setenv("MESHFUSE_ENABLE", "deterministic_collectives")
    assert in_team_order(DataType.Float, torch.float32) == [True]
    assert in_team_order(DataType.Int, torch.int64) == [False], "in any order they are the same"


def test_what_torch_is_told_about_determinism_holds_between_ranks() -> None:
    fd = summed(DataType.Float)
    data = torch.ones(4, 3)
    simulate(fd, [data])
    assert [step.in_team_order for step in fd.fec.communications()] == [False]
    torch.use_deterministic_algorithms(True)
    try:
        simulate(fd, [data])
        assert [step.in_team_order for step in fd.fec.communications()] == [True]
    finally:
        torch.use_deterministic_algorithms(False)
