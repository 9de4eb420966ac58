"""Who takes which segment, and why the others do not."""

from __future__ import annotations

import pytest

from kernel_programs import bias_and_relu, finished, layer_norm, reduced, softmax
from meshfuse.facts.refusal import Refusal
from meshfuse.ir import build
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import extract
from meshfuse.schedulers.registry import SCHEDULERS, accepts, refusals_of
from meshfuse.schedulers.scheduler import Scheduler
from program_recorder import Recorder


def named(name: str) -> Scheduler:
    return next(scheduler for scheduler in SCHEDULERS if scheduler.name == name)


def refusal(program: Program, name: str) -> str:
    answer = named(name).can(program)
    assert answer is not None
    return str(answer)


def matmul() -> Program:
    r = Recorder()
    r.output(r.add(build.matmul, r.input((-1, -1)), r.input((-1, -1))))
    return finished(r)


def matmul_and_relu() -> Program:
    r = Recorder()
    product = r.add(build.matmul, r.input((-1, -1)), r.input((-1, -1)))
    r.output(r.pointwise("relu", product))
    return finished(r)


def test_names_are_distinct() -> None:
    names = [scheduler.name for scheduler in SCHEDULERS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (bias_and_relu(), "pointwise"),
        (reduced("sum", (-1, -1), [1]), "reduction"),
        (reduced("max", (-1, -1, 8), [0, 2]), "reduction"),
        (layer_norm(), "normalization"),
        (softmax((-1, -1), 0), "normalization"),
        (matmul(), "expr_eval"),
    ],
)
def test_who_takes_what(program: Program, name: str) -> None:
    assert accepts(program) == name
    others = {scheduler.name for scheduler in SCHEDULERS} - {name}
    refused = {answer.scheduler for answer in refusals_of(program)}
    assert refused == others - {"expr_eval"} or refused == others
    assert name not in refused


def test_estimates_grow_with_the_bytes() -> None:
    small, large = (bias_and_relu((1024, n)) for n in (64, 4096))
    pointwise = named("pointwise")
    assert pointwise.estimate(small) < pointwise.estimate(large)
    assert pointwise.estimate(bias_and_relu((-1, -1))) == pointwise.estimate(
        bias_and_relu((1024, 1024))
    )


def test_a_contraction_is_refused_with_its_name() -> None:
    program = matmul_and_relu()
    answers = accepts(program)
    assert isinstance(answers, tuple)
    assert all(isinstance(answer, Refusal) for answer in answers)
    assert refusal(program, "pointwise") == (
        "pointwise: T2: MatMul is a contraction; those run through torch"
    )
    assert refusal(program, "expr_eval") == (
        "expr_eval: it has 2 operations; torch runs one at a time"
    )


def test_outputs_of_two_shapes() -> None:
    r = Recorder()
    bias, x = r.input((8,)), r.input((-1, 8))
    scaled = r.pointwise("neg", bias)
    y = r.pointwise("add", x, scaled)
    r.output(scaled, y)
    assert refusal(finished(r), "pointwise") == (
        f"pointwise: {y}: it runs over [8, i0], output {scaled} over [8]"
    )


def test_reductions_over_different_axes() -> None:
    r = Recorder()
    x = r.input((4, 8))
    rows = r.add(build.reduction, "sum", x, [1])
    columns = r.add(build.reduction, "sum", x, [0])
    r.output(rows, columns)
    assert refusal(finished(r), "reduction") == (
        f"reduction: {columns}: it reduces [4] and keeps [8]; {rows} reduces [8] and keeps [4]"
    )


def test_a_reduction_of_a_reduction() -> None:
    r = Recorder()
    rows = r.add(build.reduction, "sum", r.input((4, 8)), [1])
    r.output(r.add(build.reduction, "max", rows, [0]))
    assert "reduces [4] and keeps []" in refusal(finished(r), "normalization")


def test_a_result_along_two_axes_at_once() -> None:
    """s[:, None] + s[None, :] would need the sums of other rows."""
    r = Recorder()
    sums = r.add(build.reduction, "sum", r.input((-1, -1)), [1])
    right = r.add(build.broadcast, sums, [False, True])
    below = r.add(build.broadcast, sums, [True, False])
    total = r.pointwise("add", right, below)
    r.output(total)
    assert refusal(finished(r), "normalization") == (
        f"normalization: {total}: two of its axes run together"
    )


def test_a_result_stretched_to_a_new_axis() -> None:
    r = Recorder()
    sums = r.add(build.reduction, "sum", r.input((-1, 8)), [1], True)
    wide = r.pointwise("add", sums, r.input((-1, 5)))
    r.output(wide)
    assert "it runs over [i0, 5]; rows are kept [i0] and reduced [8]" in refusal(
        finished(r), "reduction"
    )


def test_nothing_to_write_and_nothing_to_do() -> None:
    r = Recorder()
    x = r.input((4,))
    r.pointwise("neg", x)
    assert refusal(r.program, "pointwise") == "pointwise: it writes no tensor"
    r.output(x)
    assert refusal(r.program, "pointwise") == (
        "pointwise: T0: an output that is an input needs no kernel"
    )


def test_a_part_of_a_program_is_taken_like_a_whole() -> None:
    program = layer_norm()
    statistics, last = program.fusion.exprs[:1], program.fusion.exprs[-2:]
    assert accepts(extract(program, statistics)) == "reduction"
    assert accepts(extract(program, last)) == "pointwise"
