"""Pieces of passes: copies of tensors, renamed and replaced expressions, parts of a Program."""

from __future__ import annotations

import pytest

from meshfuse.base.dtypes import DataType
from meshfuse.expr import const, symbol
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import AxisKind, ScalarName, TensorName
from meshfuse.ir.comm import AllReduce
from meshfuse.ir.describe import describe
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.ops import Expr, Linear, Pointwise, Set, Welford
from meshfuse.ir.parser import parse_program
from meshfuse.ir.printer import print_expr, print_program
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import (
    append,
    copy_tensor,
    extract,
    map_names,
    new_tensor,
    redirect_uses,
    remove_dead,
    replace_expr,
    substitute_extents,
)
from meshfuse.ir.verify import verify
from program_recorder import Recorder

X = ParallelType.mesh_x
T0, T1, T2, T3, T4, T9 = (TensorName(f"T{k}") for k in (0, 1, 2, 3, 4, 9))
C0, C1 = ScalarName("c0"), ScalarName("c1")


def lines(program: Program) -> list[str]:
    return [print_expr(expr) for expr in program.fusion.exprs]


# Tensors.


def test_new_tensor() -> None:
    axes = [(AxisKind.iteration, symbol("i0")), (AxisKind.partial, const(2))]
    program, tensor = new_tensor(Program(), DataType.Half, axes)
    assert describe(program, tensor) == "T0 f16[i0]"
    assert [str(axis) for axis in program.tensor(tensor).logical] == ["a0:i{i0}", "a1:p{2}"]
    assert program.schedule(tensor).leaves == ("a0", "a1")


def test_a_copy_has_the_sharding_but_not_the_reduced_axes() -> None:
    recorder = Recorder()
    mesh = make_mesh([0, 1])
    total = recorder.add(build.reduction, "sum", recorder.input([4, 6]), [0])
    recorder.block(mesh, total, 1)
    recorder.block(mesh, total, 0)
    program, copy = copy_tensor(recorder.program, total, dtype=DataType.Half)
    assert describe(program, copy) == "T2 f16[6]"
    schedule = program.schedule(copy)
    assert len(schedule.leaves) == 2
    assert schedule.bindings == {schedule.leaves[0]: X}
    assert schedule.mesh == mesh
    assert [str(axis) for axis in program.leaf_domains(copy)] == ["a9:i{2}", "a10:i{3}"]


def test_a_copy_replays_splits_of_splits_and_merges() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6, 5])
    program = transforms.merge(recorder.program, x, 0, 1)
    program = transforms.split(program, x, 0, 3)
    program = transforms.split(program, x, 0, 2)
    program = transforms.reorder(program, x, {0: 3})
    program, copy = copy_tensor(program, x)
    program = append(program, Set(copy, x))
    verify(program)
    extents = [[str(axis.extent) for axis in program.leaf_domains(t)] for t in (x, copy)]
    assert extents[0] == extents[1] == ["2", "3", "5", "4"]


# Expressions.


@pytest.mark.parametrize(
    ("expr", "wanted"),
    [
        (Pointwise(T1, "add", (T0, T0)), "T1 = add(T9, T9)"),
        (Pointwise(C1, "mul", (C0, symbol("c0") + 1)), "c1 = mul(c7, (c7 + 1))"),
        (Welford(T1, T2, T3, T0, (0,)), "T1, T2, T3 = welford(T9, [0])"),
        (Linear(T1, T2, T3, T0), "T1 = linear(T2, T3, bias=T9)"),
        (Linear(T0, T2, T3), "T9 = linear(T2, T3)"),
        (AllReduce(T1, T0, X), "T1 = all_reduce(T9, mesh_x)"),
    ],
)
def test_map_names(expr: Expr, wanted: str) -> None:
    assert print_expr(map_names(expr, {T0: T9, C0: ScalarName("c7")})) == wanted


def chain() -> Program:
    """T0 -> T1 -> T2 -> T3, T1 and T3 outputs."""
    recorder = Recorder()
    x = recorder.input([4])
    first = recorder.pointwise("neg", x)
    second = recorder.pointwise("exp", first)
    third = recorder.pointwise("mul", second, first)
    recorder.output(first, third)
    return recorder.program


def test_replace_expr() -> None:
    program = chain()
    middle = program.fusion.exprs[1]
    program, copy = copy_tensor(program, T1)
    parts = (Set(copy, T1), map_names(middle, {T1: copy}))
    program = replace_expr(program, middle, parts)
    assert lines(program) == ["T1 = neg(T0)", "T4 = set(T1)", "T2 = exp(T4)", "T3 = mul(T2, T1)"]
    verify(program)


