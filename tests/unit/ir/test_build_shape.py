"""Copies, broadcasts, permutations and squeezes."""

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
    return describe(recorder.program, tensor)


def test_set() -> None:
    recorder = Recorder()
    y = recorder.add(build.set_, recorder.input([-1, 1], DataType.Half))
    assert shape(recorder, y) == "T1 f16[i0, 1]"
    assert lines(recorder.program) == ["T1 = set(T0)"]


def test_broadcast() -> None:
    recorder = Recorder()
    x = recorder.input([2, -1])
    y = recorder.add(build.broadcast, x, [True, False, True, False])
    assert shape(recorder, y) == "T1 f32[1, 2, 1, i0]"
    assert recorder.add(build.broadcast, x, [False, False]) == x
    assert len(recorder.program.fusion.exprs) == 1


@pytest.mark.parametrize("flags", [[False], [True, False], [False] * 3, [True] * 3])
def test_broadcast_needs_one_false_flag_per_axis(flags: list[bool]) -> None:
    recorder = Recorder()
    x = recorder.input([2, 3])
    with pytest.raises(UserError, match=r"broadcast\(T0 f32\[2, 3\], .*flags are false"):
        build.broadcast(recorder.program, x, flags)


@pytest.mark.parametrize(
    ("sizes", "wanted", "dims", "result", "ops"),
    [
        ([3], [2, 3], [1], "2, 3", ["broadcast", "expand"]),
        ([3], [1, 3], [1], "1, 3", ["broadcast"]),
        ([2, 3], [2, 3], [0, 1], "2, 3", []),
        ([1, 3], [2, 3], [0, 1], "2, 3", ["expand"]),
        ([1, 3], [0, 3], [0, -1], "0, 3", ["expand"]),
        ([-1], [5, 7], [0], "5, 7", ["broadcast", "expand"]),
        ([], [5], [], "5", ["broadcast", "expand"]),
        ([1], [1, 1], [0], "1, 1", ["broadcast"]),
    ],
)
def test_broadcast_in_dim(
    sizes: list[int], wanted: list[int], dims: list[int], result: str, ops: list[str]
) -> None:
    recorder = Recorder()
    out = recorder.add(build.broadcast_in_dim, recorder.input(sizes), wanted, dims)
    assert shape(recorder, out) == f"{out} f32[{result}]"
    assert [line.split(" = ")[1].split("(")[0] for line in lines(recorder.program)] == ops


def test_broadcast_in_dim_to_sizes_that_are_known_when_run() -> None:
    recorder = Recorder()
    x, y = recorder.input([-1, 4]), recorder.input([4])
    scalar = recorder.add(build.define_scalar, DataType.Int)
    recorder.program = build.add_input(recorder.program, scalar)
    rows = build.size(recorder.program, x, 0)
    assert shape(recorder, recorder.add(build.broadcast_in_dim, y, [rows, 4], [1])) == (
        "T3 f32[i0, 4]"
    )
    assert shape(recorder, recorder.add(build.broadcast_in_dim, y, [scalar, 4], [1])) == (
        "T5 f32[c0, 4]"
    )


@pytest.mark.parametrize(
    ("wanted", "dims", "error", "message"),
    [
        ([2, 3], [0], UserError, r"broadcast_in_dim\(T0 f32\[2, 3\], shape=\[2, 3\], dims=\[0\]\)"),
        ([3], [0], UserError, "got 1 dims for 2 axes"),
        ([2, 3], [0, 0], UserError, r"dim 0 stands twice"),
        ([2, 3], [0, 2], UserError, r"dim 2 must lie in \[-2, 2\)"),
        ([3, 2], [1, 0], UserError, r"dims must increase; permute the tensor first"),
        ([2, 4], [0, 1], UserError, r"axis 1 has size 3; only size 1 expands to 4"),
        ([2, -1], [0, 1], UserError, r"size -1 is negative"),
        ([2, 3.0], [0, 1], UserTypeError, r"a size is an int or a scalar, got 3.0"),
        ([2, 3], 1, UserTypeError, r"dims are a list of ints, got int"),
        ([2, 3], [0, 1.0], UserTypeError, r"a dim is an int, got 1.0 of type float"),
    ],
)
def test_errors_of_broadcast_in_dim(
    wanted: Any, dims: Any, error: type[Exception], message: str
) -> None:
    recorder = Recorder()
    x = recorder.input([2, 3])
    with pytest.raises(error, match=message):
        build.broadcast_in_dim(recorder.program, x, wanted, dims)


def test_permute() -> None:
    recorder = Recorder()
    y = recorder.add(build.permute, recorder.input([2, 1, -1]), [-1, 0, 1])
    assert shape(recorder, y) == "T1 f32[i0, 2, 1]"
    assert lines(recorder.program) == ["T1 = permute(T0, [2, 0, 1])"]


