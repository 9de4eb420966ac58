"""Tensors and scalars, inputs, outputs and sizes."""

from __future__ import annotations

from typing import Any

import pytest

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.expr import const, symbol
from meshfuse.ir import build
from meshfuse.ir.axes import TensorName
from meshfuse.ir.describe import describe
from meshfuse.ir.fusion import Output
from meshfuse.ir.ops import Literal, Set
from meshfuse.ir.program import Program
from meshfuse.ir.verify import verify
from program_recorder import Recorder


def allocation(program: Program, tensor: TensorName) -> tuple[list[int], list[bool | None]]:
    """Axes as positions, and flags."""
    found = program.schedule(tensor).allocation
    assert found is not None
    names = [axis.name for axis in program.tensor(tensor).tensor_axes]
    return [names.index(axis) for axis in found.order], list(found.contiguity)


def test_sizes_are_symbols_broadcast_axes_or_static() -> None:
    program, tensor = build.define_tensor(Program(), [-1, 1, 0, 7, -1], DataType.Half)
    axes = program.tensor(tensor).logical
    assert [axis.extent for axis in axes] == [
        symbol("i0"), const(1), const(0), const(7), symbol("i1")
    ]  # fmt: skip
    assert [axis.kind.value for axis in axes] == ["i", "b", "i", "i", "i"]
    assert describe(program, tensor) == "T0 f16[i0, 1, 0, 7, i1]"
    assert program.fusion.inputs == ()
    assert program.schedule(tensor).leaves == tuple(axis.name for axis in axes)


def test_two_tensors_share_neither_axes_nor_symbols() -> None:
    recorder = Recorder()
    x, y = recorder.input([-1, 4]), recorder.input([-1, 4])
    assert (x, y) == ("T0", "T1")
    assert describe(recorder.program, y) == "T1 f32[i1, 4]"
    assert recorder.program.fusion.inputs == (x, y)
    verify(recorder.program)


@pytest.mark.parametrize(
    ("shape", "arguments", "order", "flags"),
    [
        ([2, 1, 3], {}, [0, 1, 2], [False, None, False]),
        ([2, 1, 3], {"contiguity": True}, [0, 1, 2], [True, None, True]),
        ([2, 3], {"contiguity": [False, True]}, [0, 1], [False, True]),
        ([2, 3], {"contiguity": [None, True]}, [0, 1], [None, True]),
        (
            [2, 1, 3],
            {"contiguity": [None, True, False], "stride_order": [0, 2, 1]},
            [1, 2, 0],
            [None, True, False],
        ),
        ([2, 3, 4], {"contiguity": True, "stride_order": [-1, 0, 1]}, [0, 2, 1], [True] * 3),
    ],
)
def test_layout(
    shape: list[int], arguments: dict[str, Any], order: list[int], flags: list[bool | None]
) -> None:
    program, tensor = build.define_tensor(Program(), shape, **arguments)
    assert allocation(program, tensor) == (order, flags)
    verify(build.add_input(program, tensor))


