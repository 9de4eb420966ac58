"""Sums, maxima and statistics."""

from __future__ import annotations

from typing import Any

import pytest

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.ir import build
from meshfuse.ir.describe import describe
from meshfuse.ir.printer import print_expr
from meshfuse.ir.program import Program
from meshfuse.ir.verify import verify
from program_recorder import Recorder


def lines(program: Program) -> list[str]:
    return [print_expr(expr) for expr in program.fusion.exprs]


def shape(recorder: Recorder, tensor: Any) -> str:
    verify(recorder.program)
    return describe(recorder.program, tensor).split(" ", 1)[1]


@pytest.mark.parametrize(
    ("sizes", "dims", "keepdim", "result", "ops"),
    [
        ([2, -1, 3], [1], False, "2, 3", ["T1 = sum(T0, [1])"]),
        ([2, 3], [-1, 0], False, "", ["T1 = sum(T0, [0, 1])"]),
        ([2, 3], None, False, "", ["T1 = sum(T0, [0, 1])"]),
        (
            [2, 3],
            [0],
            True,
            "1, 3",
            ["T1 = sum(T0, [0])", "T2 = broadcast(T1, [true, false])"],
        ),
        ([2, 1, 3], [1], False, "2, 3", ["T1 = squeeze(T0, [1])"]),
        ([2, 1, 3], [1, 2], False, "2", ["T1 = squeeze(T0, [1])", "T2 = sum(T1, [1])"]),
        (
            [1, 3],
            [0, 1],
            True,
            "1, 1",
            [
                "T1 = squeeze(T0, [0])",
                "T2 = sum(T1, [0])",
                "T3 = broadcast(T2, [true, true])",
            ],
        ),
        ([], None, False, "", ["T1 = set(T0)"]),
        ([], [], False, "", ["T1 = set(T0)"]),
        ([], [-1], True, "", ["T1 = set(T0)"]),
        ([0], [0], False, "", ["T1 = sum(T0, [0])"]),
    ],
)
def test_axes(
    sizes: list[int], dims: list[int] | None, keepdim: bool, result: str, ops: list[str]
) -> None:
    recorder = Recorder()
    out = recorder.add(build.reduction, "sum", recorder.input(sizes), dims, keepdim)
    assert shape(recorder, out) == f"f32[{result}]"
    assert lines(recorder.program) == ops


def test_the_result_keeps_its_reduced_axes_in_place() -> None:
    recorder = Recorder()
    out = recorder.add(build.reduction, "max", recorder.input([2, -1, 3]), [1])
    logical = recorder.program.tensor(out).logical
    assert [str(axis) for axis in logical] == ["a3:i{2}", "a4:r{i0}", "a5:i{3}"]
    assert recorder.program.schedule(out).leaves == ("a3", "a4", "a5")


@pytest.mark.parametrize(
    ("function", "dtype", "wanted"),
    [
        ("sum", DataType.Bool, DataType.Int),
        ("sum", DataType.Int32, DataType.Int),
        ("sum", DataType.Int, DataType.Int),
        ("sum", DataType.Half, DataType.Half),
        ("sum", DataType.Double, DataType.Double),
        ("max", DataType.Bool, DataType.Bool),
        ("max", DataType.Int32, DataType.Int32),
        ("max", DataType.BFloat16, DataType.BFloat16),
    ],
)
@pytest.mark.parametrize("sizes", [[3], [1], []])
def test_element_types(function: str, dtype: DataType, wanted: DataType, sizes: list[int]) -> None:
    recorder = Recorder()
    out = recorder.add(build.reduction, function, recorder.input(sizes, dtype))
    verify(recorder.program)
    assert recorder.program.tensor(out).dtype is wanted


