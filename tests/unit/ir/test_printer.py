"""Programs as text that parses back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from golden_text import GoldenCheck
from meshfuse.base.cursor import Cursor
from meshfuse.base.dtypes import DataType
from meshfuse.base.text import TextError
from meshfuse.expr import const, symbol
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, TensorName
from meshfuse.ir.comm import AllGather, AllReduce, Exchange, LocalSlice, ReduceScatter
from meshfuse.ir.mesh import DeviceMesh, ParallelType, make_mesh
from meshfuse.ir.ops import Expr, Linear, Literal, Operand, Pointwise
from meshfuse.ir.parser import parse_program
from meshfuse.ir.printer import EXPR_STATEMENTS, IR_CODECS, PROGRAM_GRAMMAR, print_program
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import add_tensor, remove_dead
from meshfuse.ir.schedule import MemoryType, Merge, Split
from meshfuse.ir.verify import verify
from op_coverage import concrete_classes
from program_recorder import Recorder

T0, T1, T2 = TensorName("T0"), TensorName("T1"), TensorName("T2")
X = ParallelType.mesh_x


def round_trip(program: Program) -> str:
    text = print_program(program)
    assert parse_program(text) == program
    return text


def every_op() -> Program:
    """Each verb of build.py once."""
    recorder = Recorder()
    x, w, b = recorder.input([-1, 1, 64]), recorder.input([32, 64]), recorder.input([32])
    scalar = recorder.add(build.define_scalar, DataType.Double)
    recorder.program = build.add_input(recorder.program, scalar)
    y = recorder.add(build.linear, x, w, b)
    flat = recorder.add(build.squeeze, y, [1])
    recorder.program, variance, mean = build.var_mean(recorder.program, flat, [1], keepdim=True)
    scaled = recorder.pointwise("mul", scalar, build.literal(0.5))
    z = recorder.pointwise("add", recorder.pointwise("sub", flat, mean), scaled)
    z = recorder.pointwise("mul", z, recorder.pointwise("rsqrt", variance))
    positive = recorder.pointwise("lt", build.literal(0), z)
    z = recorder.pointwise("where", positive, z, build.literal(-math.inf))
    half = recorder.add(build.cast, z, DataType.Half)
    turned = recorder.add(build.permute, half, [1, 0])
    product = recorder.add(build.matmul, half, turned)
    wide = recorder.add(build.broadcast_in_dim, b, [5, 32], [1])
    recorder.output(product, recorder.add(build.reduction, "max", wide, [0]))
    updated = recorder.pointwise("exp", b)
    recorder.program = build.add_output(recorder.program, updated, alias=b)
    recorder.output(recorder.add(build.set_, b))
    return recorder.program


def scheduled() -> Program:
    """A row-parallel linear with a reduce-scatter, on a named mesh."""
    recorder = Recorder()
    mesh = make_mesh([[0, 1], [2, 3]], ["dp", "tensor parallel"])
    x, w = recorder.input([-1, 8]), recorder.input([6, 8])
    y = recorder.add(build.linear, x, w)
    recorder.output(y)
    for tensor, axis in ((x, 1), (w, 1), (y, 2), (y, 0)):
        recorder.block(mesh, tensor, axis)
    program = transforms.reorder(recorder.program, y, {0: 2})
    leaves = program.schedule(y).leaves
    program = transforms.set_allocation_domain(program, y, leaves, [False, True, None, None, None])
    return transforms.merge(program, w, 0, 2)


def test_every_op(golden: GoldenCheck) -> None:
    verify(every_op())
    golden("program_every_op", round_trip(every_op()))


def test_a_scheduled_program(golden: GoldenCheck) -> None:
    verify(scheduled())
    golden("program_scheduled", round_trip(scheduled()))


def test_an_empty_program() -> None:
    assert round_trip(Program()) == "program() {\n}"


def test_serials_stand_in_the_text_where_names_do_not_tell() -> None:
    recorder = Recorder()
    x = recorder.input([-1])
    recorder.pointwise("exp", x)
    recorder.output(recorder.pointwise("neg", x))
    assert round_trip(recorder.program).startswith("program() {")
    program = recorder.program
    without = replace(program, fusion=replace(program.fusion, exprs=(), outputs=()))
    text = round_trip(remove_dead(without))
    assert text.startswith("program(serials={i: 1, T: 3, a: 3}) {")


def test_root_axes_steps_and_all_fields_of_a_schedule() -> None:
    recorder = Recorder()
    y = recorder.add(build.reduction, "sum", recorder.input([8, 6]), [0])
    program = recorder.program
    definition, schedule = program.tensor(y), program.schedule(y)
    reduced, kept = definition.logical
    outer, inner, whole = AxisName("a4"), AxisName("a5"), AxisName("a6")
    definition = replace(
        definition,
        root=definition.logical,
        root_steps=(Split(reduced.name, outer, inner, const(2), False),),
        logical=(
            IterDomain(outer, AxisKind.partial, const(2)),
            IterDomain(inner, AxisKind.reduction, const(4)),
            kept,
        ),
        is_cpu=True,
    )
    schedule = replace(
        schedule,
        leaves=(outer, whole),
        steps=(Merge(inner, kept.name, whole),),
        bindings={outer: X, whole: ParallelType.grid_x},
        memory=MemoryType.shared,
        inline_depth=1,
        stages=3,
    )
    text = round_trip(add_tensor(program, y, definition, schedule))
    assert (
        "  T1 = tensor(f32, [a4:p{2}, a5:r{4}, a3:i{6}], root=[a2:r{8}, a3:i{6}], "
        "root_steps=[Split(a2, a4, a5, 2, false)], is_cpu=true)\n"
        "  schedule(T1, [a4, a6], steps=[Merge(a5, a3, a6)], bindings={a4: mesh_x, a6: grid_x}, "
        "memory=shared, inline_depth=1, stages=3)\n"
    ) in text


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (AllGather(T1, T0, X, 1), "T1 = all_gather(T0, mesh_x, 1)"),
        (AllReduce(T1, T0, X), "T1 = all_reduce(T0, mesh_x)"),
        (AllReduce(T1, T0, X, "max"), 'T1 = all_reduce(T0, mesh_x, function="max")'),
        (ReduceScatter(T1, T0, X, 0), "T1 = reduce_scatter(T0, mesh_x, 0)"),
        (LocalSlice(T1, T0, ParallelType.mesh(3), 0), "T1 = local_slice(T0, mesh_3, 0)"),
        (Exchange(T1, T0), "T1 = exchange(T0)"),
        (Linear(T2, T0, T1, T0), "T2 = linear(T0, T1, bias=T0)"),
        (
            Pointwise(T2, "add", (T0, symbol("i0") * 2 - 1)),
            "T2 = add(T0, (2*i0 - 1))",
        ),
    ],
)
def test_expressions(expr: Expr, text: str) -> None:
    assert PROGRAM_GRAMMAR.print(expr) == text
    assert PROGRAM_GRAMMAR.parse(text) == expr


@pytest.mark.parametrize(
    ("operand", "text"),
    [
        (T0, "T0"),
        (const(5), "(5)"),
        (symbol("i0") + 1, "(i0 + 1)"),
        (Literal(2, DataType.Int), "2"),
        (Literal(-2, DataType.Int), "-2"),
        (Literal(2, DataType.Int32), "2:i32"),
        (Literal(2.0, DataType.Double), "2.0"),
        (Literal(1e30, DataType.Float), "1e+30:f32"),
        (Literal(True, DataType.Bool), "true"),
        (Literal(False, DataType.Bool), "false"),
        (Literal(math.inf, DataType.Double), "inf"),
        (Literal(-math.inf, DataType.BFloat16), "-inf:bf16"),
    ],
)
def test_operands(operand: Operand, text: str) -> None:
    assert PROGRAM_GRAMMAR.render(operand, Operand) == text
    assert PROGRAM_GRAMMAR.parse_value(text, Operand) == operand


def test_a_nan_operand() -> None:
    operand = build.literal(math.nan, DataType.Float)
    text = PROGRAM_GRAMMAR.render(operand, Operand)
    assert text == "nan:f32"
    parsed = PROGRAM_GRAMMAR.parse_value(text, Operand)
    assert math.isnan(parsed.value)
    assert parsed.dtype is DataType.Float


@pytest.mark.parametrize(
    ("devices", "names", "text"),
    [
        ([0], (), "DeviceMesh{0}"),
        ([3, 1], (), "DeviceMesh{3 1}"),
        ([[3], [1]], (), "DeviceMesh{{3} {1}}"),
        ([[[0, 1]], [[2, 3]]], (), "DeviceMesh{{{0 1}} {{2 3}}}"),
        ([[0, 1]], ("dp", 'a "b"'), r'DeviceMesh("dp", "a \"b\""){{0 1}}'),
        ([[0, 1]], ("", "tp"), 'DeviceMesh("", "tp"){{0 1}}'),
    ],
)
def test_meshes(devices: object, names: tuple[str, ...], text: str) -> None:
    mesh = make_mesh(devices, names)
    assert PROGRAM_GRAMMAR.render(mesh, DeviceMesh) == text
    assert PROGRAM_GRAMMAR.parse_value(text, DeviceMesh) == mesh


def test_every_expression_has_a_statement() -> None:
    assert set(EXPR_STATEMENTS) == set(concrete_classes(Expr))
    assert {Literal, DeviceMesh, ParallelType, IterDomain} < set(IR_CODECS)


@pytest.mark.parametrize(
    "mesh",
    [
        make_mesh([[*range(8 * k, 8 * k + 8)] for k in range(8)], ["dp", "tp"]),
        make_mesh(range(7, 47)),
        make_mesh(range(46, 6, -1)),
    ],
)
def test_large_meshes_parse_back(mesh: DeviceMesh) -> None:
    codec = IR_CODECS[DeviceMesh]
    assert codec.parse(Cursor(codec.render(mesh))) == mesh


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("T0 = tensor(f33, [])", "line 2, column 15: expected one of f64, f32"),
        ("T0 = tensor(f32, [a0:x{4}])", "column 24: expected one of i, b, r, p, found 'x{4}])'"),
        ("T0 = tensor(f32, [a0:i{4 +}])", "column 26: expected an expression"),
        ("T0 = tensor(f32, [a0:i 4])", "column 26: expected '{'"),
        ("schedule(T0, [a0], bindings={a0: mesh_w})", "column 36: expected a parallel type, one"),
        ("schedule(T0, [a0], mesh=DeviceMesh{0 x})", "column 40: expected an integer"),
        (
            "schedule(T0, [a0], mesh=DeviceMesh{0 0})",
            "column 27: expected a mesh (DeviceMesh([0, 0]): each",
        ),
        ("T0 = neg(2.0:f33)", "column 16: expected one of f64"),
        ("T0 = power(T1)", "column 8: expected an op, one of abs, add,"),
    ],
)
def test_errors_say_where(line: str, message: str) -> None:
    with pytest.raises(TextError) as caught:
        parse_program(f"program() {{\n  {line}\n}}")
    assert message in str(caught.value)


def test_a_text_that_is_no_program() -> None:
    with pytest.raises(TextError, match=r"line 1, column 1: expected program\(\), found 'T1 = neg"):
        parse_program("T1 = neg(T0)")
