"""Indexing, slices, scans and their like on a mesh, by value on every rank, on whole numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.nn import functional

from meshfuse import DataType, DistributedTensor, FusionDefinition, ParallelType, TensorView
from meshfuse.multidevice import DeviceMesh, simulate
from sharded_runs import own_part

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
RANKS = [1, 2, 3, 4]
Place = Callable[[DeviceMesh, TensorView], None]
Build = Callable[..., Sequence[TensorView]]


def integers(*shape: int, low: int = -9, high: int = 9) -> torch.Tensor:
    """The same for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high, shape, generator=generator)


def block(axis: int, owner: ParallelType = X) -> Place:
    """Blocks of a tensor axis, for a tensor whose other axes in front are not split."""

    def place(mesh: DeviceMesh, tensor: TensorView) -> None:
        tensor.set_device_mesh(mesh)
        tensor.outer_split(axis, mesh.ranks.axis_size(owner))
        tensor.axis(axis).parallelize(owner)

    return place


def cyclic(axis: int) -> Place:
    """Index i on rank i % d."""

    def place(mesh: DeviceMesh, tensor: TensorView) -> None:
        tensor.set_device_mesh(mesh)
        tensor.inner_split(axis, mesh.ranks.axis_size(X))
        tensor.axis(axis + 1).parallelize(X)

    return place


def whole(mesh: DeviceMesh, tensor: TensorView) -> None:
    tensor.set_device_mesh(mesh)


def check(
    mesh: DeviceMesh,
    build: Build,
    inputs: Sequence[torch.Tensor],
    places: Sequence[Place],
    wanted: Sequence[torch.Tensor],
    *,
    outs: Sequence[Place] = (),
    symbolic: bool = False,
) -> tuple[list[int], list[str]]:
    """Compare every rank's part. Returns the axes that x shards, and the communications."""
    with FusionDefinition() as fd:
        tensors = [fd.from_pytorch(value, static_sizes=not symbolic) for value in inputs]
        results = build(fd, *tensors)
        for result in results:
            fd.add_output(result)
        for place, tensor in zip(places, tensors, strict=True):
            place(mesh, tensor)
        for place, result in zip(outs, results, strict=False):
            place(mesh, result)
    simulated = simulate(fd, inputs)
    axes: list[int] = []
    for outputs in simulated:
        axes = []
        for output, want in zip(outputs, wanted, strict=True):
            assert isinstance(output, DistributedTensor)
            assert output.dtype == want.dtype
            axes.append(output.axis_sharded_on(X))
    for position, want in enumerate(wanted):
        parts = [outputs[position] for outputs in simulated]
        for rank, part in enumerate(parts):
            assert isinstance(part, DistributedTensor)
            assert torch.equal(part.local, own_part(part, want, rank)), rank
    return axes, [step.collective.value for step in fd.fec.communications()]


# Indices along the sharded axis: each rank takes what it holds, the rest is 0, and terms are added.


def embedding(fd: FusionDefinition, index: TensorView, weight: TensorView) -> list[TensorView]:
    return [fd.ops.embedding_fwd(index, weight)]


def table(rows: int, columns: int = 5) -> torch.Tensor:
    """With infinities and NaN, which must not leak into what other rows give."""
    values = integers(rows, columns).float()
    values[1], values[-1, 0] = math.inf, -math.inf
    return values


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("d", RANKS)
def test_vocabulary_parallel_embedding(d: int, symbolic: bool) -> None:
    index, weight = integers(2, 6, low=0, high=12), table(12)
    axes, posted = check(
        DeviceMesh(range(d)),
        embedding,
        [index, weight],
        [whole, block(0)],
        [weight[index]],
        symbolic=symbolic,
    )
    assert axes == [-1]
    assert posted == (["all_reduce"] if d > 1 else [])


@pytest.mark.parametrize("rows", [3, 10, 13])
@pytest.mark.parametrize("d", [2, 3, 4])
@pytest.mark.parametrize("place", [block(0), cyclic(0)], ids=["blocks", "cyclic"])
def test_vocabulary_in_parts_of_any_kind(place: Place, d: int, rows: int) -> None:
    index, weight = integers(2, 6, low=0, high=rows), integers(rows, 5)
    mesh = DeviceMesh(range(d))
    check(mesh, embedding, [index, weight], [whole, place], [weight[index]])


