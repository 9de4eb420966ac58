"""Segments and loops to nodes: allocations, launches, evaluations, communications posted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard, final

from meshfuse.base.dtypes import ITEM_BYTES, is_floating
from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.options import NO_OPTIONS, Options
from meshfuse.dist.executors import CommunicationExecutor
from meshfuse.expr import IntExpr, const, known_less
from meshfuse.facts.facts import Facts, tensor_operands, tensor_outputs
from meshfuse.facts.layout import is_contiguous, layout_of, local_bytes, without_single
from meshfuse.facts.moved_parts import packing_reason, slices_in_place
from meshfuse.host.dispatch import executor_class
from meshfuse.host.nodes import (
    Allocate,
    Chunk,
    Clear,
    Collective,
    Communicate,
    Evaluate,
    ForLoop,
    KernelName,
    Launch,
    Node,
    Pick,
    View,
)
from meshfuse.host.uses import WRITERS
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.comm import (
    AllGather,
    AllReduce,
    Communication,
    Deliver,
    Exchange,
    Fetch,
    LocalSlice,
    ReduceScatter,
)
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.ops import Expr, Reshape, Set
from meshfuse.ir.printer import print_expr
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import map_names
from meshfuse.ir.schedule import MemoryType
from meshfuse.kernel.nodes import IndexName, Kernel
from meshfuse.passes.chunk_tensors import is_of_pieces
from meshfuse.segment.segments import Loop, Segment, SegmentedProgram, Slice

MADE = ".made"
"""Suffix of what is made beside a chunk of a tensor and then copied into it."""


@final
@frozen_dataclass
class LoweredKernel:
    """The kernel of a segment. `sizes`: its extents' symbols, as expressions in the program's."""

    kernel: Kernel
    sizes: Mapping[IndexName, IntExpr]


@final
@dataclass(slots=True, eq=False, repr=False)
class _Lowering:
    """What segments are lowered with, and how many communications there are so far.

    `slices` are the chunks that are views, by name; `sums` the tensors that iterations add to, by
    the names that they have in the loop, and `sum_loops` those loops; of these tensors, `begun` are
    written by the first iteration. `wholes`: what each iteration makes alike, by name in the loop.
    `shown`: slices that are there at this place. `delivered` are chunks that go to other ranks as
    they are made, out of memory that those can read.
    """

    program: Program
    facts: Facts
    kernels: Mapping[str, LoweredKernel]
    options: Options
    number: int = 0
    slices: dict[TensorName, Slice] = field(default_factory=dict[TensorName, Slice])
    sums: dict[TensorName, TensorName] = field(default_factory=dict[TensorName, TensorName])
    sum_loops: dict[TensorName, Loop] = field(default_factory=dict[TensorName, Loop])
    begun: set[TensorName] = field(default_factory=set[TensorName])
    wholes: dict[TensorName, TensorName] = field(default_factory=dict[TensorName, TensorName])
    shown: frozenset[TensorName] = frozenset()
    delivered: frozenset[TensorName] = frozenset()

    def allocate(self, name: TensorName) -> Allocate:
        """Memory for what is made next."""
        if name in self.delivered:
            return Allocate(name, MemoryType.symmetric, local_bytes(self.program, name))
        return _allocate(self.program, name)

    def sum_name(self, name: TensorName) -> TensorName | None:
        """The name in `sums` of what `name` is, or a chunk of it."""
        while name in self.slices:
            name = self.slices[name].src
        return name if name in self.sums else None

    def exists(self, name: TensorName) -> bool:
        """Whether a result has memory already."""
        return name in self.slices or self.memory_name(name) != name

    def writes(self, name: TensorName) -> bool:
        """Whether a result is written into memory that exists or is allocated for it."""
        return self.exists(name) or name in self.delivered

    def memory_name(self, name: TensorName) -> TensorName:
        """The name outside of what a loop adds to or makes alike, else the name itself."""
        return self.wholes.get(name) or self.sums.get(name, name)

    def show(self, names: Sequence[TensorName]) -> Iterator[Chunk]:
        """Those of `names` that are slices and not there yet."""
        for name in names:
            found = self.slices.get(name)
            if found is not None and name not in self.shown:
                yield from self.show([found.src])
                self.shown |= {name}
                src = self.memory_name(found.src)
                yield Chunk(name, src, found.axis, found.start, found.pieces)


def lower_segments(
    segmented: SegmentedProgram,
    facts: Facts,
    kernels: Mapping[str, LoweredKernel],
    options: Options,
) -> list[Node]:
    """The nodes of all segments, without waits and frees. `facts` are the program's."""
    found = (expr for expr in segmented.program.fusion.exprs if isinstance(expr, Deliver))
    delivered = frozenset(expr.src for expr in found)
    work = _Lowering(segmented.program, facts, kernels, options, delivered=delivered)
    return list(_lower(work, segmented.items))


