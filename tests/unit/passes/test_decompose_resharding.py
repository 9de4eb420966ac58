"""What moves, and why: programs as their expressions, one a line."""

from __future__ import annotations

import pytest

from golden_text import GoldenCheck
from meshfuse.base.dtypes import DataType
from meshfuse.facts.sharding import describe, sharding_of
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.printer import print_expr, print_program
from meshfuse.ir.program import Program
from meshfuse.ir.verify import verify
from meshfuse.passes.decompose_resharding import decompose_resharding
from meshfuse.passes.finalize_multidevice import finalize_multidevice
from meshfuse.passes.propagate_sharding import propagate_sharding
from program_recorder import Recorder

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
LINE, SQUARE = make_mesh(range(2)), make_mesh([[0, 1], [2, 3]])


def decomposed(recorder: Recorder) -> tuple[Program, list[str]]:
    """The program after both sharding passes, checked, and its notes."""
    program, _ = propagate_sharding(recorder.program)
    program, notes = decompose_resharding(program)
    verify(program)
    finalize_multidevice(program)
    return program, [str(note).removeprefix("decompose_resharding: ") for note in notes]


def lines(recorder: Recorder) -> list[str]:
    program, _ = decomposed(recorder)
    return [print_expr(expr) for expr in program.fusion.exprs]


def test_compute_on_blocks_then_gather() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    y = recorder.pointwise("relu", x)
    recorder.block(LINE, x, 0)
    recorder.replicate(LINE, y)
    program, notes = decomposed(recorder)
    assert [print_expr(expr) for expr in program.fusion.exprs] == [
        "T2 = relu(T0)",
        "T1 = all_gather(T2, mesh_x, 0)",
    ]
    assert notes == ["T1: all_gather [48 bytes]: T1 is computed where the operands of relu T1 lie"]
    assert program.schedule(y) == recorder.program.schedule(y)


def test_operands_that_lie_alike_stay_where_they_are() -> None:
    recorder = Recorder()
    x, y = recorder.input([4, 6]), recorder.input([4, 6])
    z = recorder.pointwise("add", x, y)
    recorder.block(LINE, x, 0)
    recorder.block(LINE, y, 0)
    recorder.replicate(LINE, z)
    assert lines(recorder) == ["T3 = add(T0, T1)", "T2 = all_gather(T3, mesh_x, 0)"]


def test_a_copy_is_a_communication_already() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    y = recorder.add(build.set_, x)
    z = recorder.add(build.set_, y)
    recorder.block(LINE, x, 0)
    recorder.block(LINE, y, 0)
    recorder.replicate(LINE, z)
    assert lines(recorder) == ["T1 = set(T0)", "T2 = all_gather(T1, mesh_x, 0)"]


def test_replicated_to_sharded_is_free_and_comes_before_the_work() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    y = recorder.pointwise("relu", x)
    recorder.replicate(LINE, x)
    recorder.block(LINE, y, 1)
    program, notes = decomposed(recorder)
    assert [print_expr(expr) for expr in program.fusion.exprs] == [
        "T2 = local_slice(T0, mesh_x, 1)",
        "T1 = relu(T2)",
    ]
    assert notes == ["T2: local_slice: T0 is needed sharded by relu T1"]


def test_an_operand_is_moved_once_for_all_who_need_it() -> None:
    recorder = Recorder()
    x, q, k = recorder.input([4, 6]), recorder.input([8, 6]), recorder.input([10, 6])
    recorder.add(build.linear, x, q)
    recorder.add(build.linear, x, k)
    recorder.block(LINE, x, 0)
    recorder.block(LINE, q, 0)
    recorder.block(LINE, k, 0)
    assert lines(recorder) == [
        "T5 = all_gather(T0, mesh_x, 0)",
        "T3 = linear(T5, T1)",
        "T4 = linear(T5, T2)",
    ]


def test_all_reduce_over_a_whole_and_over_a_split_axis() -> None:
    for shape in ([2, 6], [4, 6]):
        recorder = Recorder()
        x = recorder.input(shape)
        y = recorder.add(build.reduction, "max", x, [0])
        recorder.block(LINE, x, 0)
        program, notes = decomposed(recorder)
        assert [print_expr(expr) for expr in program.fusion.exprs] == [
            "T2 = max(T0, [0])",
            'T1 = all_reduce(T2, mesh_x, function="max")',
        ]
        local = describe(sharding_of(program, TensorName("T2")))
        assert local == "[6] on DeviceMesh{0 1}, partial max over mesh_x"
        assert notes == [
            "T1: all_reduce [24 bytes]: max T1 reduces an axis that is sharded over mesh_x"
        ]
        assert program.tensor(y) == recorder.program.tensor(y)


