"""Random programs of pointwise operations, views and reductions, by value."""

from __future__ import annotations

from hypothesis import given, settings

from kernel_programs import finished
from kernel_runs import check_by_value
from meshfuse.schedulers.registry import accepts
from random_programs import Growing, programs


@settings(max_examples=50)
@given(programs(reducing=False))
def test_random_pointwise_programs(g: Growing) -> None:
    program = finished(g.recorder)
    if g.full[-1] in program.fusion.inputs:
        return
    assert accepts(program) in ("pointwise", "expr_eval")
    check_by_value(program, g.inputs, "pointwise", rtol=0, atol=0)


@settings(max_examples=50)
@given(programs(reducing=True))
def test_random_programs_with_reductions(g: Growing) -> None:
    program = finished(g.recorder)
    name = accepts(program)
    assert isinstance(name, str), "\n".join(map(str, name))
    check_by_value(program, g.inputs, None if name != "expr_eval" else "pointwise")
