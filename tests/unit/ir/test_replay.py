"""Schedules copied from tensor to tensor, and tensors without their reduced axes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loop_nests import bind, bound, leaf, logical, nest, one, total
from meshfuse.base.errors import UserError
from meshfuse.facts.sharding import sharding_of
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.program import Program
from meshfuse.ir.replay import scheduled_alike
from meshfuse.ir.rewrite import add_tensor
from meshfuse.ir.schedule import Allocation

X, Y, SERIAL = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.serial
GRID, VECTOR = ParallelType.grid_x, ParallelType.vectorize
PAIR = make_mesh([0, 1])


def neg(program: Program, x: TensorName) -> tuple[Program, TensorName]:
    program, y = build.pointwise(program, "neg", [x])
    return program, TensorName(y)


def sharded_sum() -> tuple[Program, TensorName]:
    """T1 [r{4}, i{6}, i{10}]: both of the first two axes over mesh_x, the last one innermost but
    one in memory."""
    program, y = total(4, 6, 10, dims=[0])
    program = transforms.set_device_mesh(program, y, PAIR)
    program = transforms.split(program, y, 0, 2, inner_split=False)
    program = transforms.split(program, y, 2, 2, inner_split=False)
    return bind(bind(program, y, 0, X), y, 2, X), y


def names(*axes: str) -> tuple[AxisName, ...]:
    return tuple(map(AxisName, axes))


# self_replay.


def test_a_tensor_is_scheduled_like_another() -> None:
    program, x = one(8, 6)
    program, y = neg(program, x)
    program = transforms.set_device_mesh(program, y, PAIR)
    program = transforms.split(program, y, 0, 2, inner_split=False)
    program = bind(program, y, 0, X)
    program = transforms.reorder(transforms.split(program, y, 2, 3), y, {3: 1})
    program = transforms.set_allocation_domain(program, y, names("a3", "a2"), [False, True])
    replayed = transforms.self_replay(program, y, x)
    assert nest(replayed, x) == nest(replayed, y) == ["i2", "i3", "i4", "i2"]
    assert bound(replayed, x) == [X, SERIAL, SERIAL, SERIAL]
    assert replayed.schedule(x).mesh == PAIR
    assert replayed.schedule(x).allocation == Allocation(names("a1", "a0"), (False, True))
    assert sharding_of(replayed, x) == sharding_of(replayed, y)
    assert scheduled_alike(replayed, x, y)
    assert transforms.self_replay(replayed, y, x) is replayed


def test_reduced_axes_are_left_out_where_the_other_has_none() -> None:
    program, y = sharded_sum()
    program = transforms.split(program, y, 1, 1)
    program, z = neg(program, y)
    replayed = transforms.self_replay(program, y, z)
    assert nest(replayed, z) == ["i2", "i3", "i10"]
    assert bound(replayed, z) == [X, SERIAL, SERIAL]
    program = transforms.split(program, z, 1, 5)
    program, w = build.reduction(program, "sum", TensorName("T0"), [0])
    replayed = transforms.self_replay(program, z, w)
    assert nest(replayed, w) == ["i6", "i2", "i5", "r4"]


def test_what_is_scheduled_already_stays() -> None:
    program, x = one(8, 6)
    program, y = neg(program, x)
    scheduled = transforms.split(program, y, 0, 2)
    other = transforms.split(scheduled, x, 0, 4)
    with pytest.raises(UserError, match=r"self_replay\(T1, T0\): T0 is scheduled already \(1 spl"):
        transforms.self_replay(other, y, x)
    placed = transforms.set_device_mesh(program, x, PAIR)
    elsewhere = transforms.set_device_mesh(scheduled, y, make_mesh([2, 3]))
    assert transforms.self_replay(placed, y, x).schedule(x).mesh == PAIR
    elsewhere = transforms.set_device_mesh(elsewhere, x, PAIR)
    with pytest.raises(UserError, match=r"T0 lies on DeviceMesh\{0 1\}, T1 on DeviceMesh\{2 3\}"):
        transforms.self_replay(elsewhere, y, x)


def test_axes_that_differ_do_not_pair() -> None:
    program, y = total(8, 6, dims=[0])
    program, b = build.define_tensor(program, [1])
    program, w = build.define_tensor(program, [3, 4, 5])
    program, w = build.reduction(program, "sum", w, [0])
    with pytest.raises(UserError, match=r"a3:i\{6\} is iteration, a4:b\{1\} is broadcast; axes pa"):
        transforms.self_replay(transforms.split(program, y, 1, 2), y, b)
    with pytest.raises(UserError, match="T1 has 1 axes, T4 has 2; they must be alike"):
        transforms.self_replay(transforms.split(program, y, 1, 2), y, w)


# clear_reductions.


def test_clearing_keeps_what_concerns_the_other_axes() -> None:
    program, y = sharded_sum()
    program = transforms.reorder(program, y, {4: 0})
    cleared = transforms.clear_reductions(program, y)
    assert logical(cleared, y) == ["i6", "i10"]
    schedule = cleared.schedule(y)
    assert bound(cleared, y) == [SERIAL, X, SERIAL]
    assert len(schedule.steps) == 1
    assert schedule.mesh == PAIR
    assert schedule.allocation is None
    assert sharding_of(cleared, y) == sharding_of(program, y)


@pytest.mark.parametrize("flags", [[True, True], [False, True], [True, False]])
@pytest.mark.parametrize("turned", [False, True])
def test_clearing_keeps_a_layout_that_says_something(flags: list[bool], turned: bool) -> None:
    """One that equals the logical axes, without gaps, is as good as none."""
    program, y = sharded_sum()
    order = [axis.name for axis in program.tensor(y).tensor_axes]
    if turned:
        order.reverse()
    program = transforms.set_allocation_domain(program, y, order, flags)
    cleared = transforms.clear_reductions(program, y)
    plain = not turned and all(flags)
    wanted = None if plain else Allocation(tuple(order), tuple(flags))
    assert cleared.schedule(y).allocation == wanted


def test_clearing_refuses_root_axes() -> None:
    program, y = total(4, 6, dims=[0])
    definition = program.tensor(y)
    program = add_tensor(program, y, replace(definition, root=definition.logical))
    with pytest.raises(UserError, match=r"clear_reductions\(T1\): the tensor has root axes"):
        transforms.clear_reductions(program, y)
    assert leaf(program, y, 0)
