"""Executors: each runs one kind of segment on the values of an Environment.

host/dispatch.py says which kind of segment belongs to which. Communications have theirs in dist/,
whole programs in host/.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import final

import torch

import meshfuse.runtime.evaluate_attention  # registers its evaluations
import meshfuse.runtime.evaluate_indexing  # noqa: F401  # registers its evaluations
from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.trace import Activity, Trace, Work
from meshfuse.codegen.source import KernelSource
from meshfuse.expr import IntExpr, evaluate
from meshfuse.facts.refusal import Refusal
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.comm import Communication
from meshfuse.ir.ops import Expr, LibraryExpr
from meshfuse.ir.printer import op_name
from meshfuse.ir.program import Program
from meshfuse.kernel.nodes import IndexName, ValueName
from meshfuse.runtime.bound_exprs import Compute, Scope, Slots, bind_expr, bind_exprs
from meshfuse.runtime.compile import KernelCompiler
from meshfuse.runtime.evaluate_into import evaluate_into
from meshfuse.runtime.evaluate_ops import Environment, run_expressions
from meshfuse.runtime.launch import BoundKernel, CompiledKernel


@final
@frozen_dataclass
class ExecutorIds:
    """Which part of what an executor runs, each counted from 0.

    `fusion` is the definition, `concretisation` its form for one set of sizes, `runtime` what was
    compiled for one signature, `group` the segment, in the order of running.
    """

    fusion: int = 0
    concretisation: int = 0
    runtime: int = 0
    group: int = 0


ALONE_IDS = ExecutorIds()
"""Of what is no part of a larger program."""


class Executor(ABC):
    """Abstract: what runs a segment. Made with its ids, compiled once, run often.

    What `compile` takes differs from kind to kind; host/dispatch.py has one function for all.
    """

    __slots__ = ("ids",)
    ids: ExecutorIds

    @staticmethod
    @abstractmethod
    def supports(program: Program) -> Refusal | None:
        """Why segments like `program` are not for this executor; None if they are."""

    @abstractmethod
    def is_compiled(self) -> bool:
        """Whether `run` may be called."""

    @abstractmethod
    def run(self, env: Environment) -> None:
        """Read the segment's inputs from `env.values` and leave its outputs there."""


@final
class KernelExecutor(Executor):
    """Runs one C++ kernel over existing buffers, its outputs' among them."""

    __slots__ = ("_buffers", "_compiler", "_kernel", "_scalars", "_scheduler", "_sizes", "work")

    def __init__(
        self,
        compiler: KernelCompiler,
        ids: ExecutorIds = ALONE_IDS,
        scheduler: str = "none",
    ) -> None:
        """`scheduler` is who scheduled the kernel, for profiles."""
        self.ids = ids
        self._compiler = compiler
        self._scheduler = scheduler
        self._kernel: CompiledKernel | None = None
        self._sizes: dict[IndexName, IntExpr] = {}
        self._buffers: list[TensorName] = []
        self._scalars: list[tuple[ValueName, ScalarName]] = []
        self.work = Work("kernel", scheduler, ids.group)

    @staticmethod
    def supports(program: Program) -> Refusal | None:
        """No library operation and no communication; it makes all outputs, none is passed on."""
        for output in program.fusion.outputs:
            if output.tensor in program.fusion.inputs:
                return Refusal("kernel", "an input is passed on as it is", output.tensor)
        return _refuse(program, "kernel", (Communication, LibraryExpr))

    def compile(
        self,
        source: KernelSource,
        sizes: Mapping[IndexName, IntExpr],
        trace: Trace | None = None,
    ) -> None:
        """Compile the kernel's text. `sizes`: its extents in the program's symbols.

        A second call does nothing. Raises CompilationFailed.
        """
        if self._kernel is not None:
            return
        kernel = source.kernel
        self._sizes = dict(sizes)
        self._buffers = [TensorName(buffer.name) for buffer in kernel.buffers]
        self._scalars = [(p.name, ScalarName(p.name)) for p in kernel.scalars]
        self.work = Work(kernel.name, self._scheduler, self.ids.group)
        if trace is None:
            self._kernel = self._compiler.compile_source(source)
            return
        with trace.span(Activity.compile, self.work):
            self._kernel = self._compiler.compile_source(source)

    def is_compiled(self) -> bool:
        return self._kernel is not None

    def run(self, env: Environment) -> None:
        if self._kernel is None:
            raise InvariantError(f"{self.work.name} runs before it is compiled")
        if env.trace is None:
            self._launch(self._kernel, env)
            return
        with env.trace.span(Activity.run, self.work) as extent:
            self._launch(self._kernel, env)
            buffers = self._kernel.source.kernel.buffers
            sizes = [bytes_of(env.tensor(name)) for name in self._buffers]
            extent.output_bytes = sum(n for n, b in zip(sizes, buffers, strict=True) if b.written)
            extent.input_bytes = sum(sizes) - extent.output_bytes
            extent.device = _device_of(env, self._buffers)

    def bind(self, sizes: Mapping[str, int], elements: int) -> BoundKernel:
        """The kernel for these sizes; see CompiledKernel.bind."""
        if self._kernel is None:
            raise InvariantError(f"{self.work.name} is bound before it is compiled")
        return self._kernel.bind(sizes, elements)

    def _launch(self, kernel: CompiledKernel, env: Environment) -> None:
        kernel(
            [env.tensor(name) for name in self._buffers],
            {parameter: env.scalar(name) for parameter, name in self._scalars},
            {name: evaluate(size, env.sizes) for name, size in self._sizes.items()},
        )


