"""Segments to a host program: local buffers, launches, communications posted and awaited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

from meshfuse.base.dtypes import ITEM_BYTES, is_floating
from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.options import NO_OPTIONS, Options
from meshfuse.dist.executors import CommunicationExecutor
from meshfuse.expr import IntExpr, free_symbols
from meshfuse.facts.facts import Facts, facts_of
from meshfuse.facts.layout import layout_of, local_bytes, without_single
from meshfuse.facts.moved_parts import packing_reason, slices_in_place
from meshfuse.host.dispatch import executor_class
from meshfuse.host.lifetimes import with_early_posts, with_frees, with_waits
from meshfuse.host.nodes import (
    Allocate,
    Collective,
    Communicate,
    Coordinate,
    Evaluate,
    HostBuffer,
    HostOutput,
    HostProgram,
    KernelName,
    Launch,
    Node,
    Pick,
    View,
)
from meshfuse.host.sizes import (
    buffer_of,
    check_symbols,
    coordinates_in,
    coverage_demands,
    divisibility_demands,
    size_demands,
    size_symbols,
)
from meshfuse.host.uses import names_defined, names_needed
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.comm import (
    AllGather,
    AllReduce,
    Communication,
    Exchange,
    LocalSlice,
    ReduceScatter,
)
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.ops import Broadcast, Cast, Expand, Expr, Permute, Reshape, Set, Squeeze
from meshfuse.ir.ops_random import RandomSource
from meshfuse.ir.printer import print_expr
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import MemoryType
from meshfuse.kernel.nodes import IndexName, Kernel
from meshfuse.segment.segments import SegmentedProgram

_SAVED = ".saved"
"""Suffix of the copy of a tensor whose memory an update in place overwrites."""


@final
@frozen_dataclass
class LoweredKernel:
    """The kernel of a segment. `sizes`: its extents' symbols, as expressions in the program's."""

    kernel: Kernel
    sizes: Mapping[IndexName, IntExpr]


def lower_to_host(
    segmented: SegmentedProgram,
    kernels: Mapping[str, LoweredKernel],
    options: Options = NO_OPTIONS,
) -> HostProgram:
    """The host program of a segmented program.

    `kernels` are by segment name; a segment that is no communication and has none is evaluated op
    by op. `options` say how ranks' terms are added. Raises Unsupported for a size that no input
    gives.
    """
    program = segmented.program
    facts, fusion = facts_of(program), program.fusion
    body = [*_scalar_sizes(program), *_lower_segments(segmented, facts, kernels, options)]
    outputs, copies = _lower_outputs(program, facts)
    launched = {KernelName(found.kernel.name): found.kernel for found in kernels.values()}
    body = list(with_waits([*with_early_posts(body, launched), *copies]))
    kept = {output.buffer for output in outputs} | set(fusion.inputs) | set(fusion.scalars)
    buffers = _buffers(program, body)
    symbols = size_symbols(program)
    coordinates = _coordinates(program, buffers, body)
    given = [entry.symbol for entry in (*symbols, *coordinates)]
    check_symbols(buffers.values(), [*given, *fusion.scalars])
    return HostProgram(
        inputs=fusion.inputs,
        outputs=outputs,
        scalars={name: value.dtype for name, value in fusion.scalars.items()},
        symbols=symbols,
        demands=(
            *size_demands(program),
            *coverage_demands(program),
            *divisibility_demands(program),
        ),
        buffers=buffers,
        kernels=launched,
        body=tuple(with_frees(body, kept)),
        coordinates=tuple(coordinates),
        random=next((e for e in fusion.exprs if isinstance(e, RandomSource)), None),
    )


def _coordinates(
    program: Program, buffers: Mapping[TensorName, HostBuffer], body: Sequence[Node]
) -> list[Coordinate]:
    """Those that local sizes name."""
    extents = [extent for buffer in buffers.values() for extent in buffer.shape]
    extents += [e for node in body if isinstance(node, Launch) for e in node.sizes.values()]
    schedules = program.schedules.values()
    return coordinates_in(extents, (s.mesh for s in schedules if s.mesh is not None))


def _scalar_sizes(program: Program) -> Iterator[Evaluate]:
    """The arithmetic on scalars that sizes come from, in front of all else."""
    fusion = program.fusion
    extents = [axis.extent for value in fusion.tensors.values() for axis in value.logical]
    operands = [x for expr in fusion.exprs for x in expr.ins if isinstance(x, IntExpr)]
    needed: set[str] = {s.name for size in (*extents, *operands) for s in free_symbols(size)}
    body: list[Expr] = []
    for expr in reversed(fusion.exprs):
        if needed.intersection(expr.outs) and all(out in fusion.scalars for out in expr.outs):
            needed.update(name for name in expr.ins if isinstance(name, str))
            body.insert(0, expr)
    if body:
        yield Evaluate(body=tuple(body))


# Segments.


def _lower_segments(
    segmented: SegmentedProgram,
    facts: Facts,
    kernels: Mapping[str, LoweredKernel],
    options: Options,
) -> Iterator[Node]:
    number = 0
    for segment in segmented.segments:
        if executor_class(segment.scheduler) is CommunicationExecutor:
            for expr in segment.program.fusion.exprs:
                yield from lower_communication(segmented.program, facts, expr, number, options)
                number += not isinstance(expr, LocalSlice)
        elif segment.name in kernels:
            yield from _lower_kernel(segmented.program, kernels[segment.name])
        else:
            yield Evaluate(body=segment.program.fusion.exprs)


def _lower_kernel(program: Program, lowered: LoweredKernel) -> Iterator[Node]:
    kernel = lowered.kernel
    for buffer in kernel.buffers:
        if buffer.written:
            yield _allocate(program, TensorName(buffer.name))
    yield Launch(
        KernelName(kernel.name),
        tuple(TensorName(buffer.name) for buffer in kernel.buffers),
        tuple(ScalarName(scalar.name) for scalar in kernel.scalars),
        {name: lowered.sizes[name] for name in kernel.sizes if name in lowered.sizes},
    )


def lower_communication(
    program: Program, facts: Facts, expr: Expr, number: int, options: Options = NO_OPTIONS
) -> Iterator[Node]:
    """The nodes of a communication, its buffer's among them; the wait is placed later."""
    if not isinstance(expr, Communication):
        raise InvariantError(f"{print_expr(expr)} stands in a communication segment")
    mesh = program.schedule(expr.src).mesh
    if mesh is None:
        raise InvariantError(f"{print_expr(expr)}: {expr.src} has no mesh")
    if isinstance(expr, LocalSlice):
        if slices_in_place(program, expr):
            yield View(expr.out, expr.src, expr.axis, mesh, expr.mesh_axis)
            return
        yield _allocate(program, expr.out)
        yield Pick(expr.out, expr.src, expr.axis, mesh, expr.mesh_axis)
        return
    yield _allocate(program, expr.out)
    node = _post(program, facts, expr, number, mesh)
    yield replace(node, in_team_order=_adds_in_team_order(program, node, options))


