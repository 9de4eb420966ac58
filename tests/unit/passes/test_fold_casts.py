"""Casts of casts."""

from __future__ import annotations

import pytest

from golden_text import GoldenCheck
from meshfuse.base.dtypes import DataType
from meshfuse.ir import build
from meshfuse.ir.mesh import make_mesh
from meshfuse.ir.printer import print_expr, print_program
from meshfuse.passes.fold_casts import fold_casts, holds, remove_unread
from program_recorder import Recorder


def folded(recorder: Recorder) -> list[str]:
    program, _ = remove_unread(fold_casts(recorder.program)[0])
    return [print_expr(expr) for expr in program.fusion.exprs]


def casts(*dtypes: DataType) -> Recorder:
    """An input of the first type, cast to each of the others in turn."""
    recorder = Recorder()
    tensor = recorder.input([4], dtypes[0])
    for dtype in dtypes[1:]:
        tensor = recorder.add(build.cast, tensor, dtype)
    recorder.output(recorder.pointwise("neg", tensor))
    return recorder


def test_a_widening_on_the_way_is_skipped() -> None:
    recorder = casts(DataType.BFloat16, DataType.Float, DataType.Double, DataType.Half)
    assert folded(recorder)[0] == "T3 = cast(T0)"


def test_there_and_back_is_nothing() -> None:
    assert folded(casts(DataType.Half, DataType.Float, DataType.Half)) == ["T3 = neg(T0)"]


def test_a_narrowing_stays() -> None:
    recorder = casts(DataType.Float, DataType.BFloat16, DataType.Float)
    assert folded(recorder)[:2] == ["T1 = cast(T0)", "T2 = cast(T1)"]


def test_a_cast_that_the_user_placed_stays() -> None:
    recorder = casts(DataType.Half, DataType.Float, DataType.Half)
    recorder.replicate(make_mesh([0]), recorder.program.fusion.exprs[0].outs[0])  # type: ignore[arg-type]  # a tensor
    assert folded(recorder)[:2] == ["T1 = cast(T0)", "T2 = cast(T1)"]


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        (DataType.Bool, DataType.Half, True),
        (DataType.Int32, DataType.Double, True),
        (DataType.Int32, DataType.Float, False),
        (DataType.Int, DataType.Double, False),
        (DataType.BFloat16, DataType.Half, False),
        (DataType.Double, DataType.Double, True),
    ],
)
def test_which_types_hold_which(inner: DataType, outer: DataType, expected: bool) -> None:
    assert holds(inner, outer) is expected


def test_golden(golden: GoldenCheck) -> None:
    program, _ = fold_casts(casts(DataType.BFloat16, DataType.Float, DataType.Half).program)
    golden("fold_casts", print_program(program))