@final
class ExprEvalExecutor(Executor):
    """Runs expressions one by one through torch."""

    __slots__ = ("_exprs", "work")

    def __init__(self, ids: ExecutorIds = ALONE_IDS) -> None:
        self.ids = ids
        self._exprs: tuple[Expr, ...] | None = None
        self.work = Work("expr_eval", "expr_eval", ids.group)

    @staticmethod
    def supports(program: Program) -> Refusal | None:
        return _refuse(program, "expr_eval", (Communication,))

    def compile(self, exprs: Sequence[Expr], trace: Trace | None = None) -> None:
        """Remember the expressions."""
        if trace is not None:
            with trace.span(Activity.compile, Work(title_of(exprs), "expr_eval", self.ids.group)):
                return self.compile(exprs)
        self._exprs = tuple(exprs)
        self.work = Work(title_of(exprs), "expr_eval", self.ids.group)

    def is_compiled(self) -> bool:
        return self._exprs is not None

    def run(self, env: Environment) -> None:
        self.run_into(env, ())

    def bind(
        self, scope: Scope, into: TensorName | None = None, *, is_added: bool = False
    ) -> Callable[[Slots], None]:
        """The expressions for the sizes of `scope`; see bind_exprs."""
        if self._exprs is None:
            raise InvariantError(f"{self.work.name} is bound before it is compiled")
        return bind_exprs(self._exprs, scope, into, is_added=is_added)

    def bind_one(self, scope: Scope) -> Compute | None:
        """What makes the result of the only expression, for the sizes of `scope`; see bind_expr.
        None where there are several, and for what `bind` alone knows a way, or an error."""
        if self._exprs is None or len(self._exprs) != 1:
            return None
        return bind_expr(self._exprs[0], scope)

    def run_into(self, env: Environment, given: Collection[TensorName]) -> None:
        """As `run`, but outputs among `given` exist in `env` and are written to.

        Raises UserError naming the first operation among them that always makes a new tensor.
        """
        exprs = self._exprs
        if exprs is None:
            raise InvariantError("expressions run before they are compiled")
        if env.trace is None:
            _run(exprs, env, given)
            return
        with env.trace.span(Activity.run, self.work) as extent:
            _run(exprs, env, given)
            made = dict.fromkeys(name for expr in exprs for name in expr.outs)
            read = dict.fromkeys(
                name for expr in exprs for name in expr.ins if isinstance(name, str)
            )
            extent.input_bytes = _bytes_of_all(env, (name for name in read if name not in made))
            extent.output_bytes = _bytes_of_all(env, made)
            extent.device = _device_of(env, (*made, *read))


def _run(exprs: Sequence[Expr], env: Environment, given: Collection[TensorName]) -> None:
    if not given:
        run_expressions(exprs, env)
        return
    for expr in exprs:
        if any(name in given for name in expr.outs):
            evaluate_into(expr, env, env.tensor(TensorName(expr.outs[0])))
        else:
            run_expressions((expr,), env)


def title_of(exprs: Sequence[Expr]) -> str:
    """`linear T3`, `add T2 and 4 more`."""
    if not exprs:
        return "nothing"
    first = exprs[0]
    others = f" and {len(exprs) - 1} more" if len(exprs) > 1 else ""
    return f"{op_name(first)} {first.outs[0]}{others}"


def bytes_of(tensor: torch.Tensor) -> int:
    """Elements times their size, wherever they lie."""
    return tensor.numel() * tensor.element_size()


def _bytes_of_all(env: Environment, names: Iterable[str]) -> int:
    values = (env.values.get(TensorName(name)) for name in names)
    return sum(bytes_of(value) for value in values if isinstance(value, torch.Tensor))


def _device_of(env: Environment, names: Iterable[str]) -> str:
    """The device of the first tensor among `names`; "cpu" without one."""
    values = (env.values.get(TensorName(name)) for name in names)
    return next((str(value.device) for value in values if isinstance(value, torch.Tensor)), "cpu")


def _refuse(program: Program, executor: str, classes: tuple[type[Expr], ...]) -> Refusal | None:
    for expr in program.fusion.exprs:
        if isinstance(expr, classes):
            name = type(expr).__name__
            return Refusal(executor, f"runs no {name}", TensorName(expr.outs[0]))
    return None