def _adds_in_team_order(program: Program, node: Communicate, options: Options) -> bool:
    dtype = program.tensor(node.src).dtype
    if node.function != "sum" or not is_floating(dtype):
        return False
    is_half = ITEM_BYTES[dtype] == 2
    return options.is_enabled("deterministic_collectives") or (
        is_half and options.is_enabled("float32_collectives")
    )


def _post(
    program: Program, facts: Facts, expr: Communication, number: int, mesh: DeviceMesh
) -> Communicate:
    mesh_axis, function, to_mesh = None, None, None
    match expr:
        case AllGather(mesh_axis=mesh_axis):
            collective = Collective.all_gather
        case ReduceScatter(mesh_axis=mesh_axis, function=function):
            collective = Collective.reduce_scatter
        case AllReduce(mesh_axis=mesh_axis, function=function):
            collective = Collective.all_reduce
        case Exchange():
            collective, to_mesh = Collective.exchange, program.schedule(expr.out).mesh
        case _:
            raise InvariantError(f"{print_expr(expr)} is no collective of the host program")
    return Communicate(
        expr.out,
        collective,
        expr.src,
        number,
        mesh,
        mesh_axis,
        local_bytes(program, expr.src),
        _cause(facts, expr),
        function,
        None if to_mesh == mesh else to_mesh,
        packed=not _is_straight(program, expr),
    )