@pytest.mark.parametrize("d", RANKS)
def test_vocabulary_parallel_embedding_of_sharded_tokens(d: int) -> None:
    """The tokens are few: they are gathered, and the sum is scattered."""
    index, weight = integers(2, 12, low=0, high=12), table(12)
    axes, posted = check(
        DeviceMesh(range(d)), embedding, [index, weight], [block(1), block(0)], [weight[index]]
    )
    assert axes == [1]
    assert posted == (["all_gather", "reduce_scatter"] if d > 1 else [])


@pytest.mark.parametrize("d", RANKS)
def test_result_scattered_over_the_sequence(d: int) -> None:
    index, weight = integers(2, 12, low=0, high=24), table(24)
    axes, posted = check(
        DeviceMesh(range(d)),
        embedding,
        [index, weight],
        [whole, block(0)],
        [weight[index]],
        outs=[block(1)],
    )
    assert axes == [1]
    assert posted == (["reduce_scatter"] if d > 1 else [])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("d", RANKS)
def test_other_axes_are_local(d: int, axis: int) -> None:
    """Tokens or columns in blocks: nothing moves."""
    index, weight = integers(12, 2, low=0, high=7), table(7, 12)
    places = [block(0), whole] if axis == 0 else [whole, block(1)]
    axes, posted = check(DeviceMesh(range(d)), embedding, [index, weight], places, [weight[index]])
    assert axes == [0 if axis == 0 else 2]
    assert posted == []


@pytest.mark.parametrize("d", RANKS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.bfloat16], ids=str)
def test_element_types(dtype: torch.dtype, d: int) -> None:
    """Terms of bool combine by or."""
    index = integers(7, low=0, high=12)
    weight = integers(12, 3) > 0 if dtype == torch.bool else integers(12, 3).to(dtype)
    check(
        DeviceMesh(range(d)),
        lambda fd, i, w: [fd.ops.index_select(w, i, 0)],
        [index, weight],
        [whole, block(0)],
        [weight[index]],
    )


@pytest.mark.parametrize("d", RANKS)
def test_take_along_a_sharded_axis(d: int) -> None:
    """Negative indices count from the end of the whole axis."""
    values, index = integers(6, 24), integers(6, 5, low=-24, high=24)
    axes, posted = check(
        DeviceMesh(range(d)),
        lambda fd, x, i: [fd.ops.take_along_axis(x, i, 1)],
        [values, index],
        [block(1), whole],
        [values.gather(1, index % 24)],
    )
    assert axes == [-1]
    assert posted == (["all_reduce"] if d > 1 else [])


@pytest.mark.parametrize("d", RANKS)
def test_take_along_axis_with_both_in_blocks(d: int) -> None:
    values, index = integers(12, 5), integers(12, 7, low=0, high=5)
    axes, posted = check(
        DeviceMesh(range(d)),
        lambda fd, x, i: [fd.ops.take_along_axis(x, i, 1)],
        [values, index],
        [block(0), block(0)],
        [values.gather(1, index)],
    )
    assert axes == [0]
    assert posted == []


@pytest.mark.parametrize("d", RANKS)
def test_norm_of_rows_in_parts(d: int) -> None:
    """Lengths of rows are summed over ranks that have parts of them."""
    index, weight = integers(5, low=0, high=7), (integers(7, 12) * 4).double()
    check(
        DeviceMesh(range(d)),
        lambda fd, i, w: [fd.ops.embedding_fwd(i, w, max_norm=1e9, norm_type=1.0)],
        [index, weight],
        [whole, block(1)],
        [weight[index]],
    )


def test_vocabulary_over_two_mesh_axes() -> None:
    """Rows in parts over y, then x; and rows over y beside columns over x."""
    mesh = DeviceMesh([[0, 1], [2, 3]])
    index, weight = integers(2, 6, low=0, high=12), integers(12, 4)

    def both(mesh: DeviceMesh, tensor: TensorView) -> None:
        block(0, Y)(mesh, tensor)
        tensor.outer_split(1, 2)
        tensor.axis(1).parallelize(X)

    def each(mesh: DeviceMesh, tensor: TensorView) -> None:
        block(0, Y)(mesh, tensor)
        tensor.outer_split(2, 2)
        tensor.axis(2).parallelize(X)

    wanted = [weight[index]]
    assert check(mesh, embedding, [index, weight], [whole, both], wanted)[0] == [-1]
    assert check(mesh, embedding, [index, weight], [whole, each], wanted) == ([2], ["all_reduce"])


