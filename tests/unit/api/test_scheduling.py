"""`fd.sched` and the schedule methods of handles: what they do, say and refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import meshfuse
from meshfuse import FusionDefinition, MemoryType, ParallelType, SchedulerType, TensorView
from meshfuse.base.errors import UserAssertionError, UserError, UserTypeError
from meshfuse.multidevice import DeviceMesh

GRID, VECTOR, MESH_X = ParallelType.grid_x, ParallelType.vectorize, ParallelType.mesh_x


def sums() -> tuple[FusionDefinition, TensorView, TensorView, TensorView]:
    """x [i, j], exp(x), and its sums over rows."""
    fd = FusionDefinition()
    x = fd.define_tensor([-1, -1], contiguity=True)
    y = fd.ops.exp(x)
    total = fd.ops.sum(y, [1])
    fd.add_output(total)
    return fd, x, y, total


def repeated(fd: FusionDefinition) -> FusionDefinition:
    """What the definition's own text defines."""
    names = {**vars(meshfuse), "multidevice": meshfuse.multidevice}
    exec(repr(fd), names)
    again = FusionDefinition()
    names["nvfuser_fusion"](again)
    return again


# One tensor.


def test_every_schedule_method_is_a_function_too() -> None:
    (one, x, _, total), (other, x2, _, total2) = sums(), sums()
    mesh = DeviceMesh([0, 1])
    total.split(1, 8).inner_split(0, 4).outer_split(1, 2).merge(0, 1).reorder({2: 1})
    x.swizzle1d(0, MESH_X)
    x.axis(1).parallelize(ParallelType.stream)
    x.set_memory_type(MemoryType.symmetric)
    x.set_device_mesh(mesh)
    x.set_allocation_domain(x.get_logical_domain()[::-1], True)
    parts = [total.rfactor([1]), x.cache_after(), total.cache_before()]
    sched = other.sched
    sched.split(total2, 1, 8)
    sched.inner_split(total2, 0, 4)
    sched.outer_split(total2, 1, 2)
    sched.merge(total2, 0, 1)
    sched.reorder(total2, {2: 1})
    sched.swizzle1d(x2, 0, MESH_X)
    sched.parallelize(x2, 1, ParallelType.stream)
    sched.set_memory_type(x2, MemoryType.symmetric)
    sched._set_device_mesh(x2, mesh)
    sched.set_allocation_domain(x2, x2.get_logical_domain()[::-1], True)
    same = [sched.rfactor(total2, [1]), sched.cache_after(x2), sched.cache_before(total2)]
    assert [part.name for part in parts] == [part.name for part in same]
    assert repr(one.fusion) == repr(other.fusion)
    assert repr(one) == repr(other)


def test_what_was_scheduled_can_be_repeated() -> None:
    fd, x, y, total = sums()
    total.split(1, 8)
    part = total.rfactor([2])
    part.axis(0).parallelize(GRID)
    cached = y.cache_after(propagate_allocation_domain=False)
    cached.set_memory_type(MemoryType.shared)
    fd.sched.set_allocation_as_loop(x)
    fd.sched.set_loop_domain(y, [y.axis(1), y.axis(0)])
    fd.sched.transform_like(part)
    fd.sched.transform_like(part, [y])
    fd.sched.parallelize_like(part, selected_parallel_types=[GRID])
    fd.sched.bounded_transform_backward(total, -1, [y], True)
    fd.sched.inline_at(total, 1, best_effort=True)
    fd.sched.inline_most([y])
    fd.sched.inline_most()
    assert repr(repeated(fd).fusion) == repr(fd.fusion)
    assert repr(repeated(fd)) == repr(fd)


def test_rfactor_gives_the_new_tensor() -> None:
    """[i, r{8}, r{K/8}]: the inner part is reduced in the new tensor."""
    fd, _, _, total = sums()
    total.outer_split(1, 8)
    part = total.rfactor([-1])
    assert part.ndim == 2
    assert part.has_root()
    assert [axis.is_reduction() for axis in part.get_loop_domain()] == [False, False, True]
    assert [axis.is_reduction() for axis in part.get_root_domain()] == [False, True]
    assert [axis.is_reduction() for axis in total.get_loop_domain()] == [False, True]
    assert not total.has_root()
    assert fd.fusion.outputs() == [total]


def test_rfactor_of_all_that_is_defined_together() -> None:
    fd = FusionDefinition()
    x = fd.define_tensor([4, 32], contiguity=True)
    results = fd.ops.welford(x, [1])
    for result in results:
        fd.add_output(result)
    results[1].split(1, 8)
    mean, m2, count = results
    parts = fd.sched.rfactor([m2, mean, count], [2])
    assert len(parts) == 3
    for result, part in zip((m2, mean, count), parts, strict=True):
        assert part.dtype() == result.dtype()
        assert [a.extent().to_text() for a in part.get_loop_domain()] == ["4", "4", "8"]
        assert [a.extent().to_text() for a in result.get_loop_domain()] == ["4", "4"]
    assert repr(repeated(fd).fusion) == repr(fd.fusion)
    with pytest.raises(
        UserError, match=r"sched.rfactor\(\[T2, T1\], \[1\]\): takes a tensor, or a"
    ):
        fd.sched.rfactor([m2, mean], [1])
    data = torch.randn(4, 32)
    outputs = fd.manual_execute([data])
    torch.testing.assert_close(outputs[0], data.mean(1))


# Many tensors.


def test_bounds_of_a_schedule_that_goes_backward() -> None:
    fd, x, y, total = sums()
    total.split(1, 8)
    total.axis(0).parallelize(GRID)
    fd.sched.bounded_transform_backward(total, -1, [y], True)
    assert repr(y) == "T1 f32[i0, i1], loops [i0 grid_x, (i1 + 7) // 8, 8]"
    assert repr(x) == "T0 f32[i0, i1]"


