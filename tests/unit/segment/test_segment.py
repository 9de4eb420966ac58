"""Segments as `scheduler: expressions`, with stand-in schedulers."""

from __future__ import annotations

import time

from golden_text import GoldenCheck
from meshfuse.base.dtypes import DataType
from meshfuse.facts.refusal import Refusal
from meshfuse.ir import build
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import AllGather
from meshfuse.ir.mesh import make_mesh
from meshfuse.ir.ops import Pointwise, Reduction
from meshfuse.ir.printer import print_expr, print_program
from meshfuse.ir.program import Program
from meshfuse.ir.verify import verify
from meshfuse.passes.pipeline import run_passes
from meshfuse.segment.segment import Answer, segment
from meshfuse.segment.segments import SegmentedProgram
from program_recorder import Recorder

LINE = make_mesh(range(2))


def pointwise_only(program: Program) -> Answer:
    if all(isinstance(expr, Pointwise) for expr in program.fusion.exprs):
        return "pointwise"
    return Refusal("pointwise", "only pointwise expressions")


def one_reduction(program: Program) -> Answer:
    """Any number of pointwise expressions, at most one reduction."""
    reductions = sum(isinstance(expr, Reduction) for expr in program.fusion.exprs)
    if reductions > 1:
        refusals = [
            Refusal(name, f"{reductions} reductions") for name in ("pointwise", "reduction")
        ]
        return tuple(refusals)
    return "reduction" if reductions else "pointwise"


def texts(segmented: SegmentedProgram) -> list[str]:
    for part in segmented.segments:
        verify(part.program)
    return [
        f"{part.scheduler}: " + "; ".join(map(print_expr, part.program.fusion.exprs))
        for part in segmented.segments
    ]


def test_what_is_accepted_whole_is_one_segment_and_asked_about_once() -> None:
    asked: list[Program] = []

    def count(program: Program) -> Answer:
        asked.append(program)
        return pointwise_only(program)

    recorder = Recorder()
    x = recorder.input([4])
    y = recorder.pointwise("add", recorder.pointwise("exp", x), recorder.pointwise("neg", x))
    recorder.output(y)
    segmented = segment(recorder.program, count)
    assert texts(segmented) == ["pointwise: T1 = exp(T0); T2 = neg(T0); T3 = add(T1, T2)"]
    assert segmented.segments[0].name == "S0"
    assert len(asked) == 1


def test_a_contraction_stands_between() -> None:
    recorder = Recorder()
    x, weight = recorder.input([4, 8]), recorder.input([6, 8])
    hidden = recorder.pointwise("relu", x)
    product = recorder.add(build.linear, hidden, weight)
    recorder.output(recorder.pointwise("relu", product), recorder.pointwise("neg", hidden))
    assert texts(segment(recorder.program, pointwise_only)) == [
        "pointwise: T2 = relu(T0); T5 = neg(T2)",
        "expr_eval: T3 = linear(T2, T1)",
        "pointwise: T4 = relu(T3)",
    ]


def test_no_cycle_through_a_contraction() -> None:
    """y = linear(relu(x)) + relu(x): the relu and the sum cannot share a segment."""
    recorder = Recorder()
    x, weight = recorder.input([8, 8]), recorder.input([8, 8])
    hidden = recorder.pointwise("relu", x)
    product = recorder.add(build.linear, hidden, weight)
    recorder.output(recorder.pointwise("add", product, hidden))
    assert texts(segment(recorder.program, pointwise_only)) == [
        "pointwise: T2 = relu(T0)",
        "expr_eval: T3 = linear(T2, T1)",
        "pointwise: T4 = add(T3, T2)",
    ]


def test_a_refused_region_falls_into_accepted_parts() -> None:
    recorder = Recorder()
    x = recorder.input([4, 64])
    first = recorder.add(build.reduction, "sum", recorder.pointwise("exp", x), [1])
    second = recorder.add(build.reduction, "max", recorder.pointwise("neg", x), [1])
    recorder.output(recorder.pointwise("add", first, second))
    segmented = segment(recorder.program, one_reduction)
    assert texts(segmented) == [
        "reduction: T1 = exp(T0); T2 = sum(T1, [1]); T3 = neg(T0)",
        "reduction: T4 = max(T3, [1]); T5 = add(T2, T4)",
    ]
    assert all(part.refusals == () for part in segmented.segments)