def test_reduce_scatter() -> None:
    recorder = Recorder()
    x, weight = recorder.input([4, 8]), recorder.input([6, 8])
    y = recorder.add(build.linear, x, weight)
    recorder.block(LINE, x, 1)
    recorder.block(LINE, weight, 1)
    recorder.block(LINE, y, 0)
    assert lines(recorder) == ["T3 = linear(T0, T1)", "T2 = reduce_scatter(T3, mesh_x, 0)"]


def test_a_replicated_factor_of_a_sharded_contraction_is_sliced() -> None:
    recorder = Recorder()
    x, weight = recorder.input([4, 8]), recorder.input([6, 8])
    recorder.add(build.linear, x, weight)
    recorder.block(LINE, x, 1)
    recorder.replicate(LINE, weight)
    assert lines(recorder) == [
        "T3 = local_slice(T1, mesh_x, 1)",
        "T4 = linear(T0, T3)",
        "T2 = all_reduce(T4, mesh_x)",
    ]


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.BFloat16])
def test_the_bias_is_added_once(dtype: DataType) -> None:
    recorder = Recorder()
    x, weight = recorder.input([3, 4, 8], dtype), recorder.input([6, 8], dtype)
    y = recorder.add(build.linear, x, weight, recorder.input([6], dtype))
    recorder.block(LINE, x, 2)
    recorder.block(LINE, weight, 1)
    program, _ = decomposed(recorder)
    texts = [print_expr(expr) for expr in program.fusion.exprs]
    assert texts[1:3] == ["T4 = all_reduce(" + texts[0][:2] + ", mesh_x)", texts[2]]
    assert texts[2] == "T5 = broadcast(T2, [true, true, false])"
    if dtype is DataType.Float:
        assert texts[3:] == ["T3 = add(T4, T5)"]
    else:
        assert texts[3:] == ["T6 = add(T4, T5)", "T3 = cast(T6)"]
    assert program.tensor(y).dtype is dtype


def test_a_bias_follows_a_scattered_result() -> None:
    recorder = Recorder()
    x, weight, bias = recorder.input([4, 8]), recorder.input([6, 8]), recorder.input([6])
    y = recorder.add(build.linear, x, weight, bias)
    recorder.block(LINE, x, 1)
    recorder.block(LINE, weight, 1)
    recorder.block(LINE, y, 1)
    assert lines(recorder) == [
        "T6 = linear(T0, T1)",
        "T4 = reduce_scatter(T6, mesh_x, 1)",
        "T7 = local_slice(T2, mesh_x, 0)",
        "T5 = broadcast(T7, [true, false])",
        "T3 = add(T4, T5)",
    ]


def test_reductions_over_two_mesh_axes_and_a_local_one_are_chained() -> None:
    recorder = Recorder()
    x = recorder.input([4, 3, 6])
    recorder.add(build.reduction, "sum", x)
    recorder.block(SQUARE, x, 0, Y)
    recorder.block(SQUARE, x, 3, X)
    assert lines(recorder) == [
        "T2 = sum(T0, [0, 1, 2])",
        "T3 = all_reduce(T2, mesh_y)",
        "T1 = all_reduce(T3, mesh_x)",
    ]


def test_a_mesh_axis_that_changes_its_tensor_axis_is_an_exchange() -> None:
    recorder = Recorder()
    x, y = recorder.input([4, 6]), recorder.input([4, 6])
    recorder.pointwise("add", x, y)
    recorder.block(LINE, x, 0)
    recorder.block(LINE, y, 1)
    assert lines(recorder) == ["T3 = exchange(T1)", "T2 = add(T0, T3)"]