def test_an_explicit_type_casts_first() -> None:
    recorder = Recorder()
    x = recorder.input([3, 1], DataType.Half)
    out = recorder.add(build.reduction, "sum", x, [0], dtype=DataType.Float)
    assert lines(recorder.program) == ["T1 = cast(T0)", "T2 = sum(T1, [0])"]
    assert shape(recorder, out) == "f32[1]"
    out = recorder.add(build.reduction, "sum", x, [1], dtype=DataType.Double)
    assert lines(recorder.program)[2:] == ["T3 = cast(T0)", "T4 = squeeze(T3, [1])"]
    assert shape(recorder, out) == "f64[3]"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("sum", [2]), UserError, r"sum\(T0 f32\[2, 3\], dims=\[2\], keepdim=False\): dim 2 must"),
        (("sum", [0, -2]), UserError, "dim 0 stands twice"),
        (("sum", []), UserError, "names no dim to reduce; leave dims out to reduce all 2"),
        (("sum", 1), UserTypeError, "dims are a list of ints"),
        (("sum", [1.0]), UserTypeError, "a dim is an int"),
        (("median", [0]), UserError, "no such reduction; there are sum, prod, max, min"),
        (
            ("max", [0], False, DataType.Half),
            UserError,
            r"max\(.*, dtype=f16\): max keeps the element type",
        ),
    ],
)
def test_errors(arguments: Any, error: type[Exception], message: str) -> None:
    recorder = Recorder()
    function, *rest = arguments
    x = recorder.input([2, 3])
    with pytest.raises(error, match=message):
        build.reduction(recorder.program, function, x, *rest)


# Statistics.


def test_var_mean() -> None:
    recorder = Recorder()
    x = recorder.input([2, -1, 3])
    recorder.program, variance, mean = build.var_mean(recorder.program, x, [1, 2])
    assert lines(recorder.program) == [
        "T1, T2, T3 = welford(T0, [1, 2])",
        "T4 = div(T2, (max(3*i0 - 1, 0)))",
    ]
    assert (variance, mean) == ("T4", "T1")
    assert shape(recorder, variance) == shape(recorder, mean) == "f32[2]"


def test_var_mean_of_static_sizes_with_kept_axes() -> None:
    recorder = Recorder()
    x = recorder.input([2, 3], DataType.BFloat16)
    recorder.program, variance, mean = build.var_mean(
        recorder.program, x, [-1], correction=0, keepdim=True
    )
    assert lines(recorder.program) == [
        "T1 = cast(T0)",
        "T2, T3, T4 = welford(T1, [1])",
        "T5 = div(T3, (3))",
        "T6 = broadcast(T5, [false, true])",
        "T7 = broadcast(T2, [false, true])",
    ]
    assert shape(recorder, variance) == shape(recorder, mean) == "f32[2, 1]"


@pytest.mark.parametrize(("count", "correction", "divisor"), [(3, 3, 0), (3, 5, 0), (1, 1, 0)])
def test_a_divisor_is_never_negative(count: int, correction: int, divisor: int) -> None:
    recorder = Recorder()
    x = recorder.input([2, count])
    recorder.program, variance, _ = build.var_mean(recorder.program, x, [1], correction)
    division = recorder.program.fusion.definition(variance)
    assert division is not None
    assert print_expr(division).endswith(f", ({divisor}))")


def test_a_single_element_deviates_by_itself_less_itself() -> None:
    recorder = Recorder()
    for sizes in ([1], []):
        x = recorder.input(sizes)
        recorder.program, variance, mean = build.var_mean(recorder.program, x, [0])
        assert shape(recorder, variance) == shape(recorder, mean) == "f32[]"
    assert lines(recorder.program) == [
        "T1 = squeeze(T0, [0])",
        "T2 = sub(T1, T1)",
        "T3 = set(T1)",
        "T4 = div(T2, (0))",
        "T6 = sub(T5, T5)",
        "T7 = set(T5)",
        "T8 = div(T6, (0))",
    ]


def test_errors_of_var_mean() -> None:
    recorder = Recorder()
    x, ints = recorder.input([2, 3]), recorder.input([2], DataType.Int)
    for tensor, dims, error, message in (
        (x, [2], UserError, r"var_mean\(T0 f32\[2, 3\], dims=\[2\], correction=1, keepdim=False\)"),
        (x, [0, 0], UserError, "dim 0 stands twice"),
        (x, [], UserError, "names no dim to reduce"),
        (x, 0, UserTypeError, "dims are a list of ints"),
        (ints, [0], UserError, "takes floating types; cast the operand first"),
    ):
        with pytest.raises(error, match=message):
            build.var_mean(recorder.program, tensor, dims)  # type: ignore[arg-type]  # wrong on purpose
