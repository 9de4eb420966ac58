"""Random sharded programs in the simulator, exactly as one device has them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshfuse import DistributedTensor
from meshfuse.base.errors import Unsupported
from meshfuse.cache import FusionCache
from meshfuse.expr import const_value
from meshfuse.facts.sharding import Digits
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.multidevice import Overlap, simulate
from random_operations import ROUNDED, Op
from random_shardings import LARGEST, MESHES, Cut, Input, Placement, Recipe, Shape, recipes

FORMS = (Overlap.chunks(2), Overlap.chunks(3), Overlap.peers(), Overlap.peers(2))
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

KEPT = [
    Recipe(
        inputs=(Input(()), Input((3,)), Input((3, 3), order=(0, 1), expanded=0)),
        ops=(
            Op("cat", (2, 2), (0,)),
            Op("broadcast_in_dim", (0,), ((1,), ())),
            Op("add", (2, 2)),
            Op("add", (2, 2)),
            Op("broadcast_in_dim", (0,), ((1,), ())),
            Op("permute", (3,), (0, 1)),
        ),
        outputs=(8,),
        placements=(
            (0, Placement(0, (2, 2))),
            (1, Placement(0, (2, 2), (Cut(0, 0), Cut(1, 0)))),
            (2, Placement(0, (2, 2), (Cut(0, 0), Cut(1, 0)))),
            (8, Placement(0, (2, 2), (Cut(0, 0, "strided"), Cut(1, 1, "cyclic")))),
        ),
    ),
    Recipe(
        inputs=(Input((1,)),),
        ops=(Op("add", (0, 0)),),
        outputs=(1,),
        placements=((0, Placement(0, (2,))), (1, Placement(0, (2,), (Cut(0, 0, "block"),)))),
    ),
    Recipe(
        inputs=(Input((0, 0)), Input((0,))),
        ops=(Op("linear", (0, 0)), Op("add", (0, 0))),
        outputs=(3,),
        placements=(
            (0, Placement(0, (2, 2), (Cut(0, 1, "block"), Cut(1, 0, "strided")))),
            (1, Placement(0, (2, 2))),
            (3, Placement(0, (2, 2), (Cut(1, 1, "block"),))),
        ),
    ),
    Recipe(
        inputs=(Input((2, 3)),),
        ops=(Op("twice", (0,)), Op("sum", (1,), ((0, 1), False))),
        outputs=(2,),
        placements=(
            (0, Placement(0, (1,))),
            (1, Placement(0, (2, 2), (Cut(1, 1, "block"),))),
            (2, Placement(2, (2, 2))),
        ),
    ),
    Recipe(
        inputs=(Input((12, 3)),),
        ops=(Op("cumsum", (0,), (0,)),),
        outputs=(1,),
        placements=((0, Placement(0, (2,), (Cut(0, 0),))), (1, Placement(0, (2,)))),
        updates=((1, 0),),
    ),
    Recipe(
        inputs=(Input((6, 7), unknown=(0,)),),
        ops=(Op("numbered", (0,), (0, 6)),),
        outputs=(1,),
        placements=((0, Placement(0, (4, 2), (Cut(0, 0), Cut(1, 0, "strided")))),),
    ),
    Recipe(
        inputs=(Input(()),),
        ops=(Op("broadcast_in_dim", (0,), ((3,), ())), Op("slice", (1,), ((2,), (3,)))),
        outputs=(2,),
        placements=((0, Placement(0, (1,))), (1, Placement(2, (4,), (Cut(0, 0),)))),
    ),
    Recipe(
        inputs=(Input((1, 2)),),
        ops=(Op("take_along_axis", (0, 0), (0, 1)),),
        outputs=(1,),
        placements=((0, Placement(0, (2,))), (1, Placement(0, (2,), (Cut(0, 0, reduced=True),)))),
    ),
    Recipe(
        inputs=(Input((2, 2, 2), unknown=(0, 1)),),
        ops=(
            Op("max", (0,), ((1,), False)),
            Op("embedding", (1, 1), (2,)),
            Op("reshape", (2,), (2, 2, 2, 1)),
        ),
        outputs=(3,),
        placements=((0, Placement(0, (2,), (Cut(0, 0),))),),
    ),
    Recipe(
        inputs=(Input((3, 3, 3), unknown=(1, 2)),),
        ops=(Op("reshape", (0,), (3, 9)),),
        outputs=(1,),
        placements=((0, Placement(0, (4,), (Cut(0, 1, "cyclic"),))),),
    ),
    Recipe(
        inputs=(Input((1,)),),
        ops=(Op("add", (0, 0)),),
        outputs=(1,),
        placements=(
            (0, Placement(0, (2, 2, 2))),
            (1, Placement(0, (2, 2, 2), (Cut(2, 0, "cyclic"), Cut(0, 0), Cut(1, 0)))),
        ),
    ),
    Recipe(
        inputs=(Input((0, 7), unknown=(0, 1)),),
        ops=(Op("broadcast_in_dim", (0,), ((0, 1, 7), (0, 2))), Op("reshape", (0,), (0, 7, 1))),
        outputs=(2,),
        placements=((0, Placement(1, (4,), (Cut(0, 0),))),),
    ),
    Recipe(
        inputs=(Input((1, 1), unknown=(0,)),),
        ops=(Op("add", (0, 0)), Op("broadcast_in_dim", (0,), ((1, 1, 1), (1, 2)))),
        outputs=(2, 1),
        placements=((0, Placement(0, (3,), (Cut(0, 0, "strided"),))),),
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


def check(recipe: Recipe, form: Overlap | None = None) -> None:
    """Every rank has of every output what its sharding says, and what was asked for.

    All of it exactly, unless the program ends with an operation that rounds.
    """
    rounds = any(op.name in ROUNDED for op in recipe.ops)
    placements, ranks = dict(recipe.placements), recipe.ranks
    if all(given.is_plain for given in recipe.inputs):
        whole = recipe.tensors[: len(recipe.inputs)]
        results = simulate(recipe.define(), whole, ranks=ranks, overlap=form)
    else:
        sizes = {k: given.shape for k, given in enumerate(recipe.inputs)}
        fd = recipe.define()
        parts = [recipe.parts(fd, rank) for rank in range(ranks)]
        results = simulate(fd, parts, per_rank=True, ranks=ranks, global_sizes=sizes, overlap=form)
    updates = [(target, number) for number, target in recipe.updates]
    for rank in range(ranks):
        for found, wanted in (
            (results[rank], [(number, number) for number in recipe.outputs]),
            (results.inputs[rank], updates),
        ):
            assert len(found) == len(wanted)
            for output, (place, number) in zip(found, wanted, strict=True):
                assert isinstance(output, DistributedTensor)
                part = part_of_output(output, recipe.tensors[number], rank, placements.get(place))
                if rounds:
                    torch.testing.assert_close(output.local, part, equal_nan=True)
                else:
                    assert torch.equal(output.local, part), (rank, output.local, part)


def part_of_output(
    output: DistributedTensor, value: torch.Tensor, rank: int, placement: Placement | None
) -> torch.Tensor:
    """What the rank should have, after a look at where it lies."""
    mesh, sharding = output.mesh, output.sharding
    assert not sharding.partial
    assert output.dtype == value.dtype
    if rank not in mesh.ids:
        assert output.numel() == 0 and output.global_shape == value.shape
        return output.local
    part = part_held(value, mesh, sharding.axes, rank)
    if placement is not None:
        assert mesh == placement.device_mesh().ranks
        wanted = placement.part(value, rank)
        assert wanted is None or torch.equal(part.nan_to_num(), wanted.nan_to_num()), placement
    return part


def check_drawn(
    data: st.DataObject,
    mesh: Shape,
    *,
    several_meshes: bool = False,
    rounded: bool = False,
    form: Overlap | None = None,
) -> None:
    recipe = data.draw(recipes(mesh, several_meshes=several_meshes, rounded=rounded))
    numbers = [value for value in recipe.tensors if value.dtype != torch.bool]
    assume(not any(bool((value.abs() >= LARGEST).any()) for value in numbers))
    try:
        check(recipe, form)
    except Unsupported as error:
        assume(not (recipe.reshapes_unknown and "the size must be a multiple" in str(error)))
        raise


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@settings(max_examples=28, suppress_health_check=SLOW)
@given(data=st.data())
@pytest.mark.usefixtures("op_by_op")
def test_one_mesh(mesh: Shape, data: st.DataObject) -> None:
    check_drawn(data, mesh)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
@settings(max_examples=14, suppress_health_check=SLOW)
@given(data=st.data())
@pytest.mark.usefixtures("op_by_op")
def test_several_meshes(mesh: Shape, data: st.DataObject) -> None:
    check_drawn(data, mesh, several_meshes=True)


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
@settings(max_examples=20, suppress_health_check=SLOW)
@given(data=st.data())
@pytest.mark.usefixtures("op_by_op")
def test_rounded(mesh: Shape, data: st.DataObject) -> None:
    """Means and variances: each rank has as many terms as it has."""
    check_drawn(data, mesh, rounded=True)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 3)], ids=str)
@settings(max_examples=12, suppress_health_check=SLOW)
@given(data=st.data())
@pytest.mark.usefixtures("op_by_op")
def test_forms(mesh: Shape, form: Overlap, data: st.DataObject) -> None:
    """Loops over chunks, where a program has room for them."""
    check_drawn(data, mesh, form=form)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
@settings(max_examples=6, suppress_health_check=SLOW)
@given(data=st.data())
def test_kernels(mesh: Shape, data: st.DataObject) -> None:
    """Compiled: local sizes, empty ones among them, reach the kernels."""
    check_drawn(data, mesh)


@pytest.mark.nightly
@pytest.mark.parametrize("several_meshes", [False, True])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@settings(max_examples=300, suppress_health_check=SLOW)
@given(data=st.data())
@pytest.mark.usefixtures("op_by_op")
def test_many(mesh: Shape, several_meshes: bool, data: st.DataObject) -> None:
    check_drawn(data, mesh, several_meshes=several_meshes)


@pytest.mark.parametrize("recipe", KEPT)
@pytest.mark.usefixtures("op_by_op")
def test_kept(recipe: Recipe) -> None:
    """What failed once."""
    check(recipe)


def test_a_kernel_beside_a_number_of_other_ranks() -> None:
    """Compiled: what stands for it on ranks outside its mesh has an axis that it has not."""
    check(
        Recipe(
            inputs=(Input((3,)), Input(())),
            ops=(Op("relu", (0,)),),
            outputs=(2,),
            placements=((0, Placement(0, (1,))), (1, Placement(1, (2,)))),
        )
    )
