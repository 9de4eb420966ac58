"""One segment by itself: its executor made, compiled and run on arguments.

Programs that are cut into segments run as host programs (host/lower.py). Here each step can be
taken alone, in the same way for every kind of executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

import torch

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import InvariantError, UserError
from meshfuse.base.trace import Trace
from meshfuse.codegen.cpp import print_cpp
from meshfuse.codegen.cpp_tiles import check_tiles
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.executors import CommunicationExecutor
from meshfuse.expr import evaluate
from meshfuse.facts.facts import facts_of
from meshfuse.host.dispatch import choose_executor, executor_class
from meshfuse.host.lower_segments import LoweredKernel, lower_communication
from meshfuse.host.nodes import Communicate, HostBuffer
from meshfuse.host.sizes import buffer_of, coordinates_in, size_symbols
from meshfuse.host.steps import bind_collective
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.ops import Expr
from meshfuse.ir.program import Program
from meshfuse.kernel.localize import localize
from meshfuse.kernel.lower import lower
from meshfuse.kernel.verify import verify_kernel
from meshfuse.runtime.allocate import allocate, is_dense
from meshfuse.runtime.arguments import (
    Argument,
    Signature,
    check_arguments,
    expected_inputs,
    signature_of,
)
from meshfuse.runtime.autocast import without_autocast
from meshfuse.runtime.compile import KernelCompiler
from meshfuse.runtime.evaluate_ops import Environment, Placed
from meshfuse.runtime.executors import (
    ALONE_IDS,
    Executor,
    ExecutorIds,
    ExprEvalExecutor,
    KernelExecutor,
)
from meshfuse.runtime.layouts import refine_layouts
from meshfuse.runtime.torch_types import to_torch_dtype


def make_executor(
    program: Program, ids: ExecutorIds = ALONE_IDS, scheduler: str | None = None
) -> Executor:
    """The executor for one segment: by the scheduler that took it, else by capability.

    Raises UserError where there is none, CompilerNotFound for a kernel on a machine without a
    compiler.
    """
    kind = choose_executor(program) if scheduler is None else executor_class(scheduler)
    if kind is KernelExecutor:
        return KernelExecutor(KernelCompiler(), ids, scheduler or "none")
    return CommunicationExecutor(ids) if kind is CommunicationExecutor else ExprEvalExecutor(ids)


@singledispatch
def compile_executor(
    executor: Executor, program: Program, args: Sequence[Argument] | None = None
) -> None:
    """Compile a segment for its executor, as it is scheduled.

    `args` are an example of what it will run on. Kernels need them, for code depends on their
    layouts; the others do without. Raises UserError for a kernel without them.
    """
    raise InvariantError(f"{type(executor).__name__} is no executor of one segment")


@compile_executor.register
def _(executor: KernelExecutor, program: Program, args: Sequence[Argument] | None = None) -> None:
    if args is None:
        raise UserError(
            "compile(executor, program): a kernel needs more information: pass example arguments, "
            "compile(executor, program, args), for its code depends on their layouts"
        )
    bound, _ = check_arguments(expected_inputs(program), args, rank=Communicator.instance().rank())
    lowered = lower_scheduled(program, f"S{executor.ids.group}", signature_of(bound))
    executor.compile(print_cpp(lowered.kernel), lowered.sizes)


@compile_executor.register
def _(executor: ExprEvalExecutor, program: Program, args: Sequence[Argument] | None = None) -> None:
    executor.compile(program.fusion.exprs)


@compile_executor.register
def _(
    executor: CommunicationExecutor, program: Program, args: Sequence[Argument] | None = None
) -> None:
    (expr,) = program.fusion.exprs
    node = _communicate(program, expr, executor.ids.group)
    src, out = buffer_of(program, node.src), buffer_of(program, node.out)
    executor.compile(bind_collective(node, src, out, Communicator.instance().rank()))


def _communicate(program: Program, expr: Expr, number: int) -> Communicate:
    nodes = lower_communication(program, facts_of(program), expr, number)
    return next(node for node in nodes if isinstance(node, Communicate))


def lower_scheduled(program: Program, name: str, signature: Signature) -> LoweredKernel:
    """A program as one kernel on local shapes (law 1), by the schedule that it has.

    Raises ScheduleError for a schedule that is no legal form, Unsupported where the shards have
    none.
    """
    local = localize(refine_layouts(program, program.fusion.inputs, signature))
    check_tiles(local.program)
    kernel = lower(local.program, name)
    verify_kernel(kernel)
    sizes = {size: local.sizes[size] for size in kernel.sizes if size in local.sizes}
    return LoweredKernel(kernel, sizes)


def run_executor(
    executor: Executor,
    program: Program,
    args: Sequence[Argument],
    outputs: Sequence[torch.Tensor] | None = None,
    trace: Trace | None = None,
) -> list[torch.Tensor]:
    """Run a compiled segment on this rank's arguments, and return its outputs.

    `outputs`, if given, are what it writes to, one tensor for each. Raises UserError where they do
    not fit, and for an operation that cannot write into a tensor.
    """
    if not executor.is_compiled():
        raise UserError(f"run: {type(executor).__name__} is not compiled; call compile first")
    rank = Communicator.instance().rank()
    bound, device = check_arguments(expected_inputs(program), args, rank=rank)
    env = _environment(program, bound, trace, device, rank)
    names = [output.tensor for output in program.fusion.outputs]
    if outputs is not None:
        _bind_outputs(program, names, outputs, env)
    with torch.no_grad(), without_autocast():
        if isinstance(executor, ExprEvalExecutor):
            executor.run_into(env, () if outputs is None else names)
        else:
            if outputs is None:
                _allocate_outputs(program, names, env, device)
            executor.run(env)
    return [env.tensor(name) for name in names]


def _environment(
    program: Program,
    args: Sequence[Argument],
    trace: Trace | None,
    device: torch.device,
    rank: int,
) -> Environment:
    fusion = program.fusion
    values = dict(zip(fusion.inputs, args, strict=True))
    dtypes: dict[TensorName | ScalarName, DataType] = {
        **{name: definition.dtype for name, definition in fusion.tensors.items()},
        **{name: definition.dtype for name, definition in fusion.scalars.items()},
    }
    buffers = {name: buffer_of(program, name) for name in fusion.tensors}
    shapes = {name: buffer.shape for name, buffer in buffers.items()}
    placed = {
        name: Placed(buffer.sharding, buffer.extents)
        for name, buffer in buffers.items()
        if buffer.sharding is not None
    }
    sizes: dict[str, int] = {n: value for n, value in values.items() if isinstance(value, int)}
    env = Environment(dtypes, shapes, sizes, values, trace, placed, rank, device)
    for size in size_symbols(program):
        if buffers[size.tensor].is_on(rank):
            sizes[size.symbol] = env.tensor(size.tensor).shape[size.axis] * size.factor
    meshes = (buffer.mesh for buffer in buffers.values() if buffer.mesh is not None)
    extents = [extent for shape in shapes.values() for extent in shape]
    for entry in coordinates_in(extents, meshes):
        sizes[entry.symbol] = entry.of(rank)
    return env


def _sizes_of(buffer: HostBuffer, env: Environment) -> list[int]:
    return [evaluate(extent, env.sizes) for extent in buffer.shape]


def _allocate_outputs(
    program: Program, names: Sequence[TensorName], env: Environment, device: torch.device
) -> None:
    for name in names:
        buffer = buffer_of(program, name)
        dtype = to_torch_dtype(buffer.dtype)
        env.values[name] = allocate(_sizes_of(buffer, env), buffer.memory_order, dtype, device)


def _bind_outputs(
    program: Program,
    names: Sequence[TensorName],
    outputs: Sequence[torch.Tensor],
    env: Environment,
) -> None:
    if len(outputs) != len(names):
        raise UserError(f"run: {len(names)} outputs ({', '.join(names)}), {len(outputs)} given")
    for name, given in zip(names, outputs, strict=True):
        buffer = buffer_of(program, name)
        sizes, dtype = _sizes_of(buffer, env), to_torch_dtype(buffer.dtype)
        if list(given.shape) != sizes or given.dtype != dtype:
            raise UserError(
                f"run: output {name} is {dtype} of shape {sizes}, but the tensor given for it is "
                f"{given.dtype} of shape {list(given.shape)}"
            )
        if not is_dense(given, buffer.memory_order):
            raise UserError(
                f"run: output {name} lies in memory with axes {buffer.memory_order}, slowest "
                f"first, without gaps; the tensor given for it has strides {list(given.stride())}"
            )
        env.values[name] = given
