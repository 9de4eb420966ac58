"""Random schedules of random programs: one value, by whatever loops it is computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kernel_runs import checked_kernel, run_kernel
from meshfuse.ir.parser import parse_program
from meshfuse.ir.printer import print_program
from meshfuse.ir.verify import verify
from meshfuse.kernel.localize import localize
from meshfuse.runtime.evaluate_ops import evaluate_program
from random_schedules import ScheduledExample, scheduled_programs

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


def check_value(example: ScheduledExample) -> None:
    """The kernel and the scheduled program itself compute exactly what the program says."""
    verify(example.scheduled)
    assert parse_program(print_program(example.scheduled)) == example.scheduled
    wanted = evaluate_program(example.program, example.inputs)
    localized = localize(example.scheduled)
    kernel = checked_kernel(localized.program)
    results = run_kernel(kernel, localized, example.scheduled, example.inputs)
    evaluated = evaluate_program(example.scheduled, example.inputs)
    for want, result, value in zip(wanted, results, evaluated, strict=True):
        assert torch.equal(result, want)
        assert torch.equal(value, want)


@settings(max_examples=200, suppress_health_check=SLOW)
@given(scheduled_programs())
def test_all_schedules_of_a_program_give_one_result(example: ScheduledExample) -> None:
    check_value(example)


@pytest.mark.nightly
@settings(max_examples=5000, suppress_health_check=SLOW)
@given(scheduled_programs())
def test_many_schedules_give_one_result(example: ScheduledExample) -> None:
    check_value(example)
