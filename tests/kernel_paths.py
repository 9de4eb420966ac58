"""Three ways to run one definition: compiled kernels, the tile program's evaluator, op by op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch

from meshfuse import FusionDefinition
from meshfuse.base.dtypes import Scalar
from meshfuse.base.trace import Trace
from meshfuse.codegen.source import KernelSource
from meshfuse.dist.communicator import Communicator
from meshfuse.host.executors import HostIrExecutor
from meshfuse.ir.parser import parse_program
from meshfuse.kernel.nodes import Kernel, ValueName
from meshfuse.pipeline import compile
from meshfuse.runtime.arguments import Argument, signature_of
from meshfuse.runtime.compile import KernelCompiler
from meshfuse.runtime.evaluate_kernel import evaluate_kernel
from meshfuse.runtime.launch import BoundKernel

Run = Callable[[FusionDefinition, Sequence[Argument]], list[torch.Tensor]]


class EvaluatedKernel:
    """Called like a CompiledKernel; runs the tile program grid point by grid point."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __call__(
        self,
        buffers: Sequence[torch.Tensor],
        scalars: Mapping[ValueName, Scalar],
        sizes: Mapping[str, int],
    ) -> None:
        named = {b.name: t for b, t in zip(self._kernel.buffers, buffers, strict=True)}
        strides = {
            str(stride): tensor.stride(axis)
            for buffer, tensor in zip(self._kernel.buffers, buffers, strict=True)
            for axis, stride in enumerate(buffer.strides)
        }
        evaluate_kernel(self._kernel, named, dict(scalars), {**strides, **sizes})

    def bind(self, sizes: Mapping[str, int], elements: int) -> BoundKernel:
        names = [parameter.name for parameter in self._kernel.scalars]
        return lambda buffers, scalars: self(buffers, dict(zip(names, scalars, strict=True)), sizes)


class EvaluatingCompiler:
    """Stands in for KernelCompiler."""

    def compile_all(self, sources: Sequence[KernelSource], trace: Trace | None = None) -> None:
        """Nothing to do."""

    def compile_source(self, source: KernelSource, trace: Trace | None = None) -> EvaluatedKernel:
        return EvaluatedKernel(source.kernel)


def run_compiled(fd: FusionDefinition, inputs: Sequence[Argument]) -> list[torch.Tensor]:
    return fd.execute(inputs, device="cpu")


def run_evaluator(fd: FusionDefinition, inputs: Sequence[Argument]) -> list[torch.Tensor]:
    compilation = compile(parse_program(repr(fd.fusion)), signature_of(inputs))
    compiler = cast(KernelCompiler, EvaluatingCompiler())
    executor = HostIrExecutor(compilation.host, compilation.sources, compiler, torch.device("cpu"))
    return executor.run(inputs, Communicator({}))


def run_op_by_op(fd: FusionDefinition, inputs: Sequence[Argument]) -> list[torch.Tensor]:
    compilation = compile(parse_program(repr(fd.fusion)), signature_of(inputs), kernels=False)
    executor = HostIrExecutor(compilation.host, compilation.sources, None, torch.device("cpu"))
    return executor.run(inputs, Communicator({}))


PATHS: dict[str, Run] = {
    "compiled": run_compiled,
    "evaluator": run_evaluator,
    "op_by_op": run_op_by_op,
}
