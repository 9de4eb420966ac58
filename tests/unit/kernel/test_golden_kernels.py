"""The text of the kernels that the schedulers make of a few programs."""

import pytest

from golden_text import GoldenCheck
from kernel_programs import bias_and_relu, layer_norm, reduced
from kernel_runs import checked_kernel, scheduled
from meshfuse.base.dtypes import DataType
from meshfuse.ir.program import Program
from meshfuse.kernel.printer import print_kernel

PROGRAMS = {
    "kernel_bias_and_relu": bias_and_relu(dtype=DataType.BFloat16),
    "kernel_inner_sum": reduced("sum", (-1, -1), [1], DataType.BFloat16),
    "kernel_outer_sum": reduced("sum", (-1, -1), [0]),
    "kernel_layer_norm": layer_norm(),
    "kernel_even_max": reduced("max", (8, 4, 64), [0, 2]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_of_kernels(name: str, golden: GoldenCheck) -> None:
    program: Program = PROGRAMS[name]
    golden(name, print_kernel(checked_kernel(scheduled(program))))