def test_nothing_moves_on_one_rank() -> None:
    recorder = Recorder()
    x, weight = recorder.input([-1, 8]), recorder.input([6, 8])
    y = recorder.pointwise("relu", recorder.add(build.linear, x, weight))
    one = make_mesh([3])
    recorder.block(one, x, 1)
    recorder.block(one, weight, 1)
    recorder.block(one, y, 0)
    assert lines(recorder) == ["T2 = linear(T0, T1)", "T3 = relu(T2)"]


def test_statistics_over_a_whole_axis_stay_local() -> None:
    recorder = Recorder()
    x = recorder.input([1, 4, 6])
    variance, _ = recorder.add(build.var_mean, x, [2], correction=0)
    recorder.block(LINE, x, 1)
    program, notes = decomposed(recorder)
    assert notes == []
    assert describe(sharding_of(program, variance)).startswith("[1, mesh_x{2} 2] on")


def test_moments_over_a_sharded_axis_are_gathered_and_combined() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    recorder.add(build.welford, x, [1])
    recorder.block(LINE, x, 1)
    program, _ = decomposed(recorder)
    assert [print_expr(expr) for expr in program.fusion.exprs] == [
        "T4, T5, T6 = welford(T0, [1])",
        "T7 = terms(T4, 2)",
        "T8 = terms(T5, 2)",
        "T9 = terms(T6, 2)",
        "T10 = all_gather(T7, mesh_x, 1)",
        "T11 = all_gather(T8, mesh_x, 1)",
        "T1, T2, T3 = welford(T10, [1], src_m2=T11, src_count=T9)",
    ]
    names = ("T4", "T7", "T10", "T9")
    terms = [describe(sharding_of(program, TensorName(name))) for name in names]
    on = "on DeviceMesh{0 1}"
    assert terms == [
        f"[4] {on}, partial moments over mesh_x",
        f"[4, mesh_x{{2}}] {on}",
        f"[4, 2] {on}",
        f"[4, 2] {on}",
    ]


def test_a_cyclic_tensor_is_gathered() -> None:
    recorder = Recorder()
    x = recorder.input([8])
    recorder.replicate(LINE, x, recorder.add(build.set_, x))
    recorder.program = transforms.split(recorder.program, x, 0, 2)
    recorder.bind(x, 1, X)
    assert lines(recorder) == ["T1 = all_gather(T0, mesh_x, 0)"]


def test_an_operand_on_another_mesh_is_exchanged() -> None:
    recorder = Recorder()
    x = recorder.input([8])
    y = recorder.pointwise("relu", x)
    recorder.block(LINE, x, 0)
    recorder.replicate(make_mesh([2, 3]), y)
    program, notes = decomposed(recorder)
    assert [print_expr(expr) for expr in program.fusion.exprs] == [
        "T2 = exchange(T0)",
        "T1 = relu(T2)",
    ]
    (note,) = notes
    assert note.startswith("T2: exchange [32 bytes]: T0 lies on DeviceMesh{0 1}, and relu T1 is")
    assert note.endswith("computed on DeviceMesh{2 3}")


def test_a_reduction_is_done_on_the_mesh_of_its_operand() -> None:
    """Only the sums go to the other mesh."""
    recorder = Recorder()
    x = recorder.input([8, 2])
    total = recorder.add(build.reduction, "sum", x, [0])
    recorder.block(LINE, x, 0)
    recorder.replicate(make_mesh([2, 3]), total)
    assert lines(recorder) == [
        "T2 = sum(T0, [0])",
        "T3 = reduce_scatter(T2, mesh_x, 0)",
        "T1 = exchange(T3)",
    ]


# Where to compute, and what to read.


@pytest.mark.parametrize(("rows", "gathers_first"), [(16, False), (2, True)])
def test_the_smaller_of_operand_and_result_is_gathered(rows: int, gathers_first: bool) -> None:
    """x [4, 8] by w [rows, 8]: the result has `rows` columns."""
    recorder = Recorder()
    x, weight = recorder.input([4, 8]), recorder.input([rows, 8])
    y = recorder.add(build.linear, x, weight)
    recorder.block(LINE, x, 0)
    recorder.replicate(LINE, weight, y)
    first = lines(recorder)[0]
    assert first.startswith("T3 = all_gather(T0" if not gathers_first else "T3 = linear(T0")


