"""The schedules that tilings write."""

from __future__ import annotations

import pytest

from golden_text import GoldenCheck
from kernel_programs import bias_and_relu, finished, layer_norm, reduced
from kernel_runs import scheduled
from meshfuse.base.errors import InvariantError
from meshfuse.ir import build, transforms
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.printer import print_program
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Schedule
from meshfuse.schedulers.registry import schedule
from program_recorder import Recorder


def output_schedule(program: Program) -> Schedule:
    return program.schedule(program.fusion.outputs[0].tensor)


def bindings(program: Program) -> list[str]:
    """Of each leaf of the first output, outermost first."""
    own = output_schedule(program)
    return [own.binding(leaf).name for leaf in own.leaves]


def test_text_of_a_schedule(golden: GoldenCheck) -> None:
    golden("scheduled_bias_and_relu", print_program(scheduled(bias_and_relu())))


def test_tensors_that_lie_alike_are_one_row() -> None:
    r = Recorder()
    x, y = r.input((-1, -1, 3)), r.input((-1, -1, 3))
    r.output(r.pointwise("add", x, y))
    program = scheduled(finished(r))
    assert bindings(program) == ["grid_y", "serial", "vectorize"]
    assert output_extents(program) == ["64", "(3*i0*i1 + 1023) // 1024", "16"]


def output_extents(program: Program) -> list[str]:
    """The sizes of the first output's leaves."""
    output = program.fusion.outputs[0].tensor
    return [str(axis.extent) for axis in program.leaf_domains(output)]


def test_rows_are_programs_and_few_rows_are_cut() -> None:
    assert bindings(scheduled(bias_and_relu())) == ["grid_x", "serial", "vectorize"]
    few = scheduled(bias_and_relu((2, -1)))
    assert bindings(few) == ["grid_x", "grid_y", "serial", "vectorize"]
    assert output_extents(few)[:2] == ["2", "32"]


def test_vectors_run_along_the_innermost_axis_in_memory() -> None:
    r = Recorder()
    x = r.add(build.define_tensor, (-1, 8), contiguity=True, stride_order=(0, 1))
    r.program = build.add_input(r.program, x)
    sums = r.add(build.reduction, "sum", x, [1])
    r.output(sums)
    program = scheduled(finished(r))
    assert bindings(program) == ["grid_y", "serial", "vectorize"]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (reduced("sum", (-1, -1, -1), [2]), ["grid_x", "serial", "vectorize"]),
        (reduced("sum", (-1, -1, -1), [0]), ["grid_x", "grid_y", "serial", "vectorize"]),
        (reduced("sum", (-1, -1, -1), [0, 2]), ["grid_x", "serial", "serial", "vectorize"]),
        (reduced("sum", (-1, -1), [0, 1]), ["serial", "serial", "vectorize"]),
        (layer_norm(), ["grid_x", "serial", "vectorize"]),
    ],
)
def test_rows(program: Program, expected: list[str]) -> None:
    assert bindings(scheduled(program)) == expected


def test_a_schedule_is_written_once() -> None:
    program = bias_and_relu()
    output = program.fusion.outputs[0].tensor
    leaf = program.schedule(output).leaves[0]
    program = transforms.parallelize(program, output, leaf, ParallelType.grid_x)
    with pytest.raises(InvariantError, match="is scheduled already"):
        schedule(program, "pointwise")
