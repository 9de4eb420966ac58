"""A host program becomes an Executable: kernels compiled, nodes bound to a rank and a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from meshfuse.base.dtypes import DataType
from meshfuse.base.trace import Trace
from meshfuse.codegen.source import KernelSource
from meshfuse.host.nodes import Communicate, Evaluate, HostProgram, KernelName, Launch
from meshfuse.host.run import Executable, Step
from meshfuse.host.steps import Binding, bind_step
from meshfuse.ir.axes import ScalarName, TensorName
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
    dtypes: dict[TensorName | ScalarName, DataType] = {
        **{name: buffer.dtype for name, buffer in program.buffers.items()},
        **program.scalars,
    }
    shapes = {name: buffer.shape for name, buffer in program.buffers.items()}
    outside = is_outside(program, rank)
    binding = Binding(program, sources, compiler, rank, device, schedulers or {}, ids, trace)
    steps = () if outside else tuple(_bind_steps(program, binding))
    return Executable(program, rank, outside, steps, dtypes, shapes)


def _bind_steps(program: HostProgram, binding: Binding) -> Iterator[Step]:
    """Executors are numbered in the order of the body: the groups of their ids."""
    group = 0
    for node in program.body:
        yield bind_step(node, replace(binding, ids=replace(binding.ids, group=group)))
        group += isinstance(node, Launch | Evaluate | Communicate)


def is_outside(program: HostProgram, rank: int) -> bool:
    """Whether `rank` is in none of the program's meshes: it holds and does nothing."""
    meshes = {b.mesh for b in program.buffers.values() if b.mesh is not None}
    return bool(meshes) and all(rank not in mesh.ids for mesh in meshes)
