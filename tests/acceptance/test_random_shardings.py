"""Random sharded programs in the simulator, exactly as one device has them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshfuse import DistributedTensor
from meshfuse.cache import FusionCache
from meshfuse.expr import const_value
from meshfuse.facts.sharding import Digits
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.multidevice import simulate
from random_shardings import LARGEST, MESHES, Cut, Op, Placement, Recipe, Shape, recipes

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

KEPT = [
    Recipe(
        shapes=((1,),),
        ops=(Op("add", (0, 0)),),
        outputs=(1,),
        placements=((0, Placement(0, (2,))), (1, Placement(0, (2,), (Cut(0, 0, "block"),)))),
    ),
    Recipe(
        shapes=((0, 0), (0,)),
        ops=(Op("linear", (0, 0)), Op("add", (0, 0))),
        outputs=(3,),
        placements=(
            (0, Placement(0, (2, 2), (Cut(0, 1, "block"), Cut(1, 0, "strided")))),
            (1, Placement(0, (2, 2))),
            (3, Placement(0, (2, 2), (Cut(1, 1, "block"),))),
        ),
    ),
    Recipe(
        shapes=((2, 3),),
        ops=(Op("twice", (0,)), Op("sum", (1,), ((0, 1), False))),
        outputs=(2,),
        placements=(
            (0, Placement(0, (1,))),
            (1, Placement(0, (2, 2), (Cut(1, 1, "block"),))),
            (2, Placement(2, (2, 2))),
        ),
    ),
]


@pytest.fixture
def op_by_op(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernels: what moves is looked at, and compiling takes most of the time."""
    monkeypatch.setattr(FusionCache, "_compiler_for", lambda *_: None)
    FusionCache.instance().reset()
    yield
    FusionCache.instance().reset()


def indices_held(digits: Digits, size: int, coordinates: dict[ParallelType, int]) -> list[int]:
    """By the definition of digits: number by number."""
    extents = [const_value(digit.extent) for digit in digits]
    held: list[int] = []
    for index, value in zip(
        range(size), itertools.product(*(range(e or 0) for e in extents)), strict=False
    ):
        pairs = zip(digits, value, strict=True)
        if all(d.owner is None or coordinates[d.owner] == digit for d, digit in pairs):
            held.append(index)
    return held


def part_held(
    value: torch.Tensor, mesh: DeviceMesh, axes: Sequence[Digits], rank: int
) -> torch.Tensor:
    coordinates = {owner: mesh.coordinate(rank, owner) or 0 for owner in mesh.parallel_types()}
    for axis, digits in enumerate(axes):
        held = indices_held(digits, value.shape[axis], coordinates)
        value = value.index_select(axis, torch.tensor(held, dtype=torch.long))
    return value


def check(recipe: Recipe) -> None:
    expected = recipe.expected()
    results = simulate(recipe.define(), recipe.inputs())
    for rank, outputs in enumerate(results):
        assert len(outputs) == len(expected)
        for output, value in zip(outputs, expected, strict=True):
            assert isinstance(output, DistributedTensor)
            mesh, sharding = output.mesh, output.sharding
            assert mesh is not None and not sharding.partial
            if rank not in mesh.ids:
                assert output.numel() == 0 and output.global_shape == value.shape
                continue
            part = part_held(value, mesh, sharding.axes, rank)
            assert output.dtype == part.dtype
            assert torch.equal(output.local, part), (rank, output.local, part)


def check_drawn(data: st.DataObject, mesh: Shape, several_meshes: bool) -> None:
    recipe = data.draw(recipes(mesh, several_meshes=several_meshes))
    assume(all(bool((value.abs() < LARGEST).all()) for value in recipe.expected()))
    check(recipe)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@settings(max_examples=28, suppress_health_check=SLOW)
@given(data=st.data())
@pytest.mark.usefixtures("op_by_op")
def test_one_mesh(mesh: Shape, data: st.DataObject) -> None:
    check_drawn(data, mesh, several_meshes=False)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
@settings(max_examples=14, suppress_health_check=SLOW)
@given(data=st.data())
@pytest.mark.usefixtures("op_by_op")
def test_several_meshes(mesh: Shape, data: st.DataObject) -> None:
    check_drawn(data, mesh, several_meshes=True)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
@settings(max_examples=6, suppress_health_check=SLOW)
@given(data=st.data())
def test_kernels(mesh: Shape, data: st.DataObject) -> None:
    """Compiled: local sizes, empty ones among them, reach the kernels."""
    check_drawn(data, mesh, several_meshes=False)


@pytest.mark.nightly
@pytest.mark.parametrize("several_meshes", [False, True])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@settings(max_examples=300, suppress_health_check=SLOW)
@given(data=st.data())
@pytest.mark.usefixtures("op_by_op")
def test_many(mesh: Shape, several_meshes: bool, data: st.DataObject) -> None:
    check_drawn(data, mesh, several_meshes)


@pytest.mark.parametrize("recipe", KEPT)
@pytest.mark.usefixtures("op_by_op")
def test_kept(recipe: Recipe) -> None:
    """What failed once."""
    check(recipe)
