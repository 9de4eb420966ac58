"""Reshapes of sharded tensors: the outermost piece stays sharded, what cannot is gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from meshfuse import DistributedTensor, FusionDefinition, ParallelType, TensorView
from meshfuse.multidevice import DeviceMesh, simulate
from sharded_cases import block, integers, replicate

Shape = Callable[[int], Sequence[int]]


@dataclass(frozen=True)
class Case:
    """y = reshape(x) and 2y, for d ranks. `x_axis` and `y_axis`: what the user shards; -1 is whole.

    `result`: the axis on which 2y is sharded for d > 1; `moves`: the collective, if any is posted.
    """

    name: str
    shape: Shape
    new_shape: Shape
    x_axis: int
    result: int
    y_axis: int | None = None
    moves: str = ""


CASES = [
    Case("split", lambda d: (d * 6, 5), lambda d: (-1, 3, 5), 0, 0),
    Case("split_inner", lambda d: (5, d * 6), lambda d: (5, d * 2, 3), 1, 1),
    Case("merge", lambda d: (d * 2, 3, 5), lambda d: (-1, 5), 0, 0),
    Case("merge_and_split", lambda d: (d * 4, 3), lambda d: (d * 2, 6), 0, 0),
    Case("beside", lambda d: (d * 2, 6), lambda d: (d * 2, 2, 3), 0, 0),
    Case("not_outermost", lambda d: (3, d * 2, 5), lambda d: (-1, 5), 1, -1, -1, "all_gather"),
    Case("not_divisible", lambda d: (d * 10,), lambda d: (5, -1), 0, -1, None, "all_gather"),
    Case("from_result", lambda d: (d * 2, 6), lambda d: (-1,), -1, 0, y_axis=0),
    Case("from_split_result", lambda d: (d * 6,), lambda d: (-1, 3), -1, 0, y_axis=0),
    Case("result_inside", lambda d: (d * 6,), lambda d: (3, -1), -1, 1, y_axis=1),
    Case("both", lambda d: (d * 2, 6), lambda d: (-1,), 0, 0, y_axis=0),
    Case("to_whole", lambda d: (d * 2, 6), lambda d: (-1,), 0, -1, -1, "all_gather"),
    Case("other_axis", lambda d: (d * 2, d * 3), lambda d: (d * 6, d), 1, 0, 0, "exchange"),
]


def place(mesh: DeviceMesh, tensor: TensorView, axis: int) -> None:
    if axis < 0:
        replicate(mesh, tensor)
    else:
        block(mesh, tensor, axis)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reshape_by_value(case: Case, d: int, symbolic: bool) -> None:
    mesh, shape = DeviceMesh(range(d)), case.shape(d)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1 if symbolic else shape[0], *shape[1:]], contiguity=True)
        y = fd.ops.reshape(x, case.new_shape(d))
        fd.add_output(y * 2.0)
        place(mesh, x, case.x_axis)
        if case.y_axis is not None:
            place(mesh, y, case.y_axis)
    data = integers(*shape)
    expected = data.reshape(*case.new_shape(d)) * 2
    for rank, [result] in enumerate(simulate(fd, [data])):
        assert isinstance(result, DistributedTensor)
        axis = result.axis_sharded_on(ParallelType.mesh_x)
        if d > 1:
            assert axis == case.result
        assert torch.equal(result.local, expected if axis < 0 else expected.chunk(d, axis)[rank])
    posted = [step.collective.value for step in fd.fec.communications()]
    assert posted == ([case.moves] if case.moves and d > 1 else [])


@pytest.mark.parametrize("size", [2, 3], ids=["even", "uneven"])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
def test_flattened_tokens_stay_where_they_are(d: int, size: int) -> None:
    """[b, s, e] -> [b*s, e] -> [b, s, e], s sharded: strided pieces, if they are alike."""
    mesh, s = DeviceMesh(range(d)), d * 2 if size == 2 else d * 2 + 1
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, s, 4], contiguity=True)
        weight = fd.define_tensor([5, 4], contiguity=True)
        tokens = fd.ops.linear(fd.ops.reshape(x, [-1, 4]), weight)
        fd.add_output(fd.ops.reshape(tokens, [3, s, 5]) + 1.0)
        block(mesh, x, 1)
    inputs = [integers(3, s, 4), integers(5, 4)]
    expected = torch.nn.functional.linear(*inputs) + 1
    for rank, [result] in enumerate(simulate(fd, inputs)):
        assert isinstance(result, DistributedTensor)
        part = expected if result.axis_sharded_on(ParallelType.mesh_x) < 0 else None
        assert torch.equal(result.local, expected.chunk(d, 1)[rank] if part is None else part)
    posted = [step.collective.value for step in fd.fec.communications()]
    assert posted == ([] if size == 2 or d == 1 else ["all_gather"])


@pytest.mark.parametrize("d", [2, 3, 4, 8])
def test_uneven_rows_that_merge_are_gathered(d: int) -> None:
    """Blocks of whole rows are not the blocks of the elements that a sharding can say."""
    mesh, rows = DeviceMesh(range(d)), d + 1
    with FusionDefinition() as fd:
        x = fd.define_tensor([rows, 3], contiguity=True)
        fd.add_output(fd.ops.reshape(x, [-1]) * 2.0)
        block(mesh, x, 0)
    data = integers(rows, 3)
    for [result] in simulate(fd, [data]):
        assert torch.equal(result.as_subclass(torch.Tensor), data.reshape(-1) * 2)
    assert [step.collective.value for step in fd.fec.communications()] == ["all_gather"]


def test_what_is_gathered_is_said() -> None:
    mesh = DeviceMesh(range(2))
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, 4], contiguity=True)
        y = fd.ops.reshape(x, [12])
        fd.add_output(y * 2.0)
        block(mesh, x, 1)
        replicate(mesh, y)
    simulate(fd, [integers(3, 4)])
    assert "T1 is computed where the operands of reshape T1 lie" in fd.explain()


def test_heads_of_a_column_parallel_linear_stay_sharded() -> None:
    """[b, s, e] -> [b, s, h*k] -> [b, s, h, k] -> [b, h, s, k] -> [b, s, h*k], b and h sharded."""
    dp, tp, b, s, e, h, k = 2, 2, 4, 3, 8, 4, 5
    mesh = DeviceMesh([[0, 1], [2, 3]])
    with FusionDefinition() as fd:
        x = fd.define_tensor([b, s, e], contiguity=True)
        w = fd.define_tensor([h * k, e], contiguity=True)
        heads = fd.ops.reshape(fd.ops.linear(x, w), [b, s, h, k])
        turned = fd.ops.permute(heads, [0, 2, 1, 3])
        fd.add_output(fd.ops.sum(turned, [3]))
        fd.add_output(fd.ops.reshape(fd.ops.permute(turned, [0, 2, 1, 3]), [b, s, h * k]) + 1.0)
        x.set_device_mesh(mesh)
        x.outer_split(0, dp)
        x.axis(0).parallelize(ParallelType.mesh_y)
        w.set_device_mesh(mesh)
        w.outer_split(0, tp)
        w.axis(0).parallelize(ParallelType.mesh_x)
    inputs = [integers(b, s, e), integers(h * k, e)]
    value = torch.nn.functional.linear(*inputs)
    totals = value.reshape(b, s, h, k).sum(3).permute(0, 2, 1)
    for rank, [total, merged] in enumerate(simulate(fd, inputs)):
        row, column = divmod(rank, tp)
        want = totals.chunk(dp, 0)[row].chunk(tp, 1)[column]
        assert torch.equal(total.as_subclass(torch.Tensor), want)
        want = (value + 1).chunk(dp, 0)[row].chunk(tp, 2)[column]
        assert torch.equal(merged.as_subclass(torch.Tensor), want)
    assert fd.fec.communications() == ()


def test_an_unknown_size_that_ranks_cannot_share_is_reported() -> None:
    """[n] -> [n/2, 2]: whole rows for each rank are demanded when the program runs."""
    mesh = DeviceMesh(range(2))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.reshape(x, [-1, 2]) * 2.0)
        block(mesh, x, 0)
    assert len(simulate(fd, [integers(12)])) == 2
    with pytest.raises(
        RuntimeError, match=r"reshaped along a sharded axis of global size 6 \(i0\)"
    ):
        simulate(fd, [integers(6)])
