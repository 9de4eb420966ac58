"""Nodes of the host program bound to what they need at run time: one Step each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import singledispatch
from itertools import islice
from typing import final

import torch

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.trace import Trace, Work
from meshfuse.codegen.source import KernelSource
from meshfuse.dist.bound_collectives import (
    BoundCollective,
    PlacedTensor,
)
from meshfuse.dist.executors import CommunicationExecutor
from meshfuse.expr import IntExpr
from meshfuse.host.actions import Action, Bound, Sizes, Slots, Step, Traced
from meshfuse.host.events import AwaitWork, PostCollective
from meshfuse.host.nodes import (
    Allocate,
    Collective,
    Communicate,
    Evaluate,
    ForLoop,
    Free,
    HostBuffer,
    HostProgram,
    KernelName,
    Launch,
    OnStream,
    Wait,
    all_nodes,
)
from meshfuse.host.plan import Names
from meshfuse.host.shared_sources import SharedSource
from meshfuse.host.transfer_step import (
    TransferStep,
    bind_transfer,
)
from meshfuse.host.uses import names_defined, names_needed
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Linear, MatMul
from meshfuse.ir.schedule import MemoryType
from meshfuse.runtime.allocate import allocator, as_dense, dense_strides
from meshfuse.runtime.bound_exprs import Apply, Compute, Scope
from meshfuse.runtime.compile import KernelCompiler
from meshfuse.runtime.evaluate_ops import Environment
from meshfuse.runtime.executors import ALONE_IDS, ExecutorIds, ExprEvalExecutor, KernelExecutor
from meshfuse.runtime.torch_types import to_torch_dtype


@final
@frozen_dataclass
class Binding:
    """Where a program is loaded: the text of its kernels and who compiles it, rank and device.

    `schedulers` says who scheduled each kernel. `ids` are those of the executor of the node that is
    bound; `trace` gets a span for each that is compiled. `loops`: the indices of those around it.
    `filling`: see collectives_filling. `shared`: what the rank makes where its peers reach it, and
    fetch it.
    """

    program: HostProgram
    names: Names
    sources: Mapping[KernelName, KernelSource]
    compiler: KernelCompiler | None
    rank: int
    device: torch.device
    schedulers: Mapping[KernelName, str] = field(default_factory=dict[KernelName, str])
    ids: ExecutorIds = ALONE_IDS
    trace: Trace | None = None
    loops: tuple[str, ...] = ()
    filling: Mapping[TensorName, tuple[Communicate, ...]] = field(
        default_factory=dict[TensorName, tuple[Communicate, ...]]
    )
    shared: Mapping[TensorName, SharedSource] = field(
        default_factory=dict[TensorName, SharedSource]
    )

    @property
    def communications(self) -> int:
        """Of the program: by how many their numbers go on from one iteration to the next."""
        return sum(isinstance(node, Communicate) for node in all_nodes(self.program.body))

    def slots(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(self.names.slots[TensorName(name)] for name in names)


@singledispatch
def bind_step(node: object, binding: Binding) -> Step:
    """The step that does what `node` says."""
    raise InvariantError(f"{type(node).__name__} is no node of a host program")


# Kernels.


@final
@frozen_dataclass
class LaunchStep(Step):
    """`extents`: values for `symbols`, the kernel's, then the buffers' shapes of these `ranks`."""

    executor: KernelExecutor
    buffers: tuple[int, ...]
    scalars: tuple[int, ...]
    symbols: tuple[str, ...]
    ranks: tuple[int, ...]
    extents: tuple[IntExpr, ...]
    traced: Traced | None

    def bind(self, sizes: Sizes) -> Action:
        buffers, scalars = self.buffers, self.scalars
        values = iter(sizes.values)
        named = dict(zip(self.symbols, islice(values, len(self.symbols)), strict=True))
        elements = max(math.prod(islice(values, rank)) for rank in self.ranks)
        kernel = self.executor.bind(named, elements)

        def launch(slots: Slots) -> None:
            kernel([slots[i] for i in buffers], [slots[i] for i in scalars])

        return launch


@bind_step.register
def _(node: Launch, binding: Binding) -> Step:
    if binding.compiler is None:
        raise InvariantError(f"{node.kernel} is launched, but there is no compiler")
    source = binding.sources[node.kernel]
    scheduler = binding.schedulers.get(node.kernel, "none")
    executor = KernelExecutor(binding.compiler, binding.ids, scheduler)
    executor.compile(source, node.sizes, binding.trace)
    slots = binding.slots(node.buffers)
    written = [buffer.written for buffer in source.kernel.buffers]
    shapes = [binding.program.buffers[name].shape for name in node.buffers]
    return LaunchStep(
        executor,
        slots,
        binding.slots(node.scalars),
        tuple(node.sizes),
        tuple(map(len, shapes)),
        (*node.sizes.values(), *(extent for shape in shapes for extent in shape)),
        Traced(
            executor.work,
            tuple(slot for slot, out in zip(slots, written, strict=True) if not out),
            tuple(slot for slot, out in zip(slots, written, strict=True) if out),
        ),
    )


# Operations through torch.


@final
@frozen_dataclass
class Result:
    """A result that others read: they count on its memory order, and on its type and shape."""

    name: TensorName
    slot: int
    order: tuple[int, ...]
    dtype: torch.dtype
    rank: int


@final
@frozen_dataclass
class EvaluateStep(Step):
    """`extents`: shapes of the `results`. `sent`: the collective that the only one of them is made
    for, with room behind it for padding."""

    executor: ExprEvalExecutor
    node: Evaluate
    names: Names
    results: tuple[Result, ...]
    extents: tuple[IntExpr, ...]
    rank: int
    device: torch.device
    traced: Traced | None
    sent: BoundCollective | None

    def bind(self, sizes: Sizes) -> Action:
        names = self.names
        env = Environment(
            names.dtypes,
            names.shapes,
            dict(sizes.symbols),
            {},
            None,
            names.placed,
            self.rank,
            self.device,
        )
        scope = Scope(names.slots, env)
        room = 0 if self.sent is None else self.sent.padding(sizes.symbols)[0]
        if room:
            return self._bind_with_room(scope, sizes.values, room)
        values = iter(sizes.values)
        wanted = [
            (result, shape, dense_strides(shape, result.order))
            for result in self.results
            for shape in [tuple(islice(values, result.rank))]
        ]
        if self.node.into is None and len(wanted) == 1:
            compute = self.executor.bind_one(scope)
            if compute is not None:
                return _evaluating(compute, *wanted[0])
        run = self.executor.bind(scope, self.node.into, is_added=self.node.adds(sizes.symbols))
        if not wanted:
            return run

        def evaluate(slots: Slots) -> None:
            run(slots)
            for result, shape, strides in wanted:
                value = slots[result.slot]
                if value.stride() != strides or value.shape != shape or value.dtype != result.dtype:
                    slots[result.slot] = _as_wanted(value, result, shape)

        return evaluate

    def _bind_with_room(self, scope: Scope, shape: tuple[int, ...], room: int) -> Action:
        """The result is written into memory that goes on behind it: what is sent is not copied."""
        (result,) = self.results
        make = allocator(shape, result.order, result.dtype, self.device, room)
        write, slot = self.executor.bind(scope, result.name), result.slot

        def evaluate(slots: Slots) -> None:
            slots[slot] = make()
            write(slots)

        return evaluate


def _evaluating(
    compute: Compute, result: Result, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Action:
    """What puts the one result of an expression into its slot, as its readers want it."""
    slot, dtype = result.slot, result.dtype

    def evaluate(slots: Slots) -> None:
        value = compute(slots)
        if value.stride() != strides or value.shape != shape or value.dtype != dtype:
            value = _as_wanted(value, result, shape)
        slots[slot] = value

    if not isinstance(compute, Apply):
        return evaluate
    function, first, second = compute.function, compute.first, compute.second

    # as `evaluate`, with a frame less: what is called is torch's own function
    def apply(slots: Slots) -> None:
        value = function(slots[first], slots[second])
        if value.stride() != strides or value.shape != shape or value.dtype != dtype:
            value = _as_wanted(value, result, shape)
        slots[slot] = value

    return apply


def _as_wanted(value: torch.Tensor, result: Result, shape: tuple[int, ...]) -> torch.Tensor:
    """A result in the memory order that its readers count on; kernels check nothing any more."""
    if value.shape != shape or value.dtype != result.dtype:
        raise InvariantError(
            f"{result.name} must be {result.dtype} of shape {list(shape)}, but torch made "
            f"{value.dtype} of shape {list(value.shape)}"
        )
    return as_dense(value, result.order)


@bind_step.register
def _(node: Evaluate, binding: Binding) -> Step:
    if node.into is not None and len(node.body) != 1:
        raise InvariantError(f"update of {node.into}: one expression is wanted, not {node.body}")
    executor = ExprEvalExecutor(binding.ids)
    executor.compile(node.body, binding.trace)
    slots = binding.names.slots
    reads, made = names_needed(node), names_defined(node)
    results = _results_read(node, binding)
    return EvaluateStep(
        executor,
        node,
        binding.names,
        results,
        tuple(extent for r in results for extent in binding.program.buffers[r.name].shape),
        binding.rank,
        binding.device,
        Traced(
            executor.work,
            tuple(slots[name] for name in reads if name != node.into),
            tuple(slots[name] for name in (made or (node.into,)) if name is not None),
        ),
        _sent_padded(node, results, binding),
    )


def _sent_padded(
    node: Evaluate, results: Sequence[Result], binding: Binding
) -> BoundCollective | None:
    """The reduce-scatter of a product, which is then made where its padding has room."""
    if node.into is not None or len(node.body) != 1 or len(results) != 1:
        return None
    if not isinstance(node.body[0], Linear | MatMul):
        return None
    (result,), buffers = results, binding.program.buffers
    for found in all_nodes(binding.program.body):
        if isinstance(found, Communicate) and found.src == result.name:
            if found.collective is Collective.reduce_scatter and binding.rank in found.ranks:
                src, out = buffers[found.src], buffers[found.out]
                return bind_collective(found, src, out, binding.rank)
    return None


def _results_read(node: Evaluate, binding: Binding) -> tuple[Result, ...]:
    """Those tensors made by `node` that are outputs, or that other kinds of nodes read.

    Views with gaps are as they are: who reads them asks for their strides.
    """
    program = binding.program
    outside: set[str] = {output.buffer for output in program.outputs}
    for other in all_nodes(program.body):
        if other is not node and not isinstance(other, Free | Evaluate | ForLoop | OnStream):
            outside.update(names_needed(other))
    buffers = [program.buffers[TensorName(n)] for n in names_defined(node) if n in outside]
    return tuple(
        Result(
            buffer.name,
            binding.names.slots[buffer.name],
            buffer.memory_order,
            to_torch_dtype(buffer.dtype),
            len(buffer.shape),
        )
        for buffer in buffers
        if not buffer.gaps
    )


# Communication.


@final
@frozen_dataclass
class PostStep(Step):
    collective: BoundCollective
    src: int
    out: int
    device: torch.device
    traced: Traced | None
    extents: tuple[IntExpr, ...]
    stride: int
    in_place: bool

    def bind(self, sizes: Sizes) -> Action:
        return self._asked(sizes).act

    def expand(self, sizes: Sizes) -> Iterator[Bound]:
        yield Bound.asking(self._asked(sizes), self.traced)

    def _asked(self, sizes: Sizes) -> PostCollective:
        number = self.collective.number + sizes.iteration * self.stride
        sized = replace(self.collective.at(sizes.symbols, self.device), number=number)
        return PostCollective(sized, self.src, self.out, self.in_place)


@bind_step.register
def _(node: Communicate, binding: Binding) -> Step:
    if node.is_transfer:
        return _bind_transfer(node, binding)
    executor = CommunicationExecutor(binding.ids)
    buffers = binding.program.buffers
    has_room = any(node is found for found in binding.filling.get(node.out, ()))
    src, out = buffers[node.src], buffers[node.out]
    collective = bind_collective(node, src, out, binding.rank, has_room=has_room)
    executor.compile(collective, binding.trace)
    src, out = binding.slots([node.src, node.out])
    traced = Traced(executor.work, (src,), (out,), posts=True)
    extents, stride = collective.all_extents, binding.communications
    return PostStep(collective, src, out, binding.device, traced, extents, stride, node.in_place)


def _bind_transfer(node: Communicate, binding: Binding) -> Step:
    out = binding.program.buffers[node.out]
    transfer = bind_transfer(node, out, binding.rank, binding.loops)
    src, out = binding.slots([node.src, node.out])
    work = Work(f"{transfer.collective} {node.out}", "communication", binding.ids.group)
    traced = Traced(work, (src,), (out,), posts=True)
    (into,) = (None,) if node.into is None else binding.slots([node.into])
    extents, stride = transfer.all_extents, binding.communications
    return TransferStep(transfer, src, out, traced, extents, stride, into, node.sum_over)


def collectives_filling(
    program: HostProgram,
) -> dict[TensorName, tuple[Communicate, ...]]:
    """The collectives that fill each buffer which has memory of its own, and not of another: it is
    made as large as what they receive, padding included."""
    nodes = list(all_nodes(program.body))
    own = {
        node.buffer
        for node in nodes
        if isinstance(node, Allocate) and node.memory is not MemoryType.symmetric
    }
    found: dict[TensorName, tuple[Communicate, ...]] = {}
    for node in nodes:
        if isinstance(node, Communicate) and node.mesh_axis is not None and node.out in own:
            if not (node.is_transfer or node.in_place):
                found[node.out] = (*found.get(node.out, ()), node)
    return found


def bind_collective(
    node: Communicate, src: HostBuffer, out: HostBuffer, rank: int, *, has_room: bool = False
) -> BoundCollective:
    """What `rank` asks for, between these buffers. `has_room`: see Packing."""
    return BoundCollective(
        number=node.number,
        collective=node.collective.value,
        rank=rank,
        mesh_axis=node.mesh_axis,
        src=place(src),
        out=place(out),
        extents=src.extents,
        order=src.memory_order,
        function=node.function,
        cause=node.cause,
        is_packed=node.packed,
        in_team_order=node.in_team_order,
        has_room=has_room,
    )


def place(buffer: HostBuffer) -> PlacedTensor:
    """A buffer as what moves between ranks."""
    if buffer.sharding is None:
        raise InvariantError(f"{buffer.name} moves between ranks, but has no mesh")
    return PlacedTensor(buffer.name, buffer.sharding)


@final
@frozen_dataclass
class WaitStep(Step):
    number: int
    stride: int
    extents: tuple[IntExpr, ...] = ()
    traced: Traced | None = None

    def bind(self, sizes: Sizes) -> Action:
        event = self._awaited(sizes)
        return lambda slots: event

    def expand(self, sizes: Sizes) -> Iterator[Bound]:
        yield Bound.telling(self._awaited(sizes))

    def _awaited(self, sizes: Sizes) -> AwaitWork:
        return AwaitWork(self.number + sizes.iteration * self.stride)


@bind_step.register
def _(node: Wait, binding: Binding) -> Step:
    return WaitStep(node.number, binding.communications)
