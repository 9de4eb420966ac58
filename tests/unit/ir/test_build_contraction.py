"""Matmul and linear."""

from __future__ import annotations

import pytest

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import UserError
from meshfuse.ir import build
from meshfuse.ir.axes import TensorName
from meshfuse.ir.verify import verify
from program_recorder import Recorder


def axes(recorder: Recorder, tensor: TensorName) -> list[str]:
    verify(recorder.program)
    logical = recorder.program.tensor(tensor).logical
    return [f"{axis.kind.value}{axis.extent}" for axis in logical]


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        ([2, 3], [3, 4], ["i2", "i4", "r3"]),
        ([3], [3], ["r3"]),
        ([2, 3], [3], ["i2", "r3"]),
        ([3], [3, 4], ["i4", "r3"]),
        ([3], [5, 3, 4], ["i5", "i4", "r3"]),
        ([5, 2, 3], [3], ["i5", "i2", "r3"]),
        ([5, 2, 3], [3, 4], ["i5", "i2", "i4", "r3"]),
        ([1, 2, 3], [5, 3, 4], ["i5", "i2", "i4", "r3"]),
        ([7, 1, 2, 3], [5, 3, 4], ["i7", "i5", "i2", "i4", "r3"]),
        ([1, 2, 3], [1, 3, 4], ["b1", "i2", "i4", "r3"]),
        ([1, 3], [3, 1], ["b1", "b1", "r3"]),
        ([-1, -1], [-1, 4], ["ii0", "i4", "ri1"]),
        ([-1, -1], [3, 4], ["ii0", "i4", "r3"]),
        ([2, 1], [1, 4], ["i2", "i4", "r1"]),
    ],
)
def test_matmul(a: list[int], b: list[int], wanted: list[str]) -> None:
    recorder = Recorder()
    out = recorder.add(build.matmul, recorder.input(a), recorder.input(b))
    assert axes(recorder, out) == wanted


@pytest.mark.parametrize(
    ("src", "weight", "bias", "wanted"),
    [
        ([2, 3], [4, 3], None, ["i2", "i4", "r3"]),
        ([3], [4, 3], [4], ["i4", "r3"]),
        ([5, -1, 3], [4, 3], [4], ["i5", "ii0", "i4", "r3"]),
        ([5, 2, 3], [7, 4, 3], [7, 4], ["i7", "i5", "i2", "i4", "r3"]),
        ([5, 2, 3], [1, 4, 3], [1, 4], ["b1", "i5", "i2", "i4", "r3"]),
    ],
)
def test_linear(
    src: list[int], weight: list[int], bias: list[int] | None, wanted: list[str]
) -> None:
    recorder = Recorder()
    tensors = [recorder.input(sizes) for sizes in (src, weight, bias) if sizes is not None]
    assert axes(recorder, recorder.add(build.linear, *tensors)) == wanted


def test_the_element_type_is_that_of_the_operands() -> None:
    recorder = Recorder()
    x, w = recorder.input([2, 3], DataType.BFloat16), recorder.input([4, 3], DataType.BFloat16)
    out = recorder.add(build.linear, x, w, None)
    assert recorder.program.tensor(out).dtype is DataType.BFloat16


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([2, 3], [4, 5], r"matmul\(T0 f32\[2, 3\], T1 f32\[4, 5\]\): sizes 3 and 4 meet"),
        ([2, 1], [4, 5], "sizes 1 and 4 meet"),
        ([2, 2, 3], [5, 3, 4], "sizes 2 and 5 meet"),
        ([], [3], "both operands need at least one axis"),
        ([3], [], "both operands need at least one axis"),
    ],
)
def test_errors_of_matmul(a: list[int], b: list[int], message: str) -> None:
    recorder = Recorder()
    x, y = recorder.input(a), recorder.input(b)
    with pytest.raises(UserError, match=message):
        build.matmul(recorder.program, x, y)


@pytest.mark.parametrize(
    ("src", "weight", "bias", "message"),
    [
        ([2, 3], [4, 5], None, r"linear\(T0 f32\[2, 3\], T1 f32\[4, 5\]\): sizes 3 and 5 meet"),
        ([2, 3], [3], None, r"takes src \[\*batch, k\] and weight \[\*d, n, k\]"),
        ([], [4, 3], None, "takes src"),
        ([2, 3], [4, 3], [5], "sizes 5 and 4 meet"),
        ([2, 3], [4, 3], [2, 4], r"the bias of weight \[\*d, n, k\] is \[\*d, n\]"),
        ([2, 3], [7, 4, 3], [4], r"the bias of weight"),
    ],
)
def test_errors_of_linear(
    src: list[int], weight: list[int], bias: list[int] | None, message: str
) -> None:
    recorder = Recorder()
    tensors = [recorder.input(sizes) for sizes in (src, weight, bias) if sizes is not None]
    with pytest.raises(UserError, match=message):
        build.linear(recorder.program, *tensors)


def test_element_types_must_be_equal() -> None:
    recorder = Recorder()
    x, y = recorder.input([2, 3]), recorder.input([3, 3], DataType.Half)
    for verb in (build.matmul, build.linear):
        with pytest.raises(UserError, match="operands must have one element type; cast one"):
            verb(recorder.program, x, y)
