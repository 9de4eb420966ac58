"""Scalar functions and casts: operands, element types, axes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import UserError
from meshfuse.expr import symbol
from meshfuse.ir import build
from meshfuse.ir.axes import AxisName
from meshfuse.ir.describe import describe
from meshfuse.ir.infer import pointwise_dtypes
from meshfuse.ir.ops import Operand
from meshfuse.ir.pointwise import SCALAR_FUNCTIONS
from meshfuse.ir.printer import print_expr
from meshfuse.ir.program import Program
from meshfuse.ir.verify import verify
from program_recorder import Recorder

B, I32, I64 = DataType.Bool, DataType.Int32, DataType.Int
H, BF, F, D = DataType.Half, DataType.BFloat16, DataType.Float, DataType.Double


def lines(program: Program) -> list[str]:
    return [print_expr(expr) for expr in program.fusion.exprs]


def result_dtype(recorder: Recorder, function: str, *args: Operand) -> DataType:
    out = recorder.pointwise(function, *args)
    verify(recorder.program)
    fusion = recorder.program.fusion
    return fusion.tensors[out].dtype if out in fusion.tensors else fusion.scalars[out].dtype  # type: ignore[index]  # a name of either


# Element types.


@pytest.mark.parametrize(
    ("function", "by_input"),
    [
        ("neg", {I32: I32, I64: I64, H: F, BF: F, F: F, D: D}),
        ("exp", {B: F, I32: F, I64: F, H: F, BF: F, F: F, D: D}),
        ("gelu", {I64: F, BF: F, D: D}),
        ("relu", {I32: I32, I64: I64, H: H, BF: BF, F: F, D: D}),
    ],
)
def test_one_operand(function: str, by_input: dict[DataType, DataType]) -> None:
    recorder = Recorder()
    for dtype, wanted in by_input.items():
        assert result_dtype(recorder, function, recorder.input([3], dtype)) is wanted


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (F, F, F), (F, D, D), (F, I64, F), (I32, I64, I64), (B, I32, I32), (B, B, B),
        (H, H, F), (H, BF, F), (BF, F, F), (H, I64, F), (H, D, D),
    ],
)  # fmt: skip
def test_two_tensors(a: DataType, b: DataType, wanted: DataType) -> None:
    recorder = Recorder()
    x, y = recorder.input([3], a), recorder.input([3], b)
    assert result_dtype(recorder, "add", x, y) is wanted
    assert result_dtype(recorder, "mul", y, x) is wanted
    assert result_dtype(recorder, "lt", x, y) is B


@pytest.mark.parametrize(
    ("tensor", "scalar", "wanted"),
    [
        (F, 3.0, F), (F, 3, F), (F, True, F), (D, 3, D), (H, 3.0, F), (BF, 3, F),
        (I64, 3.0, D), (I32, 3.0, D), (I32, 3, I32), (I64, True, I64), (B, 3, I64), (B, True, B),
    ],
)  # fmt: skip
def test_a_tensor_and_a_python_scalar(
    tensor: DataType, scalar: bool | int | float, wanted: DataType
) -> None:
    recorder = Recorder()
    x = recorder.input([3], tensor)
    assert result_dtype(recorder, "add", x, build.literal(scalar)) is wanted
    assert result_dtype(recorder, "add", build.literal(scalar), x) is wanted


@pytest.mark.parametrize(
    ("tensor", "zero_dim", "wanted"),
    [
        (F, D, F), (F, I64, F), (I64, F, F), (I64, D, D), (B, I32, I32), (H, D, F), (I32, I64, I32),
        (H, H, F), (H, I64, F),
    ],
)  # fmt: skip
def test_a_0_dim_tensor_ranks_below_the_others(
    tensor: DataType, zero_dim: DataType, wanted: DataType
) -> None:
    recorder = Recorder()
    x, y = recorder.input([3], tensor), recorder.input([], zero_dim)
    assert result_dtype(recorder, "add", x, y) is wanted
    assert result_dtype(recorder, "mul", y, x) is wanted


def test_a_0_dim_tensor_that_does_not_count_is_cast_before_it_gets_axes() -> None:
    recorder = Recorder()
    recorder.pointwise("add", recorder.input([3], F), recorder.input([], D))
    assert lines(recorder.program) == [
        "T2 = cast(T1)", "T3 = broadcast(T2, [true])", "T4 = add(T0, T3)"
    ]  # fmt: skip
    assert recorder.program.tensor("T2").dtype is F  # type: ignore[arg-type]  # a bare name


def test_the_result_of_a_full_reduction_counts_as_a_tensor_with_axes() -> None:
    recorder = Recorder()
    total = recorder.add(build.reduction, "sum", recorder.input([3], D))
    assert result_dtype(recorder, "add", total, recorder.input([3], F)) is D
    assert result_dtype(recorder, "add", total, recorder.input([], I64)) is D


@pytest.mark.parametrize(
    ("x", "y", "wanted"), [(H, H, H), (BF, H, F), (F, D, D), (I64, I32, I64), (B, B, B)]
)
def test_where_keeps_16_bits(x: DataType, y: DataType, wanted: DataType) -> None:
    recorder = Recorder()
    condition = recorder.input([3], B)
    operands = recorder.input([3], x), recorder.input([3], y)
    assert result_dtype(recorder, "where", condition, *operands) is wanted


def test_where_with_scalars() -> None:
    recorder = Recorder()
    condition, x = recorder.input([3], B), recorder.input([3], H)
    zero_dim = recorder.input([], B)
    one, two = build.literal(1.0), build.literal(2.0)
    assert result_dtype(recorder, "where", condition, one, two) is D
    assert result_dtype(recorder, "where", condition, x, one) is H
    before = len(recorder.program.fusion.exprs)
    assert result_dtype(recorder, "where", zero_dim, zero_dim, x) is H
    assert lines(recorder.program)[before:] == [
        "T5 = cast(T2)",
        "T6 = broadcast(T2, [true])",
        "T7 = broadcast(T5, [true])",
        "T8 = where(T6, T7, T1)",
    ]


def test_scalars_give_a_scalar() -> None:
    recorder = Recorder()
    c = recorder.add(build.define_scalar, D)
    h = recorder.add(build.define_scalar, H)
    recorder.program = build.add_input(build.add_input(recorder.program, c), h)
    assert result_dtype(recorder, "add", c, build.literal(1)) is D
    assert result_dtype(recorder, "mul", h, h) is F
    assert result_dtype(recorder, "add", symbol("i0"), build.literal(1)) is I64
    assert result_dtype(recorder, "lt", c, build.literal(1)) is B
    assert lines(recorder.program)[0] == "c2 = add(c0, 1)"
    assert lines(recorder.program)[2] == "c4 = add((i0), 1)"


@pytest.mark.parametrize(
    ("function", "dtypes", "wanted"),
    [
        ("add", [I64, F], (F, F)),
        ("lt", [I64, F], (F, B)),
        ("lt", [H, H], (H, B)),
        ("relu", [H], (H, H)),
        ("exp", [B], (F, F)),
        ("where", [B, H, I64], (H, H)),
    ],
)
def test_operands_convert_to_one_type(
    function: str, dtypes: Sequence[DataType], wanted: tuple[DataType, DataType]
) -> None:
    recorder = Recorder()
    args = [recorder.input([3], dtype) for dtype in dtypes]
    assert pointwise_dtypes(recorder.program, function, args) == wanted


# Axes.


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        ([2, 3], [2, 3], "2, 3"),
        ([2, 1], [1, 3], "2, 3"),
        ([1, 1], [1], "1, 1"),
        ([3], [2, 3], "2, 3"),
        ([], [2, 3], "2, 3"),
        ([-1, 1], [-1, -1], "i0, i2"),
        ([-1], [4], "4"),
        ([0], [1], "0"),
    ],
)
def test_shapes_align_at_the_last_axis(a: list[int], b: list[int], wanted: str) -> None:
    recorder = Recorder()
    out = recorder.pointwise("add", recorder.input(a), recorder.input(b))
    assert describe(recorder.program, out) == f"{out} f32[{wanted}]"
    verify(recorder.program)


def test_missing_axes_are_inserted() -> None:
    recorder = Recorder()
    recorder.pointwise("add", recorder.input([3]), recorder.input([2, 3]))
    assert lines(recorder.program) == ["T2 = broadcast(T0, [true, false])", "T3 = add(T2, T1)"]


def test_an_operand_may_stand_twice() -> None:
    recorder = Recorder()
    x = recorder.input([3])
    recorder.pointwise("mul", x, x)
    assert lines(recorder.program) == ["T1 = mul(T0, T0)"]


def test_results_of_reductions_have_their_tensor_axes_only() -> None:
    recorder = Recorder()
    total = recorder.add(build.reduction, "sum", recorder.input([2, 3]), [1])
    out = recorder.pointwise("neg", total)
    assert describe(recorder.program, out) == f"{out} f32[2]"
    assert [axis.kind.value for axis in recorder.program.tensor(out).logical] == ["i"]


# Errors.


def test_errors_restate_the_call() -> None:
    recorder = Recorder()
    x, y, flags = recorder.input([2, 3]), recorder.input([-1, 4]), recorder.input([3], B)
    two = build.literal(2.0)
    for function, args, message in (
        (
            "add",
            (x, y),
            r"add\(T0 f32\[2, 3\], T1 f32\[i0, 4\]\): sizes 3 and 4 meet on one axis; they must",
        ),
        ("add", (x,), r"add\(T0 f32\[2, 3\]\): takes 2 operands, got 1"),
        (
            "power",
            (x, two),
            r"power\(T0 f32\[2, 3\], 2.0\): no such function; there are abs, neg, exp",
        ),
        ("where", (x, x, x), r"Condition should be of DataType Bool"),
        ("where", (two, x, x), r"Condition should be of DataType Bool"),
        ("neg", (flags,), r"neg\(T2 bool\[3\]\): not defined for bool; cast an operand first"),
        ("sub", (flags, flags), "not defined for bool"),
        ("div", (flags, build.literal(True)), "not defined for bool"),
        ("relu", (flags,), "not defined for bool"),
    ):
        with pytest.raises(UserError, match=message):
            build.pointwise(recorder.program, function, args)


def test_bool_where_it_means_something() -> None:
    recorder = Recorder()
    flags = recorder.input([3], B)
    for function in ("add", "mul"):
        assert result_dtype(recorder, function, flags, flags) is B
    assert result_dtype(recorder, "sub", flags, build.literal(1)) is I64
    assert {row.name for row in SCALAR_FUNCTIONS.values() if not row.takes_bool} == {
        "abs", "neg", "relu", "silu", "sub", "div", "pow"
    }  # fmt: skip
    for function in ("maximum", "minimum", "le", "ge", "gt", "eq", "ne"):
        assert result_dtype(recorder, function, flags, flags) is B
    integers = recorder.input([3], I64)
    with pytest.raises(UserError, match="takes floating types"):
        build.pointwise(recorder.program, "silu", [integers])


# Casts.


def test_cast() -> None:
    recorder = Recorder()
    x = recorder.input([-1, 1])
    half, same = recorder.add(build.cast, x, H), recorder.add(build.cast, x, F)
    assert describe(recorder.program, half) == "T1 f16[i0, 1]"
    assert describe(recorder.program, same) == "T2 f32[i0, 1]"
    assert lines(recorder.program) == ["T1 = cast(T0)", "T2 = set(T0)"]
    assert recorder.program.tensor(half).logical[0].name == AxisName("a2")
    verify(recorder.program)
