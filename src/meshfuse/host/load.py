"""A host program becomes an Executable: kernels compiled, nodes bound to a rank and a device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from meshfuse.base.dtypes import DataType
from meshfuse.codegen.source import KernelSource
from meshfuse.host.nodes import HostProgram, KernelName
from meshfuse.host.run import Executable
from meshfuse.host.steps import Binding, bind_step
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.runtime.compile import KernelCompiler


def load(
    program: HostProgram,
    sources: Mapping[KernelName, KernelSource],
    compiler: KernelCompiler | None,
    rank: int,
    device: torch.device,
) -> Executable:
    """Compile all kernels, several at a time, and bind every node for one rank.

    `compiler` may be None for a program without kernels. Nothing is bound on a rank outside the
    program's mesh. Raises CompilationFailed.
    """
    if compiler is not None:
        compiler.compile_all(tuple(sources.values()))
    dtypes: dict[TensorName | ScalarName, DataType] = {
        **{name: buffer.dtype for name, buffer in program.buffers.items()},
        **program.scalars,
    }
    shapes = {name: buffer.shape for name, buffer in program.buffers.items()}
    outside = is_outside(program, rank)
    binding = Binding(program, sources, compiler, rank, device)
    steps = () if outside else tuple(bind_step(node, binding) for node in program.body)
    return Executable(program, rank, outside, steps, dtypes, shapes)


def is_outside(program: HostProgram, rank: int) -> bool:
    """Whether `rank` is in none of the program's meshes: it holds and does nothing."""
    meshes = {b.mesh for b in program.buffers.values() if b.mesh is not None}
    return bool(meshes) and all(rank not in mesh.ids for mesh in meshes)
