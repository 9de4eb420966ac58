"""Small programs to schedule, and what their loop nests look like."""

from __future__ import annotations

from meshfuse.ir import build, transforms
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.parser import parse_program
from meshfuse.ir.printer import print_program
from meshfuse.ir.program import Program
from meshfuse.ir.verify import verify
from program_recorder import Recorder


def one(*sizes: int) -> tuple[Program, TensorName]:
    """A program with an input of these sizes."""
    recorder = Recorder()
    tensor = recorder.input(list(sizes))
    return recorder.program, tensor


def total(*sizes: int, dims: list[int]) -> tuple[Program, TensorName]:
    """A program with a sum over `dims`."""
    recorder = Recorder()
    tensor = recorder.add(build.reduction, "sum", recorder.input(list(sizes)), dims)
    recorder.output(tensor)
    return recorder.program, tensor


def nest(program: Program, tensor: TensorName) -> list[str]:
    """Kind and extent of each loop, of a program that is sound and whose text parses back."""
    verify(program)
    assert parse_program(print_program(program)) == program
    return [f"{axis.kind.value}{axis.extent}" for axis in program.leaf_domains(tensor)]


def logical(program: Program, tensor: TensorName) -> list[str]:
    """Kind and extent of each logical axis."""
    return [f"{axis.kind.value}{axis.extent}" for axis in program.tensor(tensor).logical]


def leaf(program: Program, tensor: TensorName, position: int) -> AxisName:
    return program.schedule(tensor).leaves[position]


def bind(program: Program, tensor: TensorName, position: int, to: ParallelType) -> Program:
    return transforms.parallelize(program, tensor, leaf(program, tensor, position), to)


def bound(program: Program, tensor: TensorName) -> list[ParallelType]:
    """What each loop is bound to."""
    schedule = program.schedule(tensor)
    return [schedule.binding(leaf) for leaf in schedule.leaves]
