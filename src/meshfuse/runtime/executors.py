"""Executors: each runs one kind of segment on the values of an Environment.

host/dispatch.py says which kind of segment belongs to which. Communications have theirs in dist/,
whole programs in host/.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

from meshfuse.base.errors import InvariantError
from meshfuse.codegen.source import KernelSource
from meshfuse.expr import IntExpr, evaluate
from meshfuse.facts.refusal import Refusal
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.comm import Communication
from meshfuse.ir.ops import Expr, Linear, MatMul
from meshfuse.ir.program import Program
from meshfuse.kernel.nodes import IndexName
from meshfuse.runtime.compile import KernelCompiler
from meshfuse.runtime.evaluate_ops import Environment, run_expressions
from meshfuse.runtime.launch import CompiledKernel


class Executor(ABC):
    """Abstract: what runs a segment. Made of its description, compiled once, run often."""

    __slots__ = ()

    @staticmethod
    @abstractmethod
    def supports(program: Program) -> Refusal | None:
        """Why segments like `program` are not for this executor; None if they are."""

    @abstractmethod
    def compile(self) -> None:
        """Do what is to be done once. A second call does nothing."""

    @abstractmethod
    def is_compiled(self) -> bool:
        """Whether `run` may be called."""

    @abstractmethod
    def run(self, env: Environment) -> None:
        """Read the segment's inputs from `env.values` and leave its outputs there."""


@final
class KernelExecutor(Executor):
    """Runs one C++ kernel over existing buffers. `sizes`: its extents in the program's symbols."""

    __slots__ = ("_buffers", "_compiler", "_kernel", "_scalars", "_sizes", "_source")

    def __init__(
        self,
        source: KernelSource,
        sizes: Mapping[IndexName, IntExpr],
        compiler: KernelCompiler,
    ) -> None:
        self._source = source
        self._sizes = dict(sizes)
        self._compiler = compiler
        self._kernel: CompiledKernel | None = None
        self._buffers = [TensorName(buffer.name) for buffer in source.kernel.buffers]
        self._scalars = [(p.name, ScalarName(p.name)) for p in source.kernel.scalars]

    @staticmethod
    def supports(program: Program) -> Refusal | None:
        return _refuse(program, "kernel", (Communication, Linear, MatMul))

    def compile(self) -> None:
        if self._kernel is None:
            self._kernel = self._compiler.compile_source(self._source)

    def is_compiled(self) -> bool:
        return self._kernel is not None

    def run(self, env: Environment) -> None:
        if self._kernel is None:
            raise InvariantError(f"kernel {self._source.entry} runs before it is compiled")
        self._kernel(
            [env.tensor(name) for name in self._buffers],
            {parameter: env.scalar(name) for parameter, name in self._scalars},
            {name: evaluate(size, env.sizes) for name, size in self._sizes.items()},
        )


@final
class ExprEvalExecutor(Executor):
    """Runs expressions one by one through torch."""

    __slots__ = ("_exprs",)

    def __init__(self, exprs: Sequence[Expr]) -> None:
        self._exprs = tuple(exprs)

    @staticmethod
    def supports(program: Program) -> Refusal | None:
        return _refuse(program, "expr_eval", (Communication,))

    def compile(self) -> None:
        """Nothing to do."""

    def is_compiled(self) -> bool:
        return True

    def run(self, env: Environment) -> None:
        run_expressions(self._exprs, env)


def _refuse(program: Program, executor: str, classes: tuple[type[Expr], ...]) -> Refusal | None:
    for expr in program.fusion.exprs:
        if isinstance(expr, classes):
            name = type(expr).__name__
            return Refusal(executor, f"runs no {name}", TensorName(expr.outs[0]))
    return None
