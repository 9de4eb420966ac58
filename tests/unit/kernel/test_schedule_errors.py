"""Schedules written by hand: legal ones compute the same, others break a rule that has a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernel_programs import finished
from kernel_runs import check_by_value, checked_kernel
from meshfuse.base.errors import ScheduleError, Unsupported
from meshfuse.codegen.cpp_tiles import check_tiles
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Merge
from meshfuse.kernel.lower import lower
from meshfuse.kernel.printer import print_kernel
from program_recorder import Recorder

Verb = Callable[[Program], Program]


def split(tensor: TensorName, axis: int, factor: int, inner_split: bool = True) -> Verb:
    return lambda p: transforms.split(p, tensor, axis, factor, inner_split)


def merge(tensor: TensorName, outer: int, inner: int) -> Verb:
    return lambda p: transforms.merge(p, tensor, outer, inner)


def bind(tensor: TensorName, axis: int, parallel_type: ParallelType) -> Verb:
    return lambda p: transforms.parallelize(
        p, tensor, p.schedule(tensor).leaves[axis], parallel_type
    )


def reorder(tensor: TensorName, moves: dict[int, int]) -> Verb:
    return lambda p: transforms.reorder(p, tensor, moves)


def apply(program: Program, *verbs: Verb) -> Program:
    for verb in verbs:
        program = verb(program)
    return program


GRID, SECOND_GRID = ParallelType.grid_x, ParallelType.grid_y
BLOCK, VECTOR, UNROLL = ParallelType.block_x, ParallelType.vectorize, ParallelType.unroll


def exp_program() -> tuple[Program, TensorName]:
    r = Recorder()
    y = r.pointwise("exp", r.input((-1, -1)))
    r.output(y)
    return finished(r), y


def sum_program() -> tuple[Program, TensorName]:
    r = Recorder()
    y = r.add(build.reduction, "sum", r.input((-1, -1)), [1])
    r.output(y)
    return finished(r), y


def centered_program() -> tuple[Program, TensorName, TensorName]:
    r = Recorder()
    x = r.input((-1, -1))
    largest = r.add(build.reduction, "max", x, [1])
    y = r.pointwise("sub", x, r.add(build.broadcast, largest, [False, True]))
    r.output(y)
    return finished(r), largest, y


# Legal.


EXP_SCHEDULES: dict[str, Callable[[TensorName], tuple[Verb, ...]]] = {
    "grid, unroll, block and vector leaves of one axis": lambda t: (
        split(t, 1, 4),
        split(t, 1, 8),
        split(t, 1, 2),
        bind(t, 0, GRID),
        bind(t, 2, UNROLL),
        bind(t, 3, BLOCK),
        bind(t, 4, VECTOR),
    ),
    "a tile of two axes": lambda t: (
        split(t, 0, 4),
        split(t, 2, 8),
        reorder(t, {2: 1}),
        bind(t, 0, SECOND_GRID),
        bind(t, 1, GRID),
        bind(t, 2, UNROLL),
        bind(t, 3, VECTOR),
    ),
    "columns outside rows": lambda t: (reorder(t, {1: 0}), split(t, 0, 3), bind(t, 0, GRID)),
    "one merged axis": lambda t: (
        merge(t, 0, 1),
        split(t, 0, 32),
        bind(t, 0, GRID),
        bind(t, 1, BLOCK),
    ),
    "ragged parts of ragged parts": lambda t: (
        split(t, 1, 7),
        split(t, 1, 3),
        split(t, 3, 4),
        split(t, 0, 2, inner_split=False),
    ),
    "ragged inner part on the lanes": lambda t: (
        split(t, 1, 3, inner_split=False),
        split(t, 2, 8),
        bind(t, 3, VECTOR),
    ),
}


@pytest.mark.parametrize("name", EXP_SCHEDULES)
def test_legal_schedules_agree(name: str) -> None:
    program, y = exp_program()
    program = apply(program, *EXP_SCHEDULES[name](y))
    for shape in ((5, 18), (1, 1), (16, 64), (0, 3), (3, 0), (7, 100)):
        check_by_value(program, [torch.rand(shape)], unscheduled=True)


SUM_SCHEDULES: dict[str, Callable[[TensorName], tuple[Verb, ...]]] = {
    "lanes of the reduced axis": lambda t: (split(t, 1, 8), bind(t, 0, GRID), bind(t, 2, VECTOR)),
    "all lanes at once": lambda t: (split(t, 1, 128), bind(t, 0, GRID), bind(t, 2, BLOCK)),
    "lanes of both axes": lambda t: (
        split(t, 0, 4),
        split(t, 2, 8),
        reorder(t, {2: 1}),
        bind(t, 0, GRID),
        bind(t, 2, UNROLL),
        bind(t, 3, VECTOR),
    ),
    "split reduction in serial loops": lambda t: (split(t, 1, 5), split(t, 1, 2), bind(t, 0, GRID)),
    "reduced loops first": lambda t: (reorder(t, {1: 0}),),
}


@pytest.mark.parametrize("name", SUM_SCHEDULES)
def test_legal_reductions_agree(name: str) -> None:
    program, y = sum_program()
    program = apply(program, *SUM_SCHEDULES[name](y))
    for shape in ((5, 18), (1, 1), (16, 64), (0, 3), (3, 0), (7, 100)):
        exact = torch.randint(-8, 9, shape).float()
        check_by_value(program, [exact], unscheduled=True)


def test_a_result_is_used_inside_the_loops_it_was_made_in() -> None:
    program, largest, y = centered_program()
    for tensor in (largest, y):
        program = apply(program, split(tensor, 0, 4), bind(tensor, 0, GRID))
    check_by_value(program, [torch.rand(6, 7)], unscheduled=True)


def test_a_reduction_may_be_computed_again_by_each_program() -> None:
    program, _, y = centered_program()
    program = apply(program, bind(y, 0, GRID))
    with pytest.raises(ScheduleError, match="value-and-loop"):
        lower(program, "k")
    r = Recorder()
    x = r.input((-1,))
    total = r.add(build.reduction, "sum", x, [0])
    y = r.pointwise("sub", x, r.add(build.broadcast, total, [True]))
    r.output(y)
    program = apply(finished(r), bind(y, 0, GRID))
    check_by_value(program, [torch.arange(9.0)], unscheduled=True)


def test_one_program_stores_what_all_compute() -> None:
    r = Recorder()
    x = r.input((4, 8))
    total = r.add(build.reduction, "sum", x, [0, 1])
    y = r.pointwise("neg", x)
    r.output(total, y)
    program = apply(finished(r), bind(y, 0, GRID))
    check_by_value(program, [torch.ones(4, 8)], unscheduled=True)
    assert "store(T1, [], v0, mask=[Bound(g0, 1)])" in print_kernel(checked_kernel(program))


# Refused.


EXP_ERRORS: dict[str, Callable[[TensorName], tuple[Verb, ...]]] = {
    "leaf-order": lambda t: (bind(t, 1, GRID),),
    "tile-extent": lambda t: (bind(t, 1, VECTOR),),
    "tile-order": lambda t: (
        split(t, 0, 4),
        split(t, 2, 8),
        split(t, 3, 2),
        reorder(t, {2: 1}),
        reorder(t, {2: 3}),
        bind(t, 2, VECTOR),
        bind(t, 3, UNROLL),
        bind(t, 4, BLOCK),
    ),
    "parallel-type": lambda t: (bind(t, 0, ParallelType.mma),),
    "not-local": lambda t: (bind(t, 0, ParallelType.stream),),
    "grid-extent": lambda t: (bind(t, 0, GRID), bind(t, 1, GRID)),
}


@pytest.mark.parametrize("code", EXP_ERRORS)
def test_illegal_schedules_name_the_rule(code: str) -> None:
    program, y = exp_program()
    program = apply(program, *EXP_ERRORS[code](y))
    with pytest.raises(ScheduleError) as caught:
        lower(program, "k")
    assert caught.value.code == code
    assert caught.value.tensor == y
    assert caught.value.hint


def test_a_grid_cannot_reduce() -> None:
    program, y = sum_program()
    with pytest.raises(ScheduleError) as caught:
        lower(apply(program, bind(y, 1, GRID)), "k")
    assert caught.value.code == "grid-reduction"
    assert caught.value.axis == program.schedule(y).leaves[1]


def test_grid_axes_of_two_sizes() -> None:
    r = Recorder()
    x = r.input((-1, -1))
    y, z = r.pointwise("neg", x), r.pointwise("exp", x)
    r.output(y, z)
    program = apply(finished(r), bind(y, 0, GRID), reorder(z, {1: 0}), bind(z, 0, GRID))
    with pytest.raises(ScheduleError) as caught:
        lower(program, "k")
    assert caught.value.code == "grid-extent"


def test_a_store_beside_a_grid_that_may_be_empty() -> None:
    r = Recorder()
    x = r.input((-1,))
    y, total = r.pointwise("neg", x), r.add(build.reduction, "sum", x, [0])
    r.output(y, total)
    with pytest.raises(ScheduleError) as caught:
        lower(apply(finished(r), bind(y, 0, GRID)), "k")
    assert caught.value.code == "grid-coverage"


def test_an_operation_that_no_kernel_has() -> None:
    r = Recorder()
    a, b = r.input((-1, -1)), r.input((-1, -1))
    r.output(r.add(build.matmul, a, b))
    with pytest.raises(ScheduleError) as caught:
        lower(finished(r), "k")
    assert caught.value.code == "operation"


def test_an_input_is_no_output_of_a_kernel() -> None:
    r = Recorder()
    x = r.input((-1,))
    r.output(x)
    with pytest.raises(Unsupported, match=r"output T0 is an input"):
        lower(finished(r), "k")


def test_a_kept_and_a_reduced_axis_in_one_loop() -> None:
    """Verbs refuse such a merge; a schedule may come from elsewhere."""
    program, y = sum_program()
    schedule = program.schedule(y)
    kept, reduced = schedule.leaves
    merge_both = replace(
        schedule, steps=(Merge(kept, reduced, AxisName("a9")),), leaves=(AxisName("a9"),)
    )
    with pytest.raises(ScheduleError) as caught:
        lower(program.with_schedule(y, merge_both), "k")
    assert (caught.value.code, caught.value.tensor) == ("mixed-merge", y)
    assert caught.value.axis == "a9"
    assert caught.value.hint


def test_tiles_that_cpp_kernels_cannot_have() -> None:
    program, y = exp_program()
    two = apply(
        program,
        split(y, 0, 4),
        split(y, 2, 8),
        reorder(y, {1: 2}),
        bind(y, 2, UNROLL),
        bind(y, 3, VECTOR),
    )
    with pytest.raises(ScheduleError) as caught:
        check_tiles(two)
    assert (caught.value.code, caught.value.tensor) == ("tile-rank", y)
    assert caught.value.axis == two.schedule(y).leaves[3]
    three = apply(program, split(y, 1, 3), bind(y, 2, VECTOR))
    with pytest.raises(ScheduleError) as caught:
        check_tiles(three)
    assert (caught.value.code, caught.value.axis) == ("tile-size", three.schedule(y).leaves[2])
    check_tiles(
        apply(program, split(y, 1, 8), split(y, 2, 4), bind(y, 2, BLOCK), bind(y, 3, VECTOR))
    )
