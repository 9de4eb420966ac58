"""Sizes that meet become one."""

from meshfuse.base.dtypes import DataType
from meshfuse.ir import build
from meshfuse.ir.axes import TensorName
from meshfuse.ir.program import Program
from meshfuse.passes.concretize import concretize


def tensor_inputs(*shapes: tuple[int, ...]) -> tuple[Program, list[TensorName]]:
    program, names = Program(), list[TensorName]()
    for shape in shapes:
        program, name = build.define_tensor(program, shape)
        program = build.add_input(program, name)
        names.append(name)
    return program, names


def sizes(program: Program, name: str) -> list[str]:
    return [str(axis.extent) for axis in program.tensor(TensorName(name)).logical]


def test_the_first_symbol_or_a_constant_stays() -> None:
    program, (x, y, z) = tensor_inputs((-1, -1, 1), (-1, 8, -1), (8,))
    program, total = build.pointwise(program, "add", (x, y))
    program, result = build.pointwise(program, "mul", (total, z))
    assert sizes(program, y) == ["i2", "8", "i3"]
    program, notes = concretize(program)
    assert sizes(program, x) == ["i0", "8", "1"]
    assert sizes(program, y) == ["i0", "8", "8"]
    assert sizes(program, result) == ["i0", "8", "8"]
    assert notes == ()


def test_contracted_and_aliased_axes_meet_too() -> None:
    program, (x, weight, out) = tensor_inputs((-1, -1), (4, -1), (-1, -1))
    program, product = build.linear(program, x, weight)
    program = build.add_output(program, product, alias=out)
    program, _ = concretize(program)
    assert sizes(program, weight) == ["4", "i1"]
    assert sizes(program, out) == ["i0", "4"]
    assert sizes(program, product) == ["i0", "4", "i1"]


def test_the_size_that_a_scalar_gives_is_kept() -> None:
    program, (x, row) = tensor_inputs((-1, 3), (1, 3))
    program, count = build.define_scalar(program, DataType.Int)
    program = build.add_input(program, count)
    program, column = build.broadcast_in_dim(program, row, [count, 3], [0, 1])
    program, total = build.pointwise(program, "add", (x, column))
    program, _ = concretize(program)
    assert sizes(program, x) == sizes(program, total) == ["c0", "3"]


def test_a_size_made_of_others_replaces_a_symbol() -> None:
    program, (x, y, z) = tensor_inputs((1, -1), (-1,), (-1, -1))
    double = build.size(program, y, 0) * 2
    program, stretched = build.expand(program, x, [double, -1])
    program, total = build.pointwise(program, "add", (stretched, z))
    program, _ = concretize(program)
    assert sizes(program, z) == sizes(program, TensorName(total)) == ["2*i1", "i0"]


def test_a_size_is_not_replaced_by_a_multiple_of_itself() -> None:
    program, (x,) = tensor_inputs((-1,))
    program, longer = build.expand(program, x, [build.size(program, x, 0) * 2])
    program, _ = concretize(program)
    assert (sizes(program, x), sizes(program, longer)) == (["i0"], ["2*i0"])


def test_a_program_without_meetings_is_returned_as_it_is() -> None:
    program, (x,) = tensor_inputs((-1, 3))
    program, _ = build.pointwise(program, "neg", (x,))
    assert concretize(program)[0] is program
