"""Reductions taken apart, in one kernel: both halves, by value and as text."""

from __future__ import annotations

import pytest
import torch

from golden_text import GoldenCheck
from kernel_programs import finished
from kernel_runs import checked_kernel, run_kernel
from loop_nests import bind
from meshfuse.base.errors import ScheduleError
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import Welford
from meshfuse.ir.printer import print_program
from meshfuse.ir.program import Program
from meshfuse.kernel.localize import localize
from meshfuse.kernel.lower import lower
from meshfuse.kernel.printer import print_kernel
from meshfuse.runtime.evaluate_ops import evaluate_program
from meshfuse.schedulers.propagation import parallelize_like, transform_like
from program_recorder import Recorder

GRID, VECTOR = ParallelType.grid_x, ParallelType.vectorize
SHAPES = ((5, 18), (1, 1), (16, 64), (0, 3), (3, 0), (7, 100))


def shifted_sum(function: str = "sum") -> tuple[Program, TensorName]:
    """Reduces rows of x + 1: the places past a row's end must not count as 1."""
    r = Recorder()
    shifted = r.pointwise("add", r.input([-1, -1]), build.literal(1.0))
    total = r.add(build.reduction, function, shifted, [1])
    r.output(r.pointwise("neg", total))
    return finished(r), total


def check_parts(before: Program, after: Program, *inputs: torch.Tensor) -> None:
    localized = localize(after)
    kernel = checked_kernel(localized.program)
    results = run_kernel(kernel, localized, after, inputs)
    for result, want in zip(results, evaluate_program(before, inputs), strict=True):
        torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def lanes_of_partial_sums(program: Program, total: TensorName) -> tuple[Program, TensorName]:
    """Sixteen partial sums a row, then their sum; rows on the grid."""
    program = transforms.split(program, total, 1, 16)
    program, (part,) = transforms.rfactor(program, total, [1])
    program = bind(bind(program, part, 0, GRID), part, 2, VECTOR)
    return parallelize_like(transform_like(program, part), part), part


@pytest.mark.parametrize("function", ["sum", "max"])
@pytest.mark.parametrize("shape", SHAPES)
def test_lanes_of_partial_results(function: str, shape: tuple[int, int]) -> None:
    if function == "max" and not shape[1]:
        return  # torch has no maximum of nothing
    before, total = shifted_sum(function)
    after, _ = lanes_of_partial_sums(before, total)
    check_parts(before, after, torch.randint(-8, 9, shape).float())


@pytest.mark.parametrize("taken", [[1], [2], [1, 3], [2, 3]])
@pytest.mark.parametrize("shape", SHAPES)
def test_serial_parts(taken: list[int], shape: tuple[int, int]) -> None:
    before, total = shifted_sum()
    after = transforms.split(before, total, 1, 8, inner_split=False)
    after = transforms.split(after, total, 2, 3)
    after, _ = transforms.rfactor(after, total, taken)
    check_parts(before, after, torch.randint(-8, 9, shape).float())


@pytest.mark.parametrize("shape", SHAPES)
def test_moments_of_parts(shape: tuple[int, int]) -> None:
    r = Recorder()
    variance, mean = r.add(build.var_mean, r.input([-1, -1]), [1], 0)
    r.output(variance, mean)
    before = finished(r)
    (expr,) = (expr for expr in before.fusion.exprs if isinstance(expr, Welford))
    after = transforms.split(before, expr.mean, 1, 8)
    for taken in ([1], [2]):
        program, parts = transforms.rfactor(after, expr.mean, taken)
        lanes = [axis for axis in (*parts, *expr.outs) if taken == [1]]
        for tensor in lanes:
            program = bind(program, tensor, -1, VECTOR)
        check_parts(before, program, torch.randn(shape))


def test_the_text_of_both_halves(golden: GoldenCheck) -> None:
    before, total = shifted_sum()
    after, _ = lanes_of_partial_sums(before, total)
    golden("program_of_parts", print_program(after))
    golden("kernel_of_parts", print_kernel(checked_kernel(localize(after).program)))


def test_copies_are_registers() -> None:
    """Copies after an input and before an output add nothing to a kernel."""
    before, total = shifted_sum()
    scheduled, _ = lanes_of_partial_sums(before, total)
    plain = print_kernel(checked_kernel(localize(scheduled).program))
    (output,) = scheduled.fusion.outputs
    cached, _ = transforms.cache_after(scheduled, TensorName("T0"))
    cached, _ = transforms.cache_before(cached, output.tensor)
    cached, _ = transforms.cache_before(cached, total)
    assert print_kernel(checked_kernel(localize(cached).program)) == plain


def test_a_grid_over_parts_is_no_one_kernel() -> None:
    """Each program would have a part only, and nobody the sum."""
    before, total = shifted_sum()
    program = transforms.split(before, total, 1, 8)
    program, (part,) = transforms.rfactor(program, total, [2])
    program = transforms.reorder(program, part, {1: 0})
    with pytest.raises(ScheduleError) as caught:
        lower(localize(bind(program, part, 0, GRID)).program, "k")
    assert caught.value.code == "value-and-loop"
    with pytest.raises(ScheduleError) as caught:
        lower(localize(bind(program, total, 1, GRID)).program, "k")
    assert caught.value.code == "grid-reduction"