def _allocate(program: Program, tensor: TensorName) -> Allocate:
    return Allocate(tensor, MemoryType.global_, local_bytes(program, tensor))


def _is_straight(program: Program, expr: Communication) -> bool:
    """Whether the ranks' parts lie one after the other in memory, and each alike on both sides."""
    if packing_reason(program, expr) is not None:
        return False
    orders = [_order(program, tensor) for tensor in (expr.src, expr.out)]
    if isinstance(expr, AllGather | ReduceScatter):
        order = orders[isinstance(expr, AllGather)]  # of the side that has all parts
        if expr.axis in order and order[0] != expr.axis:
            return False
        orders = [tuple(dim for dim in order if dim != expr.axis) for order in orders]
    elif orders[0] != orders[1]:
        raise InvariantError(f"{print_expr(expr)}: the memory orders are {orders}")
    return orders[0] == orders[1]


def _order(program: Program, tensor: TensorName) -> tuple[int, ...]:
    return without_single(program, tensor, layout_of(program, tensor).order)


def _cause(facts: Facts, expr: Communication) -> str:
    """The op that needs a gather or left partial results, copies for layout passed over."""
    if isinstance(expr, AllGather):
        reader, name = _first_reader(facts, expr.out), expr.out
        while isinstance(reader, Set):
            reader, name = _first_reader(facts, reader.out), reader.out
        return f"output {name}" if reader is None else print_expr(reader)
    maker = facts.definitions.get(expr.src)
    while isinstance(maker, Set):
        maker = facts.definitions.get(maker.src)
    return f"input {expr.src}" if maker is None else print_expr(maker)


def _first_reader(facts: Facts, tensor: TensorName) -> Expr | None:
    """The first op that reads a tensor; None for one that is only returned."""
    return next(iter(facts.uses.get(tensor, ())), None)


# Outputs.


def _lower_outputs(
    program: Program, facts: Facts
) -> tuple[tuple[HostOutput, ...], tuple[Evaluate, ...]]:
    """The outputs' buffers, and the copies at the end that update inputs in place.

    A returned tensor that an update also writes is that input. One that is an updated input, or may
    share its memory, is copied first: it keeps the value from before.
    """
    outputs = program.fusion.outputs
    updates = {o.tensor: o.alias for o in outputs if o.alias is not None}
    saved: dict[TensorName, Evaluate] = {}

    def lasting(tensor: TensorName) -> TensorName:
        if _memory_root(facts, tensor) not in updates.values():
            return tensor
        copy = TensorName(f"{tensor}{_SAVED}")
        saved[copy] = Evaluate(body=(Set(copy, tensor),))
        return copy

    results = tuple(
        HostOutput(output.tensor, output.alias)
        if output.alias is not None
        else HostOutput(updates.get(output.tensor) or lasting(output.tensor))
        for output in outputs
    )
    copies = tuple(
        Evaluate(into=alias, body=(Set(alias, lasting(tensor)),))
        for tensor, alias in updates.items()
    )
    return results, (*saved.values(), *copies)


def _buffers(program: Program, body: Sequence[Node]) -> dict[TensorName, HostBuffer]:
    """The buffers of the program's inputs and of all that the body makes."""
    names = dict.fromkeys(program.fusion.inputs)
    for node in body:
        names.update(dict.fromkeys((*names_needed(node), *names_defined(node))))
    buffers: dict[TensorName, HostBuffer] = {}
    for name in names:
        original = TensorName(name.removesuffix(_SAVED))
        if original in program.fusion.tensors:
            buffers[TensorName(name)] = replace(buffer_of(program, original), name=TensorName(name))
    return buffers


def _memory_root(facts: Facts, tensor: TensorName) -> TensorName:
    """The tensor whose memory `tensor` may share, going back over what can be a view."""
    expr = facts.definitions.get(tensor)
    while isinstance(expr, Broadcast | Cast | Expand | LocalSlice | Permute | Reshape | Squeeze):
        tensor = expr.src
        expr = facts.definitions.get(tensor)
    return tensor
