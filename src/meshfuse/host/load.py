"""A host program becomes an Executable: kernels compiled, nodes bound to a rank and a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count

import torch

from meshfuse.base.dtypes import DataType
from meshfuse.base.trace import Trace
from meshfuse.codegen.source import KernelSource
from meshfuse.expr import IntExpr, free_symbols
from meshfuse.host.actions import Step
from meshfuse.host.loop_steps import LoopStep
from meshfuse.host.memory_steps import bind_empty
from meshfuse.host.nodes import (
    Communicate,
    Evaluate,
    ForLoop,
    HostProgram,
    KernelName,
    Launch,
    Node,
    OnStream,
    all_nodes,
)
from meshfuse.host.plan import Drawing, Executable, Names
from meshfuse.host.presence import NodeHere, is_outside, nodes_here
from meshfuse.host.shared_sources import SharedSource, shared_sources
from meshfuse.host.steps import Binding, bind_step, collectives_filling
from meshfuse.host.stream_steps import OnStreamStep
from meshfuse.host.transfer_step import has_peer_memory
from meshfuse.host.uses import names_defined, names_needed
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.ops import Expr
from meshfuse.runtime.compile import KernelCompiler
from meshfuse.runtime.evaluate_ops import Placed
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
    kernel, `ids` which program it is; `trace` gets a span for all that is compiled. What is done on
    meshes that lack the rank is left out, and tensors there are empty. Raises CompilationFailed.
    """
    if compiler is not None:
        compiler.compile_all(tuple(sources.values()), trace)
    names = _name_slots(program)
    outside = is_outside(program, rank)
    prologue, body = _split_prologue(program)
    binding = Binding(
        program,
        names,
        sources,
        compiler,
        rank,
        device,
        schedulers or {},
        ids,
        trace,
        filling=collectives_filling(program),
        shared=_shared_on(program, rank, device),
    )
    here = () if outside else tuple(nodes_here(program, body, rank))
    others = () if outside else tuple(_inputs_elsewhere(program, rank))
    steps = tuple(_bind_steps(((None, others), *here), binding, count()))
    symbols = _symbols_of(program, [node for node, _ in here if node is not None])
    drawing = _drawing_of(program, names, device)
    return Executable(program, rank, outside, names, prologue, steps, symbols, drawing, device)


def _shared_on(
    program: HostProgram, rank: int, device: torch.device
) -> dict[TensorName, SharedSource]:
    """What a rank makes where its peers reach it."""
    if not has_peer_memory(device):
        return {}
    found = shared_sources(program).items()
    return {name: source for name, source in found if program.buffers[name].is_on(rank)}


def _drawing_of(program: HostProgram, names: Names, device: torch.device) -> Drawing | None:
    """All ranks that hold any part take part."""
    source = program.random
    if source is None:
        return None
    meshes = [buffer.mesh for buffer in program.buffers.values() if buffer.mesh is not None]
    team = tuple(sorted({rank for mesh in meshes for rank in mesh.ids}))
    seed, offset = names.slots[source.seed], names.slots[source.offset]
    return Drawing(seed, offset, source.draws, team, device)


def _name_slots(program: HostProgram) -> Names:
    slots: dict[TensorName | ScalarName, int] = {}
    for name in (*program.inputs, *program.buffers, *program.scalars):
        slots.setdefault(name, len(slots))
    dtypes: dict[TensorName | ScalarName, DataType] = {
        **{name: buffer.dtype for name, buffer in program.buffers.items()},
        **program.scalars,
    }
    placed = {
        name: Placed(buffer.sharding, buffer.extents)
        for name, buffer in program.buffers.items()
        if buffer.sharding is not None
    }
    shapes = {name: buffer.shape for name, buffer in program.buffers.items()}
    return Names(slots, dtypes, shapes, placed)


def _split_prologue(program: HostProgram) -> tuple[tuple[Expr, ...], tuple[Node, ...]]:
    """The arithmetic on scalars at the head of the body, and the rest."""
    prologue: list[Expr] = []
    for place, node in enumerate(program.body):
        made = names_defined(node)
        if not isinstance(node, Evaluate) or not made or not program.scalars.keys() >= set(made):
            return tuple(prologue), program.body[place:]
        prologue += node.body
    return tuple(prologue), ()


def _symbols_of(program: HostProgram, body: Iterable[Node]) -> tuple[str, ...]:
    """What operations through torch name: sizes of their tensors, and integers that they take.

    Other steps say themselves what sizes they need.
    """
    sizes: list[IntExpr] = []
    indices: set[str] = set()
    for node in all_nodes(body):
        if isinstance(node, ForLoop):
            indices.add(node.index)
        if isinstance(node, Evaluate):
            sizes += [x for expr in node.body for x in expr.ins if isinstance(x, IntExpr)]
            names = (*names_needed(node), *(out for expr in node.body for out in expr.outs))
            for buffer in (program.buffers.get(TensorName(name)) for name in names):
                sizes += () if buffer is None else (*buffer.shape, *buffer.extents)
    names = dict.fromkeys(found.name for size in sizes for found in free_symbols(size))
    return tuple(name for name in names if name not in indices)


def _inputs_elsewhere(program: HostProgram, rank: int) -> Iterator[TensorName]:
    """Inputs on meshes without the rank. Of one that nobody has placed it is given the whole."""
    for name in program.inputs:
        buffer = program.buffers.get(TensorName(name))
        if buffer is not None and not buffer.is_on(rank):
            yield TensorName(name)


def _bind_steps(
    body: Iterable[NodeHere], binding: Binding, groups: Iterator[int]
) -> Iterator[Step]:
    """Executors are numbered in the order of the text: the groups of their ids."""
    for node, elsewhere in body:
        if isinstance(node, ForLoop | OnStream):
            inside = nodes_here(binding.program, node.body, binding.rank)
            if isinstance(node, ForLoop):
                around = replace(binding, loops=(*binding.loops, node.index))
                steps = tuple(_bind_steps(inside, around, groups))
                yield LoopStep.of(node.index, node.count, steps)
            else:
                steps = tuple(_bind_steps(inside, binding, groups))
                yield OnStreamStep.of(node.stream, steps)
        elif isinstance(node, Launch | Evaluate | Communicate):
            ids = replace(binding.ids, group=next(groups))
            yield bind_step(node, replace(binding, ids=ids))
        elif node is not None:
            yield bind_step(node, binding)
        if elsewhere:
            yield bind_empty(elsewhere, binding)
