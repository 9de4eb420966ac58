"""Executors: what they take, and what they need before they run."""

from __future__ import annotations

import pytest
import torch

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import InvariantError
from meshfuse.codegen.source import KernelSource
from meshfuse.expr import symbol
from meshfuse.ir import build
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Pointwise
from meshfuse.ir.program import Program
from meshfuse.kernel.nodes import IndexName
from meshfuse.pipeline import compile
from meshfuse.runtime.arguments import signature_of
from meshfuse.runtime.compile import KernelCompiler
from meshfuse.runtime.evaluate_ops import Environment
from meshfuse.runtime.executors import ExecutorIds, ExprEvalExecutor, KernelExecutor
from small_programs import norm_linear, softplus_rows, tensor_input

X, Y = TensorName("T0"), TensorName("T2")


def doubled_source() -> KernelSource:
    """T2 [i0] = T0 [i0] + T0 [i0] as a kernel."""
    program, x = tensor_input(Program(), [-1])
    program, _ = build.pointwise(program, "neg", [x])
    program, y = build.pointwise(program, "add", [x, x])
    program = build.add_output(program, TensorName(y))
    compilation = compile(program, signature_of([torch.zeros(3)]))
    (source,) = compilation.sources.values()
    return source


def environment(x: torch.Tensor) -> Environment:
    values = {X: x, Y: torch.empty_like(x)}
    extent = (symbol("i0"),)
    dtypes = {X: DataType.Float, Y: DataType.Float}
    return Environment({**dtypes}, {X: extent, Y: extent}, {"i0": x.numel()}, {**values})


def test_a_kernel_is_compiled_once_and_then_run() -> None:
    source, sizes = doubled_source(), {IndexName("i0"): symbol("i0")}
    executor = KernelExecutor(KernelCompiler(), ExecutorIds(group=2), "pointwise")
    env = environment(torch.arange(5.0))
    assert not executor.is_compiled()
    with pytest.raises(InvariantError, match="before it is compiled"):
        executor.run(env)
    executor.compile(source, sizes)
    executor.compile(source, sizes)
    assert executor.is_compiled()
    executor.run(env)
    assert torch.equal(env.tensor(Y), 2 * torch.arange(5.0))


def test_expressions_are_compiled_by_remembering_them() -> None:
    executor = ExprEvalExecutor()
    assert not executor.is_compiled()
    with pytest.raises(InvariantError, match="before they are compiled"):
        executor.run(environment(torch.zeros(1)))
    executor.compile([Pointwise(Y, "add", (X, X))])
    assert executor.is_compiled()
    env = environment(torch.arange(5.0))
    executor.run(env)
    assert torch.equal(env.tensor(Y), 2 * torch.arange(5.0))


def test_what_each_supports() -> None:
    assert KernelExecutor.supports(softplus_rows()) is None
    assert ExprEvalExecutor.supports(norm_linear()) is None
    refusal = KernelExecutor.supports(norm_linear())
    assert str(refusal) == "kernel: T18: runs no Linear"
