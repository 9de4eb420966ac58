"""Placements and shardings say the same of every rank's shard, by torch's own cutting."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import Any

import pytest
import torch

from meshfuse.base import optional
from meshfuse.base.errors import Unsupported, UserError
from meshfuse.dist.dtensor import MODULE, to_torch
from meshfuse.dist.placements import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    placements_of,
    sharding_from_placements,
)
from meshfuse.expr import const, const_value
from meshfuse.facts.holdings import held
from meshfuse.facts.sharding import Digit, Digits, Sharding
from meshfuse.ir.mesh import DeviceMesh, ParallelType, make_mesh

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
Coordinates = dict[ParallelType, int]
Indices = tuple[tuple[int, ...], ...]


def mesh_of_shape(*shape: int) -> DeviceMesh:
    return make_mesh(torch.arange(math.prod(shape)).view(shape))


def places(mesh: DeviceMesh) -> Iterator[Coordinates]:
    for place in product(*map(range, mesh.shape)):
        yield dict(zip(mesh.parallel_types(), place, strict=True))


def cut_by_torch(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], at: Coordinates
) -> Indices:
    """The indices of each axis that torch gives to the rank at a place."""
    module = optional.load(MODULE)
    axes = [torch.arange(size) for size in shape]
    for owner, placement in zip(mesh.parallel_types(), placements, strict=True):
        if isinstance(placement, Shard | StridedShard):
            theirs: Any = to_torch(placement, module)
            theirs = type(theirs)(0, **_split_factor(placement))
            parts, _ = theirs._split_tensor(
                axes[placement.dim], mesh.axis_size(owner), with_padding=False
            )
            axes[placement.dim] = parts[at[owner]]
    return tuple(tuple(axis.tolist()) for axis in axes)


def _split_factor(placement: Shard | StridedShard) -> dict[str, int]:
    if isinstance(placement, Shard):
        return {}
    return {"split_factor": placement.split_factor}


def cut_by_digits(sharding: Sharding, shape: Sequence[int], at: Coordinates) -> Indices:
    return tuple(
        tuple(index for run in held(digits, size, at) for index in run)
        for digits, size in zip(sharding.axes, shape, strict=True)
    )


def all_placements(factors: Sequence[int]) -> list[Placement]:
    strided = [StridedShard(dim, factor) for dim in (0, 1) for factor in factors]
    return [Replicate(), Shard(0), Shard(1), *strided]


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "factors", "supported"),
    [
        ((2,), (12, 8), (2, 3, 4), 7),
        ((3,), (7, 5), (2, 3), 5),
        ((2, 3), (24, 12), (2, 3, 4), 46),
        ((2, 2), (7, 9), (2,), 15),
        ((2, 2, 2), (16, 8), (2, 4), 277),
    ],
)
def test_every_placement_is_a_sharding_or_an_error(
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...],
    factors: tuple[int, ...],
    supported: int,
) -> None:
    """The others straddle blocks or do not divide: no digits cut as torch does."""
    mesh, count = mesh_of_shape(*mesh_shape), 0
    for placements in product(all_placements(factors), repeat=mesh.ndim):
        try:
            sharding = sharding_from_placements(mesh, placements, shape)
        except Unsupported as error:
            assert "redistribute()" in str(error)
            continue
        back = placements_of(sharding, shape)
        for at in places(mesh):
            theirs = cut_by_torch(mesh, placements, shape, at)
            assert cut_by_digits(sharding, shape, at) == theirs, (placements, sharding)
            assert cut_by_torch(mesh, back, shape, at) == theirs, (placements, back)
        assert sharding_from_placements(mesh, back, shape) == sharding
        count += 1
    assert count == supported


def dealt(mesh: DeviceMesh, shape: Sequence[int]) -> Iterator[Sharding]:
    """Mesh axes in any order, over two tensor axes or none, with or without local digits of 2
    before each."""
    types = mesh.parallel_types()
    for order, homes, local in product(
        permutations(types), product((0, 1, None), repeat=mesh.ndim), (False, True)
    ):
        axes: list[list[Digit]] = [[], []]
        for owner, home in zip(order, homes, strict=True):
            if home is not None:
                if local:
                    axes[home].append(Digit(const(2)))
                axes[home].append(Digit(const(mesh.axis_size(owner)), owner))
        yield Sharding(mesh, tuple(_filled(a, n) for a, n in zip(axes, shape, strict=True)))


def _filled(digits: list[Digit], size: int) -> Digits:
    above = math.prod(const_value(digit.extent) or 0 for digit in digits)
    rest = -(-size // above)
    return (*digits, Digit(const(rest))) if rest > 1 or not digits else tuple(digits)


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 3), (2, 2, 2), (1, 2)])
def test_every_even_sharding_has_placements(mesh_shape: tuple[int, ...]) -> None:
    mesh, shape = mesh_of_shape(*mesh_shape), (192, 192)
    for sharding in dealt(mesh, shape):
        placements = placements_of(sharding, shape)
        for at in places(mesh):
            found = cut_by_torch(mesh, placements, shape, at)
            assert found == cut_by_digits(sharding, shape, at), (sharding, placements)
        assert sharding_from_placements(mesh, placements, shape) == sharding


@pytest.mark.parametrize("size", range(1, 14))
def test_uneven_shardings_have_placements_where_torch_cuts_alike(size: int) -> None:
    mesh, alike = mesh_of_shape(2, 3), 0
    for sharding in dealt(mesh, (size, 6)):
        try:
            placements = placements_of(sharding, (size, 6))
        except Unsupported as error:
            assert "full_tensor() works for all shardings" in str(error)
            continue
        alike += 1
        for at in places(mesh):
            found = cut_by_torch(mesh, placements, (size, 6), at)
            assert found == cut_by_digits(sharding, (size, 6), at), (sharding, placements)
    assert alike > 10


def test_what_cannot_be_said() -> None:
    mesh, line = mesh_of_shape(2, 4), mesh_of_shape(2)
    with pytest.raises(
        Unsupported, match=r"^\[_StridedShard\(0, split_factor=2\), Shard\(0\)\] on"
    ):
        sharding_from_placements(mesh, (StridedShard(0, 2), Shard(0)), (16,))
    with pytest.raises(Unsupported, match=r"axis 0 does not divide.*\[mesh_y\{2\} mesh_x\{4\} 2\]"):
        sharding_from_placements(mesh, (Shard(0), Shard(0)), (9,))
    with pytest.raises(UserError, match="one placement for each of 2 mesh axes"):
        sharding_from_placements(mesh, (Shard(0),), (16,))
    with pytest.raises(UserError, match="the tensor has no axis 1"):
        sharding_from_placements(line, (Shard(1),), (16,))
    assert sharding_from_placements(line, (Partial("max"),), (3,)).partial == {X: "max"}
    uneven = Sharding(mesh, ((Digit(const(2), Y), Digit(const(4), X), Digit(const(2))),))
    with pytest.raises(Unsupported, match=r"of axis 0, \[Shard\(0\), Shard\(0\)\] cuts other"):
        placements_of(uneven, (9,))