def _lower(work: _Lowering, items: Sequence[Segment | Loop]) -> Iterator[Node]:
    for item in items:
        if isinstance(item, Loop):
            yield from _lower_loop(work, item)
        elif executor_class(item.scheduler) is CommunicationExecutor:
            for expr in item.program.fusion.exprs:
                yield from _lower_communication(work, expr)
        elif item.name in work.kernels:
            yield from _lower_kernel(work, work.kernels[item.name])
        else:
            yield from _lower_evaluation(work, item)


# Loops.


def _lower_loop(work: _Lowering, loop: Loop) -> Iterator[Node]:
    """The loop, behind the memory of what it makes.

    Sums begin with zeros where a kernel adds to them, for it always reads them, and where there may
    be no iteration; else the first iteration writes them. So do what each iteration makes alike.
    """
    sums = dict.fromkeys((*loop.sums.values(), *loop.wholes.values()))
    yield from work.show((*loop.made, *sums))
    made = (name for name in (*loop.made, *sums) if not work.exists(name))
    yield from (_allocate(work.program, name) for name in made)
    shown = work.shown
    work.slices.update({found.out: found for found in loop.slices})
    work.sums.update(loop.sums)
    work.wholes.update(loop.wholes)
    work.sum_loops.update(dict.fromkeys(loop.sums, loop))
    body = tuple(_lower(work, loop.body))
    work.shown = shown
    begun = work.begun if known_less(const(0), loop.count) else set[TensorName]()
    yield from (Clear(name) for name in sums if name not in begun)
    yield ForLoop(IndexName(loop.index.name), loop.count, body)


# Kernels and operations through torch.


def _lower_kernel(work: _Lowering, lowered: LoweredKernel) -> Iterator[Node]:
    kernel = lowered.kernel
    names = [TensorName(buffer.name) for buffer in kernel.buffers]
    yield from work.show(names)
    for name, buffer in zip(names, kernel.buffers, strict=True):
        if buffer.written and not work.exists(name):
            yield work.allocate(name)
    yield Launch(
        KernelName(kernel.name),
        tuple(map(work.memory_name, names)),
        tuple(ScalarName(scalar.name) for scalar in kernel.scalars),
        {name: lowered.sizes[name] for name in kernel.sizes if name in lowered.sizes},
    )


def _lower_evaluation(work: _Lowering, segment: Segment) -> Iterator[Node]:
    """What goes into memory that exists, or that peers read, is an evaluation of its own."""
    program, waiting = segment.program, list[Expr]()
    for expr in program.fusion.exprs:
        outs = [out for out in tensor_outputs(program, expr) if work.writes(out)]
        total = next(filter(None, map(work.sum_name, outs)), None)
        if total is None:
            yield from work.show(tensor_operands(program, expr))
        if not outs:
            waiting.append(expr)
            continue
        writers = _take_writers(waiting, expr, outs, is_sum=total is not None)
        if waiting:
            yield Evaluate(body=tuple(waiting))
            waiting.clear()
        sum_over = None if total is None else IndexName(work.sum_loops[total].index.name)
        work.begun.update(map(work.memory_name, [total] if total else outs))
        for out, writer in writers.items():
            yield from work.show([out])
            into = work.memory_name(out)
            if not work.exists(out):
                yield work.allocate(out)
            yield Evaluate(into, (map_names(writer, {writer.outs[0]: into}),), sum_over)
    if waiting:
        yield Evaluate(body=tuple(waiting))