def test_redirect_uses() -> None:
    program, copy = copy_tensor(chain(), T1)
    program = replace_expr(
        program, program.fusion.exprs[0], (program.fusion.exprs[0], Set(copy, T1))
    )
    some = redirect_uses(program, T1, copy, exprs=[program.fusion.exprs[2]])
    assert lines(some)[1:] == ["T4 = set(T1)", "T2 = exp(T4)", "T3 = mul(T2, T1)"]
    assert [output.tensor for output in some.fusion.outputs] == [T1, T3]
    everything = redirect_uses(program, T1, copy)
    assert lines(everything)[1:] == ["T4 = set(T1)", "T2 = exp(T4)", "T3 = mul(T2, T4)"]
    assert [output.tensor for output in everything.fusion.outputs] == [T4, T3]
    verify(some)
    verify(everything)


# Parts.


def test_extract_the_middle() -> None:
    program = chain()
    part = extract(program, program.fusion.exprs[1:2])
    assert lines(part) == ["T2 = exp(T1)"]
    assert part.fusion.inputs == (T1,)
    assert [output.tensor for output in part.fusion.outputs] == [T2]
    assert set(part.fusion.tensors) == set(part.schedules) == {T1, T2}
    verify(part)


def test_extract_gives_what_is_read_outside_or_returned() -> None:
    program = chain()
    first = extract(program, program.fusion.exprs[:1])
    assert [output.tensor for output in first.fusion.outputs] == [T1]
    last = extract(program, program.fusion.exprs[1:])
    assert last.fusion.inputs == (T1,)
    assert [output.tensor for output in last.fusion.outputs] == [T3]


def test_extract_leaves_aliases_to_the_whole() -> None:
    recorder = Recorder()
    x = recorder.input([4])
    y = recorder.pointwise("neg", x)
    program = build.add_output(recorder.program, y, alias=x)
    part = extract(program, program.fusion.exprs)
    assert [(output.tensor, output.alias) for output in part.fusion.outputs] == [(y, None)]


def test_remove_dead() -> None:
    recorder = Recorder()
    x, unused = recorder.input([4]), recorder.input([5])
    y = recorder.pointwise("neg", x)
    recorder.pointwise("exp", y)
    recorder.pointwise("add", unused, unused)
    recorder.output(y)
    program = remove_dead(recorder.program)
    assert lines(program) == ["T2 = neg(T0)"]
    assert set(program.fusion.tensors) == {x, unused, y}
    verify(program)


def test_an_expression_lives_as_long_as_one_of_its_results() -> None:
    recorder = Recorder()
    x = recorder.input([4])
    recorder.program, _, mean = build.var_mean(recorder.program, x, [0])
    recorder.output(mean)
    program = remove_dead(recorder.program)
    assert lines(program) == ["T1, T2, T3 = welford(T0, [0])"]
    verify(program)


def test_a_scalar_lives_as_long_as_its_symbol_is_a_size_or_an_operand() -> None:
    text = """
program() {
  T0 = tensor(f32, [a0:i{4}])
  T1 = tensor(f32, [a1:b{1}, a2:i{4}])
  T2 = tensor(f32, [a3:i{c1 + 1}, a4:i{4}])
  T3 = tensor(f32, [a5:i{c1 + 1}, a6:i{4}])
  c0 = scalar(i64)
  c1 = scalar(i64)
  c2 = scalar(i64)
  c3 = scalar(i64)
  input(T0, c0)
  c1 = add(c0, 1)
  c2 = mul(c0, 2)
  c3 = neg(c0)
  T1 = broadcast(T0, [true, false])
  T2 = expand(T1)
  T3 = add(T2, (c2 + 3))
  output(T3)
}"""
    program = parse_program(text)
    verify(program)
    assert [line.split()[0] for line in lines(remove_dead(program))] == [
        "c1", "c2", "T1", "T2", "T3"
    ]  # fmt: skip
    assert set(remove_dead(program).fusion.scalars) == {"c0", "c1", "c2"}


def test_substitute_extents() -> None:
    recorder = Recorder()
    x, y = recorder.input([-1, 4]), recorder.input([-1, 4])
    z = recorder.pointwise("add", x, y)
    recorder.program, variance, _ = build.var_mean(recorder.program, z, [0])
    recorder.output(variance)
    program = transforms.split(recorder.program, y, 0, 2)
    program = substitute_extents(program, {symbol("i1"): symbol("i0"), symbol("i0"): const(6)})
    text = print_program(program)
    assert "i0}" in text  # replacements are not searched again
    assert "T4 = tensor(f32, [a8:r{6}, a9:i{4}])" in text
    assert "div(T4, (5))" in text
    verify(program)