def test_a_0_dim_tensor_has_no_layout() -> None:
    program, tensor = build.define_tensor(Program(), [], is_cpu=True)
    assert program.tensor(tensor).is_cpu
    assert program.schedule(tensor).allocation is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"shape": [2, -2]},
            UserError,
            r"define_tensor\(shape=\[2, -2\].* size 1 is -2; a size is",
        ),
        ({"shape": [2.0]}, UserTypeError, r"size 0 must be an int64, got 2.0"),
        ({"shape": [2**63]}, UserTypeError, r"must be an int64"),
        ({"shape": [True]}, UserTypeError, r"must be an int64"),
        (
            {"shape": [2, 3], "contiguity": [True]},
            UserError,
            r"Length of contiguity argument \(1\) must match that of shape argument \(2\)",
        ),
        ({"shape": [2], "contiguity": [1]}, UserTypeError, r"flag is True, False or None, got 1"),
        ({"shape": [1], "contiguity": [True]}, UserError, r"axis of size 1 must be None"),
        ({"shape": [2, 3], "stride_order": [0]}, UserError, r"stride_order=\[0\]: got 1 dims"),
        ({"shape": [2, 3], "stride_order": [0, 0]}, UserError, r"dim 0 stands twice in \[0, 0\]"),
        ({"shape": [2, 3], "stride_order": [0, 2]}, UserError, r"dim 2 must lie in \[-2, 2\)"),
        ({"shape": [2], "is_cpu": True}, UserError, r"CPU non-scalar tensor is not supported!"),
    ],
)
def test_errors_of_define_tensor(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build.define_tensor(Program(), **arguments)


def test_scalars_and_literals() -> None:
    program, scalar = build.define_scalar(Program(), DataType.Int)
    assert scalar == "c0"
    assert describe(program, scalar) == "c0 i64"
    assert build.literal(2.0) == Literal(2.0, DataType.Double)
    assert build.literal(2) == Literal(2, DataType.Int)
    assert build.literal(True) == Literal(True, DataType.Bool)
    assert build.literal(2.0, DataType.Half) == Literal(2.0, DataType.Half)
    assert build.literal(float("nan")).value is build.literal(float("inf") - float("inf")).value


def test_size() -> None:
    program, tensor = build.define_tensor(Program(), [-1, 1, 5])
    assert [build.size(program, tensor, dim) for dim in (0, 1, -1)] == [
        symbol("i0"), const(1), const(5)
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"size\(T0 f32\[i0, 1, 5\], dim=3\): dim 3 must lie in"):
        build.size(program, tensor, 3)


def test_an_output_may_be_an_input_and_stand_twice() -> None:
    recorder = Recorder()
    x = recorder.input([4])
    recorder.output(x, x)
    assert recorder.program.fusion.outputs == (Output(x), Output(x))


def test_an_aliased_output_is_laid_out_as_its_input() -> None:
    recorder = Recorder()
    program, x = build.define_tensor(
        recorder.program, [2, 3], contiguity=[False, True], stride_order=[0, 1]
    )
    recorder.program = build.add_input(program, x)
    y = recorder.pointwise("add", x, build.literal(1.0))
    program = build.add_output(recorder.program, y, alias=x)
    assert program.fusion.outputs == (Output(y, alias=x),)
    assert allocation(program, y) == ([1, 0], [False, True])
    assert allocation(program, x) == ([1, 0], [False, True])
    verify(program)


def test_an_input_or_a_tensor_aliased_before_is_copied_first() -> None:
    recorder = Recorder()
    x, y, z = recorder.input([3]), recorder.input([3]), recorder.input([3])
    program = build.add_output(recorder.program, x, alias=y)
    assert program.fusion.exprs == (Set(TensorName("T3"), x),)
    assert program.fusion.outputs == (Output(TensorName("T3"), alias=y),)
    program = build.add_output(program, TensorName("T3"), alias=z)
    assert program.fusion.exprs[1:] == (Set(TensorName("T4"), TensorName("T3")),)
    verify(program)


def test_errors_of_aliases() -> None:
    recorder = Recorder()
    x, other, wide = recorder.input([3]), recorder.input([4]), recorder.input([3, 1])
    ints = recorder.input([3], DataType.Int)
    y = recorder.pointwise("neg", x)
    program = recorder.program
    for alias, message in (
        (y, r"add_output\(T4 f32\[3\], alias_input=T4 f32\[3\]\): .* must be an input"),
        (other, "shapes differ"),
        (wide, "shapes differ"),
        (ints, "element types differ; cast the output to i64"),
    ):
        with pytest.raises(UserError, match=message):
            build.add_output(program, y, alias=alias)
    with pytest.raises(UserError, match="another output goes into T0 already"):
        build.add_output(build.add_output(program, y, alias=x), y, alias=x)


def test_an_expanded_input_is_not_updated_in_place() -> None:
    program, x = build.define_tensor(Program(), [2, 3], contiguity=[None, True])
    program = build.add_input(program, x)
    program, y = build.pointwise(program, "neg", [x])
    with pytest.raises(UserError, match="T0 is expanded along a0: its elements overlap"):
        build.add_output(program, TensorName(y), alias=x)


def test_an_unlaid_input_leaves_the_output_unlaid() -> None:
    program, x = build.define_tensor(Program(), [])
    program = build.add_input(program, x)
    program, y = build.pointwise(program, "neg", [x])
    program = build.add_output(program, TensorName(y), alias=x)
    assert program.schedule(TensorName(y)).allocation is None