@pytest.mark.parametrize(
    ("dims", "error", "message"),
    [
        ([0], UserError, r"permute\(T0 f32\[2, 3\], dims=\[0\]\): got 1 dims; the tensor has 2"),
        ([0, 1, 2], UserError, r"dim 2 must lie in \[-2, 2\)"),
        ([1, -1], UserError, "dim 1 stands twice"),
        (0, UserTypeError, "dims are a list of ints, got int"),
        ("01", UserTypeError, "dims are a list of ints, got str"),
    ],
)
def test_errors_of_permute(dims: Any, error: type[Exception], message: str) -> None:
    recorder = Recorder()
    x = recorder.input([2, 3])
    with pytest.raises(error, match=message):
        build.permute(recorder.program, x, dims)


def test_squeeze() -> None:
    recorder = Recorder()
    x = recorder.input([1, 2, 1])
    assert shape(recorder, recorder.add(build.squeeze, x, [-1, 0])) == "T1 f32[2]"
    assert shape(recorder, recorder.add(build.squeeze, x, [2])) == "T2 f32[1, 2]"
    assert shape(recorder, recorder.add(build.squeeze, x, [])) == "T3 f32[1, 2, 1]"
    assert lines(recorder.program) == [
        "T1 = squeeze(T0, [0, 2])", "T2 = squeeze(T0, [2])", "T3 = set(T0)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ([1], r"squeeze\(T0 f32\[1, i0\], dims=\[1\]\): axis 1 has size i0; only axes declared"),
        ([2], r"dim 2 must lie in \[-2, 2\)"),
        ([0, 0], "dim 0 stands twice"),
        ([0, 1, 2], r"dim 2 must lie in"),
    ],
)
def test_errors_of_squeeze(dims: list[int], message: str) -> None:
    recorder = Recorder()
    x = recorder.input([1, -1])
    with pytest.raises(UserError, match=message):
        build.squeeze(recorder.program, x, dims)


def test_a_0_dim_tensor_has_nothing_to_squeeze() -> None:
    recorder = Recorder()
    x = recorder.input([])
    with pytest.raises(UserError, match="dim 0 has no place in a 0-dim tensor"):
        build.squeeze(recorder.program, x, [0])


def test_an_expanded_axis_is_squeezed_on_request() -> None:
    recorder = Recorder()
    x = recorder.add(build.broadcast_in_dim, recorder.input([3]), [2, 3], [1])
    with pytest.raises(UserError, match="axis 0 is expanded; pass squeeze_expanded=True"):
        build.squeeze(recorder.program, x, [0])
    assert shape(recorder, recorder.add(build.squeeze, x, [0], True)) == "T3 f32[3]"
    y = recorder.add(build.expand, recorder.input([1, -1, 1]), [2, -1, 5])
    z = recorder.add(build.squeeze, y, [0], True)
    assert shape(recorder, z).endswith("f32[i0, 5]")
    with pytest.raises(UserError, match="axis 1 has size i0; only axes declared of size 1 can go"):
        build.squeeze(recorder.program, y, [1], True)


@pytest.mark.parametrize(
    ("sizes", "wanted", "result", "ops"),
    [
        ([1, 3], [2, -1], "2, 3", ["expand"]),
        ([1, 3], [2, 3], "2, 3", ["expand"]),
        ([1], [4, -1, 0], "", None),
        ([3], [2, 1, 3], "2, 1, 3", ["broadcast", "expand"]),
        ([3], [3], "3", []),
        ([-1], [7, -1], "7, i0", ["broadcast", "expand"]),
        ([-1], [7], "7", ["expand"]),
        ([], [2, 3], "2, 3", ["broadcast", "expand"]),
        ([1, 1], [1, -1], "1, 1", []),
    ],
)
def test_expand(sizes: list[int], wanted: list[int], result: str, ops: list[str] | None) -> None:
    recorder = Recorder()
    x = recorder.input(sizes)
    if ops is None:
        with pytest.raises(UserError, match="-1 keeps the size of an axis, and this one is new"):
            build.expand(recorder.program, x, wanted)
        return
    out = recorder.add(build.expand, x, wanted)
    assert shape(recorder, out) == f"{out} f32[{result}]"
    assert [line.split(" = ")[1].split("(")[0] for line in lines(recorder.program)] == ops


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([3], r"expand\(T0 f32\[1, 3\], shape=\[3\]\): got 1 sizes for 2 axes"),
        ([2, 4], "axis 1 has size 3; only size 1 expands to 4"),
        ([-2, 3], "size -2 is negative"),
    ],
)
def test_expand_refuses(wanted: list[int], message: str) -> None:
    recorder = Recorder()
    x = recorder.input([1, 3])
    with pytest.raises(UserError, match=message):
        build.expand(recorder.program, x, wanted)