def test_what_nobody_takes_is_evaluated_with_the_reasons() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    y = recorder.add(build.permute, x, [1, 0])
    recorder.output(recorder.pointwise("neg", y))
    segmented = segment(recorder.program, pointwise_only)
    assert texts(segmented) == ["expr_eval: T1 = permute(T0, [1, 0])", "pointwise: T2 = neg(T1)"]
    assert segmented.segments[0].refusals == (Refusal("pointwise", "only pointwise expressions"),)


def test_scalar_arithmetic_is_repeated_where_it_is_read() -> None:
    recorder = Recorder()
    x, weight = recorder.input([4, 4]), recorder.input([4, 4])
    recorder.program, factor = build.define_scalar(recorder.program, DataType.Double)
    recorder.program = build.add_input(recorder.program, factor)
    twice = recorder.pointwise("add", factor, factor)
    scaled = recorder.pointwise("mul", x, twice)
    product = recorder.add(build.linear, scaled, weight)
    recorder.output(recorder.pointwise("mul", product, twice))
    assert texts(segment(recorder.program, pointwise_only)) == [
        "pointwise: c1 = add(c0, c0); T2 = mul(T0, c1)",
        "expr_eval: T3 = linear(T2, T1)",
        "pointwise: c1 = add(c0, c0); T4 = mul(T3, c1)",
    ]


def test_communications_stand_alone() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    y = recorder.pointwise("relu", x)
    z = recorder.pointwise("neg", recorder.pointwise("exp", y))
    recorder.output(z)
    recorder.block(LINE, x, 0)
    recorder.replicate(LINE, y)
    program, _ = run_passes(recorder.program)
    segmented = segment(program, pointwise_only)
    assert texts(segmented) == [
        "pointwise: T4 = relu(T0)",
        "communication: T1 = all_gather(T4, mesh_x, 0)",
        "pointwise: T2 = exp(T1); T3 = neg(T2)",
    ]
    assert isinstance(segmented.segments[1].program.fusion.exprs[0], AllGather)


def test_expressions_on_two_meshes_do_not_share_a_segment() -> None:
    recorder = Recorder()
    x = recorder.input([4])
    y, z = recorder.pointwise("exp", x), recorder.pointwise("neg", x)
    recorder.output(y, z)
    recorder.replicate(LINE, x, y)
    recorder.replicate(make_mesh([2, 3]), z)
    assert texts(segment(recorder.program, pointwise_only)) == [
        "pointwise: T1 = exp(T0)",
        "pointwise: T2 = neg(T0)",
    ]


def test_a_long_program_is_cut_quickly() -> None:
    """A thousand expressions with a contraction after every fifth."""
    recorder = Recorder()
    tensor, weight = recorder.input([8, 8]), recorder.input([8, 8])
    for _ in range(167):
        for _ in range(5):
            tensor = recorder.pointwise("add", tensor, weight)
        tensor = recorder.add(build.linear, tensor, weight)
    recorder.output(tensor)
    start = time.perf_counter()
    segmented = segment(recorder.program, pointwise_only)
    elapsed = time.perf_counter() - start
    assert len(segmented.segments) == 334
    assert elapsed < 10, "quadratic or worse"


def test_golden(golden: GoldenCheck) -> None:
    recorder = Recorder()
    x = recorder.input([4, -1])
    weight = recorder.input([3, 8])
    product = recorder.add(build.linear, recorder.pointwise("relu", x), weight)
    recorder.output(recorder.add(build.reduction, "sum", recorder.pointwise("neg", product), [0]))
    segmented = segment(recorder.program, one_reduction)
    parts = (f"# {s.name} {s.scheduler}\n{print_program(s.program)}" for s in segmented.segments)
    golden("segment", "\n".join(part.rstrip("\n") for part in parts))
    assert TensorName("T2") in segmented.segments[0].program.fusion.tensors