def test_a_tensor_that_is_gathered_and_sliced_again_stays() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    whole = recorder.add(build.set_, x)
    y = recorder.pointwise("relu", whole)
    recorder.output(y)
    recorder.block(LINE, x, 0)
    recorder.replicate(LINE, whole)
    recorder.block(LINE, y, 0)
    program, notes = decomposed(recorder)
    assert [print_expr(expr) for expr in program.fusion.exprs] == ["T2 = relu(T0)"]
    assert notes == ["T1: not_moved: what reads it takes its parts from T0"]


def test_what_was_gathered_for_one_reader_is_sliced_for_another() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    whole = recorder.add(build.set_, x)
    y = recorder.pointwise("relu", whole)
    recorder.output(whole, y)
    recorder.block(LINE, x, 0)
    recorder.replicate(LINE, whole)
    recorder.block(LINE, y, 1)
    assert lines(recorder) == [
        "T1 = all_gather(T0, mesh_x, 0)",
        "T3 = local_slice(T1, mesh_x, 1)",
        "T2 = relu(T3)",
    ]


# Reductions that wait.


def product(recorder: Recorder, rows: int = 4, dtype: DataType = DataType.Float) -> TensorName:
    """A [rows, 6] product that every rank has a term of."""
    x, weight = recorder.input([rows, 8], dtype), recorder.input([6, 8], dtype)
    recorder.block(LINE, x, 1)
    recorder.block(LINE, weight, 1)
    return recorder.add(build.linear, x, weight)


def test_two_products_are_added_before_they_are_reduced() -> None:
    recorder = Recorder()
    left, right = product(recorder), product(recorder)
    recorder.output(recorder.pointwise("sub", left, recorder.pointwise("neg", right)))
    program, notes = decomposed(recorder)
    assert [print_expr(expr) for expr in program.fusion.exprs] == [
        "T8 = linear(T0, T1)",
        "T9 = linear(T3, T4)",
        "T10 = neg(T9)",
        "T11 = sub(T8, T10)",
        "T7 = all_reduce(T11, mesh_x)",
    ]
    assert notes == [
        "defer_reductions: T7: all_reduce [96 bytes]: done behind T6 = neg(T5), T7 = sub(T2, T6), "
        "which saves 96 of 192 bytes"
    ]


def test_a_product_is_summed_before_it_is_reduced() -> None:
    recorder = Recorder()
    scaled = recorder.pointwise("mul", product(recorder), build.literal(2.0))
    recorder.output(recorder.add(build.reduction, "sum", scaled, [0]))
    assert lines(recorder)[-3:] == [
        "T6 = mul(T5, 2.0)",
        "T7 = sum(T6, [0])",
        "T4 = all_reduce(T7, mesh_x)",
    ]


def test_scattered_products_are_added_before() -> None:
    recorder = Recorder()
    left, right = product(recorder), product(recorder)
    total = recorder.pointwise("add", left, right)
    recorder.output(total)
    for tensor in (left, right, total):
        recorder.block(LINE, tensor, 0)
    assert lines(recorder)[-2:] == ["T9 = add(T7, T8)", "T6 = reduce_scatter(T9, mesh_x, 0)"]


@pytest.mark.parametrize("case", ["output", "read_twice", "not_linear", "narrowed", "max"])
def test_a_reduction_that_does_not_wait(case: str) -> None:
    recorder = Recorder()
    dtype = DataType.Float
    left, right = product(recorder), product(recorder)
    match case:
        case "output":
            recorder.output(left)
        case "read_twice":
            recorder.output(recorder.pointwise("exp", left))
        case "not_linear":
            left = recorder.pointwise("relu", left)
        case "narrowed":
            dtype = DataType.BFloat16
            left, right = (recorder.add(build.cast, each, dtype) for each in (left, right))
        case _:
            left = recorder.add(build.reduction, "max", left, [0])
            right = recorder.add(build.reduction, "max", right, [0])
    recorder.output(recorder.pointwise("add", left, right))
    assert sum("all_reduce" in line for line in lines(recorder)) == 2


def test_golden(golden: GoldenCheck) -> None:
    recorder = Recorder()
    x, weight = recorder.input([-1, 8]), recorder.input([6, 8])
    y = recorder.add(build.linear, x, weight, recorder.input([6]))
    recorder.output(y)
    recorder.block(LINE, x, 1)
    recorder.block(LINE, weight, 1)
    program, _ = decomposed(recorder)
    golden("decompose_resharding", print_program(program))