def test_functions_of_no_definition_take_their_tensors() -> None:
    _, _, y, total = sums()
    total.split(1, 8)
    meshfuse.schedule.transform_like(total, [y])
    meshfuse.schedule.inline_most([y])
    assert repr(y) == (
        "T1 f32[i0, i1], loops [i0, (i1 + 7) // 8, 8], 3 loops shared with its readers"
    )
    with pytest.raises(UserTypeError, match=r"inline_most\(\): which definition's\? Use fd.sched"):
        meshfuse.schedule.inline_most()
    other, _, _, _ = sums()
    with pytest.raises(UserError, match=r"sched.split\(T2\): T2 belongs to another FusionDefin"):
        other.sched.split(total, 0, 2)


# Automatic schedulers, asked by hand.


def test_schedulers_that_take_a_program() -> None:
    fd, _, _, total = sums()
    assert fd.sched.find_compatible_schedulers(fd.fusion, []) == [SchedulerType.reduction]
    assert fd.sched.can_schedule(fd.fusion, SchedulerType.reduction, []) == (True, "")
    taken, reason = fd.sched.can_schedule(fd.fusion, SchedulerType.pointwise, [])
    assert not taken
    assert reason.startswith(
        "Scheduler _pointwise_ ***rejected*** because : pointwise: T2: it is a"
    )
    taken, reason = fd.sched.can_schedule(fd.fusion, SchedulerType.matmul, [])
    assert "there is no matmul scheduler in this version" in reason
    total.split(1, 8)
    assert fd.sched.find_compatible_schedulers(fd.fusion, []) == []


def test_a_scheduler_on_request() -> None:
    fd, _, _, _ = sums()
    fd.sched.schedule(fd.fusion, SchedulerType.reduction, [])
    data = torch.randn(5, 33)
    (result,) = fd.manual_execute([data])
    torch.testing.assert_close(result, data.exp().sum(1))
    assert repr(repeated(fd).fusion) == repr(fd.fusion)
    fd, _, _, _ = sums()
    with pytest.raises(
        UserError, match=r"schedule\(fusion, pointwise\): pointwise: T2: it is a red"
    ):
        fd.sched.schedule(fd.fusion, SchedulerType.pointwise, [])


# Refusals.


REFUSED: dict[str, Callable[[FusionDefinition, TensorView, TensorView], object]] = {
    r"swizzle1d\(T0, axis=0, grid_x\): takes a mesh axis": lambda fd, x, y: x.swizzle1d(0, GRID),
    r"rfactor\(T1, \[1\]\): T1 is defined by Pointwise": lambda fd, x, y: y.rfactor([1]),
    r"cache_before\(T0\): T0 is an input": lambda fd, x, y: x.cache_before(),
    r"T0 is an input of the program; it lives in global or symmetric": lambda fd, x, y: (
        x.set_memory_type(MemoryType.local)
    ),
    r"takes axes of T0": lambda fd, x, y: x.set_allocation_domain([y.axis(0)], True),
    r"set_loop_domain\(T1, \[T0's axis a0\]\): takes axes of T1": lambda fd, x, y: (
        fd.sched.set_loop_domain(y, [x.axis(0)])
    ),
    r"parallelize_like\(T1, pos=7\): must lie in \[-3, 2\]": lambda fd, x, y: (
        fd.sched.parallelize_like(y, 7)
    ),
    r"T0 is not computed from T1": lambda fd, x, y: fd.sched.bounded_transform_backward(x, -1, [y]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_restate_the_call(message: str) -> None:
    fd, x, y, _ = sums()
    before = repr(fd.fusion)
    with pytest.raises(UserError, match=message):
        REFUSED[message](fd, x, y)
    assert repr(fd.fusion) == before


def test_arguments_of_wrong_types() -> None:
    fd, x, _, _ = sums()
    for call in (
        lambda: x.swizzle1d(0, "mesh_x"),  # pyright: ignore[reportArgumentType]
        lambda: x.set_memory_type("local"),  # pyright: ignore[reportArgumentType]
        lambda: fd.sched.split("T0", 0, 2),  # pyright: ignore[reportArgumentType]
        lambda: fd.sched.can_schedule(fd.fusion, "reduction"),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(UserTypeError):
            call()


# Reprs.


def test_reprs_say_where_things_come_from() -> None:
    fd, x, y, total = sums()
    total.split(1, 8).merge(1, 2)
    total.split(1, 4)
    total.axis(2).parallelize(VECTOR)
    assert [repr(axis) for axis in total.get_loop_domain()] == [
        "axis a4 of T2: size i0",
        "axis a9 of T2: size 2*((i1 + 7) // 8), reduction, the outer part of a8",
        "axis a10 of T2: size 4, reduction, bound to vectorize, the inner part of a8",
    ]
    x.swizzle1d(0, MESH_X)
    assert repr(x.axis(0)) == "axis a11 of T0: size i0, a0 from the rank's place along mesh_x"
    cached = y.cache_after()
    fd.sched.inline_most([y])
    assert repr(cached) == "T3 f32[i0, i1], in local memory"
    assert repr(y) == "T1 f32[i0, i1], 2 loops shared with its readers"


# manual_execute beside execute.


def test_one_way_to_run_a_definition() -> None:
    data = torch.randn(3, 5)
    fd, *_ = sums()
    fd.manual_execute([data])
    with pytest.raises(UserAssertionError, match="Use manual_execute"):
        fd.execute([data])
    fd, *_ = sums()
    fd.execute([data])
    with pytest.raises(AssertionError, match="FusionExecutorCache already exists"):
        fd.manual_execute([data])