# Along one axis: that one is gathered, others stay.


def along_columns(fd: FusionDefinition, x: TensorView) -> list[TensorView]:
    ops = fd.ops
    return [
        ops.slice(x, [0, 3], [ops.size(x, 0), 9]),
        ops.pad(x, [1, 2, 0, 0], 1),
        ops.pad(x, [0, 24]),
        ops.slice(x, [0, 0], [ops.size(x, 0), 99]),
        ops.cat([x, ops.neg(x)], 1),
        ops.cumsum(x, 1),
        ops.cummax(x, -1),
        *ops.topk(x, 12, 1, sorted=True),
        ops.index_select(x, ops.iota(3, 5, 2), 1),
    ]


def columns_wanted(x: torch.Tensor) -> list[torch.Tensor]:
    return [
        x[:, 3:9],
        functional.pad(x, (1, 2), value=1),
        functional.pad(x, (0, 24)),
        x,
        torch.cat([x, -x], 1),
        x.cumsum(1),
        x.cummax(1).values,
        *x.topk(12, 1),
        x[:, [5, 7, 9]],
    ]


def distinct(*shape: int) -> torch.Tensor:
    """Ties would leave the indices of topk open."""
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(math.prod(shape), generator=generator).reshape(shape)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("d", RANKS)
def test_rows_in_blocks_stay_where_they_are(d: int, symbolic: bool) -> None:
    x = distinct(12, 24)
    axes, posted = check(
        DeviceMesh(range(d)),
        along_columns,
        [x],
        [block(0)],
        columns_wanted(x),
        symbolic=symbolic,
    )
    assert axes == [0] * 10
    assert posted == []


@pytest.mark.parametrize("d", RANKS)
def test_columns_in_blocks_are_gathered(d: int) -> None:
    x = distinct(3, 24)
    _, posted = check(DeviceMesh(range(d)), along_columns, [x], [block(1)], columns_wanted(x))
    assert set(posted) == ({"all_gather", "all_reduce"} if d > 1 else set())


@pytest.mark.parametrize("place", [block(1), cyclic(1)], ids=["blocks", "cyclic"])
@pytest.mark.parametrize("d", RANKS)
def test_results_in_parts_along_their_axis(d: int, place: Place) -> None:
    """Each rank keeps its part of what it computes whole; sizes need not divide."""
    x = distinct(3, 24)
    places = [place] * 10
    axes, posted = check(
        DeviceMesh(range(d)), along_columns, [x], [whole], columns_wanted(x), outs=places
    )
    assert axes == [1] * 10
    assert posted == []


@pytest.mark.parametrize("d", RANKS)
@pytest.mark.parametrize("dtype", [DataType.Int, DataType.Float])
def test_iota_counts_globally(dtype: DataType, d: int) -> None:
    x = integers(2, 10).to(torch.int64 if dtype is DataType.Int else torch.float32)
    first, step = (3, -2) if dtype is DataType.Int else (0.5, 0.25)
    axes, posted = check(
        DeviceMesh(range(d)),
        lambda fd, t: [fd.ops.add(t, fd.ops.iota(fd.ops.size(t, 1), first, step, dtype))],
        [x],
        [block(1)],
        [x + (torch.arange(10) * step + first).to(x.dtype)],
    )
    assert axes == [1]
    assert posted == []


def test_an_index_beyond_the_whole_axis_is_found_on_every_rank() -> None:
    with FusionDefinition() as fd:
        weight = fd.define_tensor([8, 3])
        index = fd.define_tensor([-1], dtype=DataType.Int)
        fd.add_output(fd.ops.embedding_fwd(index, weight))
        block(0)(DeviceMesh(range(2)), weight)
    with pytest.raises(RuntimeError, match=r"index 8 must lie in \[0, 8\)"):
        simulate(fd, [torch.ones(8, 3), torch.tensor([0, 8])])
