"""Programs as one kernel, by the schedule that their user wrote: legal forms, and others named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from meshfuse import (
    FusionDefinition,
    KernelExecutor,
    ParallelType,
    ScheduleError,
    SchedulerType,
    TensorView,
)
from meshfuse.base.errors import Unsupported, UserAssertionError, UserError, UserTypeError
from meshfuse.dist.communicator import Communicator
from meshfuse.host.executors import HostIrExecutor
from meshfuse.ir.parser import parse_program
from meshfuse.multidevice import DeviceMesh
from meshfuse.pipeline import compile_scheduled, prepare_for_schedule
from meshfuse.runtime.arguments import signature_of
from meshfuse.runtime.compile import KernelCompiler

GRID, GRID_Y, VECTOR = ParallelType.grid_x, ParallelType.grid_y, ParallelType.vectorize
BLOCK, UNROLL, MESH_X = ParallelType.block_x, ParallelType.unroll, ParallelType.mesh_x


@dataclass(frozen=True)
class Softmaxes:
    """x [i, j] -> exp(x - max over j) and its sums over j."""

    fd: FusionDefinition
    x: TensorView
    largest: TensorView
    powers: TensorView
    total: TensorView

    def check(self, *shape: int) -> None:
        data = torch.randn(shape)
        powers, total = self.fd.manual_execute([data])
        wanted = (data - data.amax(1, keepdim=True)).exp()
        torch.testing.assert_close(powers, wanted)
        torch.testing.assert_close(total, wanted.sum(1))
        assert type(powers) is type(total) is torch.Tensor


def softmaxes() -> Softmaxes:
    fd = FusionDefinition()
    x = fd.define_tensor([-1, -1], contiguity=True)
    largest = fd.ops.max(x, [1])
    shifted = fd.ops.sub(x, fd.ops.broadcast(largest, [False, True]))
    powers = fd.ops.exp(shifted)
    total = fd.ops.sum(powers, [1])
    fd.add_output(powers)
    fd.add_output(total)
    return Softmaxes(fd, x, largest, powers, total)


def follow(s: Softmaxes, reference: TensorView) -> None:
    s.fd.sched.transform_like(reference)
    s.fd.sched.parallelize_like(reference)


def rows_on_the_grid(s: Softmaxes) -> None:
    s.powers.axis(0).parallelize(GRID)
    follow(s, s.powers)


def lanes_of_columns(s: Softmaxes) -> None:
    s.powers.split(1, 16)
    s.powers.axis(0).parallelize(GRID)
    s.powers.axis(2).parallelize(VECTOR)
    follow(s, s.powers)


def unrolled_lanes(s: Softmaxes) -> None:
    s.powers.split(1, 16).split(2, 8)
    s.powers.axis(2).parallelize(UNROLL)
    s.powers.axis(3).parallelize(BLOCK)
    follow(s, s.powers)


def lanes_of_rows(s: Softmaxes) -> None:
    s.powers.split(0, 8).reorder({1: 2})
    s.powers.axis(0).parallelize(GRID)
    s.powers.axis(2).parallelize(VECTOR)
    follow(s, s.powers)


def two_grid_axes(s: Softmaxes) -> None:
    s.powers.split(0, 4)
    s.powers.axis(0).parallelize(GRID_Y)
    s.powers.axis(1).parallelize(GRID)
    follow(s, s.powers)


def parts_of_the_sum(s: Softmaxes) -> None:
    """Both reductions in eight lanes, the sum taken apart: three loops over a row in one kernel."""
    s.total.split(1, 8)
    part = s.total.rfactor([1])
    part.axis(0).parallelize(GRID)
    part.axis(2).parallelize(VECTOR)
    follow(s, part)


def parts_of_both(s: Softmaxes) -> None:
    for tensor in (s.largest, s.total):
        tensor.outer_split(1, 4)
        tensor.rfactor([2])


def cached(s: Softmaxes) -> None:
    rows_on_the_grid(s)
    s.x.cache_after()
    s.powers.cache_before()
    s.total.cache_before()
    s.fd.sched.inline_most()


def unscheduled(s: Softmaxes) -> None:
    """One serial loop nest."""


LEGAL = (
    unscheduled,
    rows_on_the_grid,
    lanes_of_columns,
    unrolled_lanes,
    lanes_of_rows,
    two_grid_axes,
    parts_of_the_sum,
    parts_of_both,
    cached,
)


@pytest.mark.parametrize("schedule", LEGAL, ids=lambda schedule: schedule.__name__)
def test_legal_forms(schedule: Callable[[Softmaxes], None]) -> None:
    s = softmaxes()
    schedule(s)
    for shape in ((5, 33), (1, 1), (16, 64), (0, 3)):
        s.check(*shape)


# Refused: code, tensor, axis, and the way out.


def grid_inside_a_loop(s: Softmaxes) -> TensorView:
    s.powers.axis(1).parallelize(GRID)
    return s.powers


def lanes_of_unknown_number(s: Softmaxes) -> TensorView:
    s.powers.axis(1).parallelize(VECTOR)
    return s.powers


def serial_inside_lanes(s: Softmaxes) -> TensorView:
    s.powers.split(1, 8).reorder({2: 1})
    s.powers.axis(1).parallelize(VECTOR)
    return s.powers


def lanes_that_stand_apart(s: Softmaxes) -> TensorView:
    s.powers.split(0, 4).split(2, 8).split(3, 2).reorder({1: 3})
    for axis in (2, 3, 4):
        s.powers.axis(axis).parallelize(UNROLL)
    return s.powers


def tensor_cores(s: Softmaxes) -> TensorView:
    s.powers.axis(0).parallelize(ParallelType.mma)
    return s.powers


def host_stream(s: Softmaxes) -> TensorView:
    s.powers.axis(0).parallelize(ParallelType.stream)
    return s.powers


def one_grid_for_two_sizes(s: Softmaxes) -> TensorView:
    s.total.split(0, 2)
    s.total.axis(0).parallelize(GRID)
    s.powers.axis(0).parallelize(GRID)
    return s.powers


def grid_over_a_sum(s: Softmaxes) -> TensorView:
    s.total.axis(1).parallelize(GRID)
    return s.total


def maximum_used_elsewhere(s: Softmaxes) -> TensorView:
    s.powers.reorder({1: 0})
    return s.largest


def lanes_of_two_axes(s: Softmaxes) -> TensorView:
    s.powers.split(0, 4).split(2, 8).reorder({1: 2})
    s.powers.axis(2).parallelize(UNROLL)
    s.powers.axis(3).parallelize(VECTOR)
    return s.powers


def three_lanes(s: Softmaxes) -> TensorView:
    s.powers.split(1, 3)
    s.powers.axis(2).parallelize(VECTOR)
    return s.powers


ILLEGAL: dict[Callable[[Softmaxes], TensorView], tuple[str, str]] = {
    grid_inside_a_loop: ("leaf-order", "Reorder"),
    serial_inside_lanes: ("leaf-order", "Reorder"),
    lanes_of_unknown_number: ("tile-extent", "Split it by a constant"),
    lanes_that_stand_apart: ("tile-order", "neighbours"),
    host_stream: ("host-loop", "Leave it serial"),
    tensor_cores: ("parallel-type", "Use grid, block, vectorize, unroll or serial"),
    one_grid_for_two_sizes: ("grid-extent", "to axes of one size"),
    grid_over_a_sum: ("grid-reduction", "bind a kept axis"),
    maximum_used_elsewhere: ("value-and-loop", "the same outer loops"),
    lanes_of_two_axes: ("tile-rank", "leave one of them serial"),
    three_lanes: ("tile-size", "a power of two"),
}
WITHOUT_AXIS = ("value-and-loop",)


@pytest.mark.parametrize("schedule", ILLEGAL, ids=lambda schedule: schedule.__name__)
def test_illegal_forms(schedule: Callable[[Softmaxes], TensorView]) -> None:
    s = softmaxes()
    tensor = schedule(s)
    code, way_out = ILLEGAL[schedule]
    with pytest.raises(ScheduleError) as caught:
        s.fd.manual_execute([torch.randn(5, 33)])
    error = caught.value
    assert error.code == code
    assert error.tensor == tensor.name
    assert way_out in error.hint
    assert str(error).startswith(f"[{code}] {tensor.name}")
    loops = [axis.name for axis in tensor.get_loop_domain()]
    assert error.axis in ([None] if code in WITHOUT_AXIS else loops)


def test_stores_beside_a_grid_that_may_be_empty() -> None:
    fd = FusionDefinition()
    x = fd.define_tensor([-1], contiguity=True)
    y, total = fd.ops.neg(x), fd.ops.sum(x, [0])
    fd.add_output(y)
    fd.add_output(total)
    y.axis(0).parallelize(GRID)
    with pytest.raises(ScheduleError) as caught:
        fd.manual_execute([torch.randn(5)])
    assert (caught.value.code, caught.value.tensor) == ("grid-coverage", total.name)
    assert "kernel of its own" in caught.value.hint


def test_what_no_kernel_has() -> None:
    fd = FusionDefinition()
    a, b = fd.define_tensor([4, 4]), fd.define_tensor([4, 4])
    fd.add_output(fd.ops.matmul(a, b))
    with pytest.raises(Unsupported, match=r"one kernel: .*MatMul"):
        fd.manual_execute([torch.randn(4, 4), torch.randn(4, 4)])


# KernelExecutor.


def test_an_executor_by_itself() -> None:
    s = softmaxes()
    lanes_of_columns(s)
    executor = KernelExecutor(group_id=3)
    assert not executor.is_compiled()
    with pytest.raises(UserError, match="nothing is compiled; call compile"):
        executor.run([torch.randn(3, 4)])
    executor.compile(s.fd.fusion)
    assert executor.is_compiled()
    assert executor.group_id == 3
    assert not executor.is_programmatic_dependent_launch_enabled()
    for layout in (torch.randn(3, 4), torch.randn(17, 33)):
        powers, total = executor.run([layout])
        torch.testing.assert_close(powers.sum(1), total)
        torch.testing.assert_close(powers, (layout - layout.amax(1, keepdim=True)).exp())


def test_an_executor_keeps_the_program_that_it_compiled() -> None:
    fd = FusionDefinition()
    x = fd.define_tensor([-1], contiguity=False)
    y = fd.ops.neg(x)
    fd.add_output(y)
    executor = KernelExecutor()
    data = torch.randn(8)
    executor.compile(fd.fusion, [data], scheduler_type=SchedulerType.pointwise)
    fd.add_output(fd.ops.exp(x))
    y.axis(0).parallelize(ParallelType.mma)
    assert len(executor.run([data])) == len(executor.run([data[::2]])) == 1
    with pytest.raises(ScheduleError):
        executor.compile(fd.fusion)
    assert len(executor.run([data])) == 1, "a failed compile leaves the last one"


def test_a_schedule_error_comes_when_compiling() -> None:
    s = softmaxes()
    grid_inside_a_loop(s)
    with pytest.raises(ScheduleError):
        KernelExecutor().compile(s.fd.fusion)
    with pytest.raises(UserTypeError, match="takes a definition's fusion"):
        KernelExecutor().compile(s.fd)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="the program has no outputs"):
        KernelExecutor().compile(FusionDefinition().fusion)


def test_in_place_updates() -> None:
    fd = FusionDefinition()
    x, count = fd.define_tensor([-1], contiguity=True), fd.define_tensor([-1], contiguity=True)
    updated = fd.ops.add(count, x)
    fd.add_output(updated, count)
    fd.add_output(fd.ops.neg(x))
    updated.split(0, 8)
    updated.axis(1).parallelize(VECTOR)
    data, counts = torch.randn(21), torch.ones(21)
    outputs = fd.manual_execute([data, counts])
    assert len(outputs) == 1
    torch.testing.assert_close(counts, data + 1)


# On a mesh.


def sharded_rows(ranks: int) -> tuple[FusionDefinition, TensorView, TensorView]:
    """x in blocks of rows, the sums of its rows likewise, both cut further for the kernel."""
    fd = FusionDefinition()
    mesh = DeviceMesh(range(ranks))
    x = fd.define_tensor([-1, 12], contiguity=True)
    total = fd.ops.sum(fd.ops.exp(x), [1])
    fd.add_output(total)
    for tensor in (x, total):
        tensor.set_device_mesh(mesh)
        tensor.outer_split(0, ranks)
        tensor.axis(0).parallelize(MESH_X)
    return fd, x, total


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_kernel_computes_what_its_rank_holds(ranks: int) -> None:
    fd, _, total = sharded_rows(ranks)
    total.split(2, 4)
    total.axis(1).parallelize(GRID)
    total.axis(3).parallelize(VECTOR)
    program = prepare_for_schedule(parse_program(repr(fd.fusion)))
    whole = torch.randn(ranks * 5, 12)
    shards = list(whole.chunk(ranks))
    compilation = compile_scheduled(program, signature_of(shards[:1]))
    compiler = KernelCompiler()
    for rank, shard in enumerate(shards):
        executor = HostIrExecutor(
            compilation.host, compilation.sources, compiler, torch.device("cpu")
        )
        identity = Communicator({"RANK": str(rank), "WORLD_SIZE": str(ranks)})
        (result,) = executor.run([shard], identity)
        torch.testing.assert_close(result, shard.exp().sum(1))


def test_a_kernel_beside_a_mesh_returns_plain_tensors() -> None:
    fd, _, total = sharded_rows(1)
    total.axis(1).parallelize(GRID)
    data = torch.randn(5, 12)
    (result,) = fd.manual_execute([data])
    assert type(result) is torch.Tensor
    torch.testing.assert_close(result, data.exp().sum(1))


def test_a_kernel_does_not_read_what_other_ranks_hold() -> None:
    fd = FusionDefinition()
    x = fd.define_tensor([-1, 12], contiguity=True)
    total = fd.ops.sum(x, [0])
    fd.add_output(total)
    x.set_device_mesh(DeviceMesh([0, 1]))
    x.outer_split(0, 2)
    x.axis(0).parallelize(MESH_X)
    program = prepare_for_schedule(parse_program(repr(fd.fusion)))
    with pytest.raises(UserError, match=r"T1 = sum\(T0, \[0\]\): one kernel cannot"):
        compile_scheduled(program, signature_of([torch.randn(5, 12)]))


def test_heuristic_parameters_and_order_of_calls() -> None:
    s = softmaxes()
    with pytest.raises(Unsupported, match="kernels for CPUs have none"):
        s.fd.manual_execute([torch.randn(2, 2)], object())  # pyright: ignore[reportArgumentType]
    s.fd.execute([torch.randn(2, 2)])
    with pytest.raises(UserAssertionError, match="FusionExecutorCache already exists"):
        s.fd.manual_execute([torch.randn(2, 2)])


def test_execute_does_not_take_a_kernel_schedule() -> None:
    s = softmaxes()
    rows_on_the_grid(s)
    with pytest.raises(UserError, match="is bound to grid_x, but execute schedules kernels itself"):
        s.fd.execute([torch.randn(2, 2)])
    s = softmaxes()
    parts_of_both(s)
    data = torch.randn(5, 33)
    powers, total = s.fd.execute([data])
    torch.testing.assert_close(powers.sum(1), total)
