"""Random programs with random schedules, as kernels that are compiled, and as text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from meshfuse.dist.communicator import Communicator
from meshfuse.host.executors import HostIrExecutor
from meshfuse.host.parser import parse_host_program
from meshfuse.host.printer import print_host_program
from meshfuse.ir.parser import parse_program
from meshfuse.ir.printer import print_program
from meshfuse.kernel.parser import parse_kernel
from meshfuse.kernel.printer import print_kernel
from meshfuse.pipeline import Compilation, compile_scheduled
from meshfuse.runtime.arguments import signature_of
from meshfuse.runtime.compile import KernelCompiler
from meshfuse.runtime.evaluate_ops import evaluate_program
from random_schedules import ScheduledExample, scheduled_programs

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


@pytest.fixture(scope="module")
def compiler() -> KernelCompiler:
    return KernelCompiler()


def compiled(example: ScheduledExample) -> Compilation:
    return compile_scheduled(example.scheduled, signature_of(example.inputs))


@settings(max_examples=12, suppress_health_check=SLOW)
@given(example=scheduled_programs())
def test_compiled_kernels(example: ScheduledExample, compiler: KernelCompiler) -> None:
    compilation = compiled(example)
    device = torch.device("cpu")
    executor = HostIrExecutor(compilation.host, compilation.sources, compiler, device)
    results = executor.run(example.inputs, Communicator({}))
    wanted = evaluate_program(example.program, example.inputs)
    assert len(results) == len(wanted)
    assert all(map(torch.equal, results, wanted))


@settings(max_examples=500, suppress_health_check=SLOW)
@given(example=scheduled_programs())
def test_texts_parse_back(example: ScheduledExample) -> None:
    assert parse_program(print_program(example.scheduled)) == example.scheduled
    compilation = compiled(example)
    (kernel,) = compilation.host.kernels.values()
    assert parse_kernel(print_kernel(kernel)) == kernel
    assert parse_host_program(print_host_program(compilation.host)) == compilation.host
