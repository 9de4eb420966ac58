"""Reshapes: sizes, the least of merges and splits, and what is refused."""

from __future__ import annotations

import pytest

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import UserError
from meshfuse.ir import build
from meshfuse.ir.axes import TensorName
from meshfuse.ir.describe import describe
from meshfuse.ir.ops import Reshape
from meshfuse.ir.parser import parse_program
from meshfuse.ir.printer import print_expr, print_program
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Merge
from meshfuse.ir.verify import verify
from program_recorder import Recorder


def ops(program: Program) -> list[str]:
    return [print_expr(expr).split(" = ")[1].split("(")[0] for expr in program.fusion.exprs]


def steps(program: Program) -> str:
    """One letter a step of the one reshape: m for a merge, s for a split."""
    (expr,) = (expr for expr in program.fusion.exprs if isinstance(expr, Reshape))
    found = program.tensor(expr.out).root_steps
    return "".join("m" if isinstance(step, Merge) else "s" for step in found)


@pytest.mark.parametrize(
    ("sizes", "wanted", "result", "derived"),
    [
        ([6], [2, 3], "2, 3", "s"),
        ([2, 3], [6], "6", "m"),
        ([4, 6], [8, 3], "8, 3", "ms"),
        ([2, 3, 4], [2, 12], "2, 12", "m"),
        ([2, 12], [2, 3, 4], "2, 3, 4", "s"),
        ([2, 3, 4, 5], [6, 20], "6, 20", "mm"),
        ([24], [2, 3, 4], "2, 3, 4", "ss"),
        ([-1, 64], [-1, 4, 16], "i0, 4, 16", "s"),
        ([-1, 4, 16], [-1, 64], "i0, 64", "m"),
        ([-1, -1, 8], [-1, 8], "i0*i1, 8", "m"),
        ([-1], [-1, 8], "i0 // 8, 8", "s"),
        ([-1, 12], [-1, 4], "3*i0, 4", "ms"),
        ([-1, 12], [5, 4, 3], "5, 4, 3", "s"),
        ([-1, -1, 12], [-1, 5, 4, 3], "i0*i1 // 5, 5, 4, 3", "mss"),
    ],
)
def test_merges_and_splits(sizes: list[int], wanted: list[int], result: str, derived: str) -> None:
    recorder = Recorder()
    out = recorder.add(build.reshape, recorder.input(sizes), wanted)
    verify(recorder.program)
    assert describe(recorder.program, out) == f"{out} f32[{result}]"
    assert ops(recorder.program) == ["reshape"]
    assert steps(recorder.program) == derived
    assert parse_program(print_program(recorder.program)) == recorder.program


def test_an_axis_that_stays_has_one_name() -> None:
    recorder = Recorder()
    out = recorder.add(build.reshape, recorder.input([-1, 6]), [-1, 2, 3])
    definition = recorder.program.tensor(out)
    assert definition.root[0] == definition.logical[0]
    assert definition.root[1].name not in {axis.name for axis in definition.logical}


@pytest.mark.parametrize(
    ("sizes", "wanted", "expected"),
    [
        ([2, 3], [2, 3], ["set"]),
        ([2, 3], [2, 1, 3], ["broadcast"]),
        ([2, 1, 3], [2, 3], ["squeeze"]),
        ([1, 6], [2, 3, 1], ["squeeze", "reshape", "broadcast"]),
        ([1, 1], [1], ["squeeze", "broadcast"]),
        ([1], [], ["squeeze"]),
        ([], [1, 1], ["broadcast"]),
        ([0, 3], [5, 0], ["max", "broadcast", "expand"]),
        ([-1], [1], ["squeeze", "broadcast"]),
        ([-1, -1], [0, 4], ["reshape", "expand", "max", "broadcast", "expand"]),
    ],
)
def test_sizes_of_one_and_zero(sizes: list[int], wanted: list[int], expected: list[str]) -> None:
    recorder = Recorder()
    out = recorder.add(build.reshape, recorder.input(sizes), wanted)
    verify(recorder.program)
    extents = [str(axis.extent) for axis in recorder.program.tensor(out).tensor_axes]
    assert extents == [str(size) for size in wanted]
    assert ops(recorder.program) == expected


def test_sizes_of_scalars_and_of_other_tensors() -> None:
    recorder = Recorder()
    x, y = recorder.input([-1, -1]), recorder.input([-1])
    count = recorder.add(build.define_scalar, DataType.Int)
    recorder.program = build.add_input(recorder.program, count)
    rows = build.size(recorder.program, y, 0)
    out = recorder.add(build.reshape, x, [rows, count, -1])
    assert describe(recorder.program, out) == f"{out} f32[i2, c0, i0*i1 // (c0*i2)]"
    columns = build.size(recorder.program, x, 1)
    same = recorder.add(build.reshape, x, [-1, columns])
    assert ops(recorder.program) == ["reshape", "set"]
    assert describe(recorder.program, TensorName(same)).endswith("[i0, i1]")


@pytest.mark.parametrize(
    ("sizes", "wanted", "message"),
    [
        ([2, 3], [-1, -1], r"reshape\(T0 f32\[2, 3\], .*\): at most one size may be -1"),
        ([2, 3], [4], "the tensor has 6 elements, the new shape 4"),
        ([2, 3], [-1, 4], "6 elements do not divide by 4"),
        ([2, 3], [0, -1], "beside a size of 0, -1 may stand for any size"),
        ([2, 3], [-2, 3], "size -2 is negative"),
    ],
)
def test_refusals(sizes: list[int], wanted: list[int], message: str) -> None:
    recorder = Recorder()
    x = recorder.input(sizes)
    with pytest.raises(UserError, match=message):
        build.reshape(recorder.program, x, wanted)


def test_one_element_has_no_axis_of_unknown_size() -> None:
    recorder = Recorder()
    x, y = recorder.input([1]), recorder.input([-1])
    with pytest.raises(UserError, match="one element has no axes of sizes known when run"):
        build.reshape(recorder.program, x, [build.size(recorder.program, y, 0)])


def test_a_reshaped_axis_of_unknown_size_may_be_squeezed() -> None:
    """That it is 1 is found out when the program runs."""
    recorder = Recorder()
    x = recorder.input([-1])
    y = recorder.add(build.reshape, x, [-1, 4])
    row = recorder.add(build.squeeze, y, [0])
    assert describe(recorder.program, row) == "T2 f32[4]"
    with pytest.raises(UserError, match="only axes declared of size 1 can go"):
        build.squeeze(recorder.program, y, [1])