def _take_writers(
    waiting: list[Expr], expr: Expr, outs: Sequence[TensorName], *, is_sum: bool
) -> dict[TensorName, Expr]:
    """What is written into each of `outs`, or added to a sum; what that is made of is left in
    `waiting`."""
    if is_sum:  # out = add(what it was, term)
        (out,), term = outs, TensorName(str(expr.ins[1]))
        is_made_here = waiting and waiting[-1].outs == (term,)
        return {out: waiting.pop() if is_made_here else Set(out, term)}
    if isinstance(expr, WRITERS):
        return {outs[0]: expr}
    made = {out: TensorName(f"{out}{MADE}") for out in outs}
    waiting.append(map_names(expr, dict(made.items())))
    return {out: Set(out, name) for out, name in made.items()}


# Communications.


def _lower_communication(work: _Lowering, expr: Expr) -> Iterator[Node]:
    """A result that is a view goes there directly where the collective can write it."""
    (out,) = tensor_outputs(work.program, expr)
    yield from work.show(tensor_operands(work.program, expr))
    number = work.number
    work.number += not isinstance(expr, LocalSlice)
    nodes = list(lower_communication(work.program, work.facts, expr, number, work.options))
    if out not in work.slices:
        yield from nodes
    elif isinstance(expr, Fetch | Deliver):
        made = TensorName(f"{out}{MADE}")
        assert isinstance(nodes[-1], Communicate)
        yield from work.show([out])
        yield replace(nodes[-1], out=made)
        yield Evaluate(into=out, body=(Set(out, made),))
    elif is_contiguous(work.program, out) or _is_packed(nodes[-1]):
        yield from work.show([out])
        yield nodes[-1]
    else:
        made = TensorName(f"{out}{MADE}")
        yield Allocate(made, MemoryType.global_, local_bytes(work.program, out))
        assert isinstance(nodes[-1], Communicate)
        yield replace(nodes[-1], out=made)
        yield from work.show([out])
        yield Evaluate(into=out, body=(Set(out, made),))


def _is_packed(node: Node) -> bool:
    return isinstance(node, Communicate) and node.packed


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
    if not isinstance(expr, Fetch | Deliver):
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
    mesh_axis, function, to_mesh, owner = None, None, None, None
    match expr:
        case AllGather(mesh_axis=mesh_axis):
            collective = Collective.all_gather
        case ReduceScatter(mesh_axis=mesh_axis, function=function):
            collective = Collective.reduce_scatter
        case AllReduce(mesh_axis=mesh_axis, function=function):
            collective = Collective.all_reduce
        case Fetch(mesh_axis=mesh_axis, owner=owner):
            collective = Collective.fetch
        case Deliver(mesh_axis=mesh_axis, owner=owner):
            collective = Collective.deliver
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
        packed=owner is None and not _is_straight(program, expr),
        owner=owner,
    )


def _allocate(program: Program, tensor: TensorName) -> Allocate:
    return Allocate(tensor, MemoryType.global_, local_bytes(program, tensor))


def _is_straight(program: Program, expr: Communication) -> bool:
    """Whether the ranks' parts lie one after the other in memory, and each alike on both sides."""
    if packing_reason(program, expr) is not None:
        return False
    if not isinstance(expr, AllReduce) and not is_contiguous(program, expr.out):
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
    if isinstance(expr, AllGather | Fetch):
        reader, name = _first_reader(facts, expr.out), expr.out
        while _is_for_layout(reader):
            reader, name = _first_reader(facts, reader.out), reader.out
        return f"output {name}" if reader is None else print_expr(reader)
    maker = facts.definitions.get(expr.src)
    while _is_for_layout(maker):
        maker = facts.definitions.get(maker.src)
    return f"input {expr.src}" if maker is None else print_expr(maker)


def _is_for_layout(expr: Expr | None) -> TypeGuard[Set | Reshape]:
    return isinstance(expr, Set) or (isinstance(expr, Reshape) and is_of_pieces(expr))


def _first_reader(facts: Facts, tensor: TensorName) -> Expr | None:
    """The first op that reads a tensor; None for one that is only returned."""
    return next(iter(facts.uses.get(tensor, ())), None)
