"""Pointwise segments whose tensors lie in memory alike, whatever axes they have."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kernel_runs import check_by_value
from meshfuse.codegen.cpp import PRELUDE, print_cpp
from meshfuse.ir import build
from program_recorder import Recorder


def reshaped(sizes: Sequence[int], wanted: Sequence[int]) -> Recorder:
    recorder = Recorder()
    x = recorder.input(list(sizes))
    y = recorder.add(build.reshape, recorder.pointwise("neg", x), list(wanted))
    recorder.output(recorder.pointwise("exp", y))
    return recorder


@pytest.mark.parametrize(
    ("sizes", "data", "wanted"),
    [
        ([4, 6], (4, 6), [4, 2, 3]),
        ([4, 6], (4, 6), [8, 3]),
        ([-1, -1], (4, 6), [-1]),
        ([-1, 6], (4, 6), [-1, 2, 3]),
        ([-1, -1, 6], (2, 2, 6), [-1, 3]),
    ],
)
def test_reshaped_tensors_are_run_over_as_one_row(
    sizes: Sequence[int], data: Sequence[int], wanted: Sequence[int]
) -> None:
    """No index is taken apart: whole vectors are loaded and stored."""
    program = reshaped(sizes, wanted).program
    kernel = check_by_value(program, [torch.randn(data)], "pointwise")
    body = print_cpp(kernel).text.removeprefix(PRELUDE)
    assert "mf_load<16>(" in body
    assert "%" not in body
    assert "n0 = 0" not in body  # a loop over lanes
