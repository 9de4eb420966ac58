"""A host program becomes an Executable: kernels compiled, nodes bound to a rank and a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from meshfuse.base.dtypes import DataType
from meshfuse.base.trace import Trace
from meshfuse.codegen.source import KernelSource
from meshfuse.expr import IntExpr, free_symbols
from meshfuse.host.nodes import Communicate, Evaluate, HostProgram, KernelName, Launch, Node
from meshfuse.host.plan import Executable, Names, Step
from meshfuse.host.steps import Binding, bind_step
from meshfuse.host.uses import names_defined
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.ops import Expr
from meshfuse.runtime.compile import KernelCompiler
from meshfuse.runtime.executors import ALONE_IDS, ExecutorIds


def load(
    program: HostProgram,
    sources: Mapping[KernelName, KernelSource],
    compiler: KernelCompiler | None,
    rank: int,
    device: torch.device,
    schedulers: Mapping[KernelName, str] | None = None,
    ids: ExecutorIds = ALONE_IDS,
    trace: Trace | None = None,
) -> Executable:
    """Compile all kernels, several at a time, and bind every node for one rank.

    `compiler` may be None for a program without kernels. `schedulers` says who scheduled each
    kernel, `ids` which program it is; `trace` gets a span for all that is compiled. Nothing is
    bound on a rank outside the program's mesh. Raises CompilationFailed.
    """
    if compiler is not None:
        compiler.compile_all(tuple(sources.values()), trace)
    names = _name_slots(program)
    outside = is_outside(program, rank)
    prologue, body = _split_prologue(program)
    binding = Binding(program, names, sources, compiler, rank, device, schedulers or {}, ids, trace)
    steps = () if outside else tuple(_bind_steps(body, binding))
    return Executable(program, rank, outside, names, prologue, steps, _symbols_of(program))


def _name_slots(program: HostProgram) -> Names:
    slots: dict[TensorName | ScalarName, int] = {}
    for name in (*program.inputs, *program.buffers, *program.scalars):
        slots.setdefault(name, len(slots))
    dtypes: dict[TensorName | ScalarName, DataType] = {
        **{name: buffer.dtype for name, buffer in program.buffers.items()},
        **program.scalars,
    }
    return Names(slots, dtypes, {name: buffer.shape for name, buffer in program.buffers.items()})


def _split_prologue(program: HostProgram) -> tuple[tuple[Expr, ...], tuple[Node, ...]]:
    """The arithmetic on scalars at the head of the body, and the rest."""
    prologue: list[Expr] = []
    for place, node in enumerate(program.body):
        made = names_defined(node)
        if not isinstance(node, Evaluate) or not made or not program.scalars.keys() >= set(made):
            return tuple(prologue), program.body[place:]
        prologue += node.body
    return tuple(prologue), ()


def _symbols_of(program: HostProgram) -> tuple[str, ...]:
    """All that sizes are made of: of buffers and kernels, and integers that operations take."""
    sizes = [extent for buffer in program.buffers.values() for extent in buffer.shape]
    sizes += [extent for demand in program.demands for extent in demand.extents]
    for node in program.body:
        if isinstance(node, Launch):
            sizes += node.sizes.values()
        if isinstance(node, Evaluate):
            sizes += [x for expr in node.body for x in expr.ins if isinstance(x, IntExpr)]
    found = dict.fromkeys(symbol.name for size in sizes for symbol in free_symbols(size))
    return tuple(found)


def _bind_steps(body: Sequence[Node], binding: Binding) -> Iterator[Step]:
    """Executors are numbered in the order of the body: the groups of their ids."""
    group = 0
    for node in body:
        yield bind_step(node, replace(binding, ids=replace(binding.ids, group=group)))
        group += isinstance(node, Launch | Evaluate | Communicate)


def is_outside(program: HostProgram, rank: int) -> bool:
    """Whether `rank` is in none of the program's meshes: it holds and does nothing."""
    meshes = {b.mesh for b in program.buffers.values() if b.mesh is not None}
    return bool(meshes) and all(rank not in mesh.ids for mesh in meshes)
