"""Cutting and joining tensors, against an oracle that walks every element."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from index_sets import digits
from meshfuse.base.errors import UserError
from meshfuse.dist.shard import global_shape, local_shape, shard_tensor, unshard_tensor
from meshfuse.expr import const, symbol
from meshfuse.facts.sharding import Digit, Sharding
from meshfuse.ir.mesh import DeviceMesh, ParallelType, make_mesh

X, Y, Z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


def split_index(index: int, axis: Sequence[Digit], mesh: DeviceMesh, rank: int) -> int | None:
    """The local index of a global one, digit by digit; None if another rank holds it."""
    values: list[int] = []
    for digit in reversed(axis):
        extent = int(str(digit.extent))
        values.insert(0, index % extent)
        index //= extent
    local = 0
    for digit, value in zip(axis, values, strict=True):
        if digit.owner is None:
            local = local * int(str(digit.extent)) + value
        elif mesh.coordinate(rank, digit.owner) != value:
            return None
    return local


def part_by_walking(tensor: torch.Tensor, sharding: Sharding, rank: int) -> dict[tuple, int]:
    """Local index -> value, for what `rank` holds."""
    mesh = sharding.mesh
    assert mesh is not None
    held: dict[tuple, int] = {}
    for index in torch.cartesian_prod(*(torch.arange(n) for n in tensor.shape)).view(
        -1, tensor.ndim
    ):
        place = [
            split_index(int(i), axis, mesh, rank)
            for i, axis in zip(index, sharding.axes, strict=True)
        ]
        if None not in place:
            held[tuple(place)] = int(tensor[tuple(index)])
    return held


def check(tensor: torch.Tensor, sharding: Sharding) -> dict[int, torch.Tensor]:
    mesh = sharding.mesh
    assert mesh is not None
    parts = {rank: shard_tensor(tensor, sharding, rank) for rank in mesh.ids}
    for rank, part in parts.items():
        assert part.is_contiguous()
        held = part_by_walking(tensor, sharding, rank)
        assert part.numel() == len(held)
        assert all(int(part[place]) == value for place, value in held.items())
        assert part.shape == local_shape(sharding, tensor.shape, rank)
    assert torch.equal(unshard_tensor(parts, sharding, tensor.shape), tensor)
    return parts


def test_block_cyclic_and_strided() -> None:
    mesh = make_mesh([0, 1])
    block = check(counted(6), Sharding(mesh, (digits((2, X), 3),)))
    cyclic = check(counted(6), Sharding(mesh, (digits(3, (2, X)),)))
    strided = check(counted(8), Sharding(mesh, (digits(2, (2, X), 2),)))
    assert [block[1].tolist(), cyclic[1].tolist(), strided[1].tolist()] == [
        [3, 4, 5],
        [1, 3, 5],
        [2, 3, 6, 7],
    ]


def test_blocks_follow_the_mesh_not_the_rank() -> None:
    parts = check(counted(6), Sharding(make_mesh([2, 0, 1]), (digits((3, X), 2),)))
    assert [parts[rank].tolist() for rank in range(3)] == [[2, 3], [4, 5], [0, 1]]


def test_order_of_two_mesh_axes_on_one_tensor_axis() -> None:
    mesh = make_mesh([[0, 1], [2, 3]])
    y_outer = check(counted(4), Sharding(mesh, (digits((2, Y), (2, X)),)))
    x_outer = check(counted(4), Sharding(mesh, (digits((2, X), (2, Y)),)))
    assert [int(y_outer[rank]) for rank in range(4)] == [0, 1, 2, 3]
    assert [int(x_outer[rank]) for rank in range(4)] == [0, 2, 1, 3]


def test_three_mesh_axes_on_two_tensor_axes() -> None:
    mesh = make_mesh([[[5, 0, 3], [1, 4, 2]], [[6, 7, 8], [11, 10, 9]]])
    check(counted(12, 8), Sharding(mesh, (digits(2, (2, Z), (3, X)), digits((2, Y), 4))))


def test_whole_axis_keeps_a_dim_of_size_one() -> None:
    sharding = Sharding(make_mesh([0, 1, 2]), (digits((3, X)), digits(4)))
    assert check(counted(3, 4), sharding)[2].tolist() == [[8, 9, 10, 11]]


def test_replicas_along_an_unused_axis() -> None:
    sharding = Sharding(make_mesh([[0, 1], [2, 3]]), (digits((2, Y), 2),))
    parts = check(counted(4), sharding)
    assert parts[0].tolist() == parts[1].tolist() == [0, 1]
    assert torch.equal(unshard_tensor({1: parts[1], 2: parts[2]}, sharding, (4,)), counted(4))


@pytest.mark.parametrize("dim", [0, 1])
def test_expanded_and_transposed_tensors(dim: int) -> None:
    mesh = make_mesh([0, 1])
    axes = (digits((2, X), 2), digits(6)) if dim == 0 else (digits(4), digits((2, X), 3))
    expanded = torch.arange(6).expand(4, 6)
    transposed = counted(6, 4).t()
    check(expanded, Sharding(mesh, axes))
    check(transposed, Sharding(mesh, axes))


def test_symbolic_digit_follows_from_the_size() -> None:
    sharding = Sharding(make_mesh([0, 1]), ((Digit(const(2), X), Digit(symbol("i0", low=1))),))
    assert shard_tensor(counted(10), sharding, 1).tolist() == [5, 6, 7, 8, 9]


def test_rank_outside_the_mesh_holds_nothing() -> None:
    part = shard_tensor(
        counted(4, 2), Sharding(make_mesh([0, 1]), (digits((2, X), 2), digits(2))), 7
    )
    assert part.shape == (0, 0)
    assert part.dtype == torch.int64


def test_empty_axis_and_no_mesh() -> None:
    check(counted(4, 0), Sharding(make_mesh([0, 1]), (digits((2, X), 2), digits(0))))
    assert shard_tensor(counted(3), Sharding(None, (digits(3),)), 0).tolist() == [0, 1, 2]


def test_terms_of_a_reduction_are_reduced() -> None:
    sharding = Sharding(make_mesh([[0, 1], [2, 3]]), (digits((2, X), 1),), {Y: "sum"})
    parts = {rank: torch.tensor([10.0 * rank]) for rank in range(4)}
    assert unshard_tensor(parts, sharding, (2,)).tolist() == [20.0, 40.0]
    with pytest.raises(UserError, match=r"needs 2 part\(s\) of the ranks at mesh_x=1"):
        unshard_tensor({rank: parts[rank] for rank in (0, 1, 2)}, sharding, (2,))


def test_refusals_name_sizes() -> None:
    sharding = Sharding(make_mesh([0, 1]), (digits((2, X), 3),))
    with pytest.raises(UserError, match=r"size 7 .* \[mesh_x\{2\} 3\] on DeviceMesh.* make up 6"):
        shard_tensor(counted(7), sharding, 0)
    with pytest.raises(UserError, match=r"shape \(2, 3\) .* must have 1 axes"):
        shard_tensor(counted(2, 3), sharding, 0)


@st.composite
def shardings(draw: st.DrawFn) -> tuple[tuple[int, ...], Sharding]:
    """A shape of up to two axes and a sharding of it over a mesh of up to three."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    size = math.prod(shape)
    ids = tuple(draw(st.permutations(range(size))))
    mesh = DeviceMesh(ids, shape, ("",) * len(shape))
    ndim = draw(st.integers(1, 2))
    axes: list[list[Digit]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(mesh.parallel_types())):
        target = draw(st.integers(-1, ndim - 1))
        if target >= 0:
            axes[target].append(Digit(const(mesh.axis_size(axis)), axis))
    for axis in axes:
        for _ in range(draw(st.integers(0, 2))):
            axis.insert(draw(st.integers(0, len(axis))), Digit(const(draw(st.integers(1, 3)))))
    covered = [math.prod(int(str(d.extent)) for d in axis) for axis in axes]
    global_sizes = tuple(draw(st.integers(0, n)) for n in covered)
    return global_sizes, Sharding(mesh, tuple(tuple(axis) for axis in axes))


@given(shardings())
def test_any_digits_round_trip(case: tuple[tuple[int, ...], Sharding]) -> None:
    """Of axes that the digits make up exactly, and of shorter ones, down to none at all."""
    shape, sharding = case
    check(counted(*shape), sharding)


def test_blocks_that_are_shorter_or_empty() -> None:
    mesh = make_mesh(range(4))
    block = check(counted(5), Sharding(mesh, (digits((4, X), 2),)))
    cyclic = check(counted(5), Sharding(mesh, (digits(2, (4, X)),)))
    assert [part.tolist() for part in block.values()] == [[0, 1], [2, 3], [4], []]
    assert [part.tolist() for part in cyclic.values()] == [[0, 4], [1], [2], [3]]


def test_the_whole_is_as_large_as_all_equal_blocks() -> None:
    sharding = Sharding(make_mesh([[0, 1], [2, 3]]), (digits((2, Y), (2, X), 3), digits(5)))
    assert global_shape((3, 5), sharding) == (12, 5)
