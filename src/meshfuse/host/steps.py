"""Nodes of the host program bound to what they need at run time: one Step each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import singledispatch
from typing import final

import torch

from meshfuse.base.errors import InvariantError
from meshfuse.base.trace import Trace
from meshfuse.codegen.source import KernelSource
from meshfuse.dist.executors import BoundCollective, CommunicationExecutor
from meshfuse.expr import IntExpr, evaluate
from meshfuse.host.nodes import (
    Allocate,
    Communicate,
    Evaluate,
    Free,
    HostProgram,
    KernelName,
    Launch,
    View,
    Wait,
)
from meshfuse.host.run import AwaitWork, Post, Step
from meshfuse.host.uses import names_needed
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Set
from meshfuse.runtime.allocate import allocate, as_dense
from meshfuse.runtime.compile import KernelCompiler
from meshfuse.runtime.evaluate_ops import Environment
from meshfuse.runtime.executors import ALONE_IDS, ExecutorIds, ExprEvalExecutor, KernelExecutor
from meshfuse.runtime.torch_types import to_torch_dtype


@final
@dataclass(frozen=True, slots=True)
class Binding:
    """Where a program is loaded: the text of its kernels and who compiles it, rank and device.

    `schedulers` says who scheduled each kernel. `ids` are those of the executor of the node that is
    bound; `trace` gets a span for each that is compiled.
    """

    program: HostProgram
    sources: Mapping[KernelName, KernelSource]
    compiler: KernelCompiler | None
    rank: int
    device: torch.device
    schedulers: Mapping[KernelName, str] = field(default_factory=dict[KernelName, str])
    ids: ExecutorIds = ALONE_IDS
    trace: Trace | None = None


@singledispatch
def bind_step(node: object, binding: Binding) -> Step:
    """The step that does what `node` says."""
    raise InvariantError(f"{type(node).__name__} is no node of a host program")


@final
@dataclass(frozen=True, slots=True)
class AllocateStep(Step):
    name: TensorName
    shape: tuple[IntExpr, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def run(self, env: Environment) -> None:
        sizes = [evaluate(extent, env.sizes) for extent in self.shape]
        env.values[self.name] = allocate(sizes, self.order, self.dtype, self.device)


@bind_step.register
def _(node: Allocate, binding: Binding) -> Step:
    buffer = binding.program.buffers[node.buffer]
    dtype = to_torch_dtype(buffer.dtype)
    return AllocateStep(node.buffer, buffer.shape, buffer.memory_order, dtype, binding.device)


@final
@dataclass(frozen=True, slots=True)
class FreeStep(Step):
    names: tuple[TensorName, ...]

    def run(self, env: Environment) -> None:
        for name in self.names:
            del env.values[name]


@bind_step.register
def _(node: Free, binding: Binding) -> Step:
    return FreeStep(node.buffers)


@final
@dataclass(frozen=True, slots=True)
class LaunchStep(Step):
    executor: KernelExecutor

    def run(self, env: Environment) -> None:
        self.executor.run(env)


@bind_step.register
def _(node: Launch, binding: Binding) -> Step:
    if binding.compiler is None:
        raise InvariantError(f"{node.kernel} is launched, but there is no compiler")
    scheduler = binding.schedulers.get(node.kernel, "none")
    executor = KernelExecutor(binding.compiler, binding.ids, scheduler)
    executor.compile(binding.sources[node.kernel], node.sizes, binding.trace)
    return LaunchStep(executor)


@final
@dataclass(frozen=True, slots=True)
class EvaluateStep(Step):
    """`layouts`: results that others read, with the memory order that they count on.

    Results among `given` are written into tensors that exist.
    """

    executor: ExprEvalExecutor
    layouts: tuple[tuple[TensorName, tuple[int, ...]], ...]
    given: tuple[TensorName, ...] = ()

    def run(self, env: Environment) -> None:
        self.executor.run_into(env, self.given)
        for name, order in self.layouts:
            env.values[name] = as_dense(env.tensor(name), order)


@bind_step.register
def _(node: Evaluate, binding: Binding) -> Step:
    executor = ExprEvalExecutor(binding.ids)
    executor.compile(node.body, binding.trace)
    if node.into is not None:
        if len(node.body) != 1 or not isinstance(node.body[0], Set):
            raise InvariantError(f"update of {node.into}: one `set` is wanted, not {node.body}")
        return EvaluateStep(executor, (), (node.into,))
    program = binding.program
    outside = {output.buffer for output in program.outputs}
    for other in program.body:
        if other is not node and not isinstance(other, Free | Evaluate):
            outside.update(TensorName(name) for name in names_needed(other))
    made = (TensorName(name) for expr in node.body for name in expr.outs)
    layouts = tuple((name, program.buffers[name].memory_order) for name in made if name in outside)
    return EvaluateStep(executor, layouts)


@final
@dataclass(frozen=True, slots=True)
class PostStep(Step):
    executor: CommunicationExecutor

    def run(self, env: Environment) -> Post:
        return Post(self.executor.request(env))


@bind_step.register
def _(node: Communicate, binding: Binding) -> Step:
    executor = CommunicationExecutor(binding.ids)
    order = binding.program.buffers[node.src].memory_order
    executor.compile(bind_collective(node, order, binding.rank), binding.trace)
    return PostStep(executor)


def bind_collective(node: Communicate, order: tuple[int, ...], rank: int) -> BoundCollective:
    """What `rank` asks for; `order` is the memory order of the source."""
    return BoundCollective(
        number=node.number,
        collective=node.collective.value,
        team=node.mesh.team(rank, node.mesh_axis),
        src=node.src,
        out=node.out,
        order=order,
        function=node.function,
        cause=node.cause,
    )


@final
@dataclass(frozen=True, slots=True)
class WaitStep(Step):
    number: int

    def run(self, env: Environment) -> AwaitWork:
        return AwaitWork(self.number)


@bind_step.register
def _(node: Wait, binding: Binding) -> Step:
    return WaitStep(node.number)


@final
@dataclass(frozen=True, slots=True)
class ViewStep(Step):
    out: TensorName
    src: TensorName
    axis: int
    block: int
    blocks: int

    def run(self, env: Environment) -> None:
        src = env.tensor(self.src)
        size = src.shape[self.axis] // self.blocks
        env.values[self.out] = src.narrow(self.axis, self.block * size, size)


@bind_step.register
def _(node: View, binding: Binding) -> Step:
    block = node.mesh.coordinate(binding.rank, node.mesh_axis)
    if block is None:
        raise InvariantError(f"rank {binding.rank} holds no part of {node.out} on {node.mesh}")
    return ViewStep(node.out, node.src, node.axis, block, node.mesh.axis_size(node.mesh_axis))
