"""Memory bound to a rank: buffers made and let go of, and the parts of others that a rank has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import final

import torch

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.bound_collectives import BoundCollective, BoundPart
from meshfuse.expr import IntExpr
from meshfuse.facts.holdings import shape_outside
from meshfuse.host.actions import Action, Bound, Sizes, Slots, Step, Traced
from meshfuse.host.events import GiveBackSlot
from meshfuse.host.nodes import Allocate, Free, Pick, View
from meshfuse.host.steps import Binding, bind_collective, bind_step, place
from meshfuse.host.transfer_step import (
    PeerBuffer,
    ReserveStep,
    ShareStep,
    bind_transfer,
    find_delivery,
    has_peer_memory,
    team_of,
)
from meshfuse.ir.axes import TensorName
from meshfuse.runtime.allocate import allocator
from meshfuse.runtime.torch_types import to_torch_dtype


@final
@frozen_dataclass
class AllocateStep(Step):
    """Memory for a buffer, with room behind it for the padding of what `received` bring."""

    slot: int
    extents: tuple[IntExpr, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    received: tuple[BoundCollective, ...] = ()
    traced: Traced | None = None

    @property
    def is_idle(self) -> bool:
        return True

    def expand(self, sizes: Sizes) -> Iterator[Bound]:
        yield Bound(self.bind(sizes), self.traced, is_idle=True, makes=self.slot)

    def bind(self, sizes: Sizes) -> Action:
        slot, device = self.slot, self.device
        room = max((found.padding(sizes.symbols)[1] for found in self.received), default=0)
        make = allocator(sizes.values, self.order, self.dtype, device, room)

        def allocate(slots: Slots) -> None:
            slots[slot] = make()

        return allocate


@bind_step.register
def _(node: Allocate, binding: Binding) -> Step:
    buffer = binding.program.buffers[node.buffer]
    (slot,) = binding.slots([node.buffer])
    dtype = to_torch_dtype(buffer.dtype)
    extents, device = (node.bytes, *buffer.shape), binding.device
    source = binding.shared.get(node.buffer)
    if source is not None:
        shared = PeerBuffer(slot, buffer.memory_order, dtype, device, source.fetch.cause)
        team = team_of(source.fetch, binding.rank)
        return ShareStep(shared, team, source.pieces, source.axis, extents)
    delivery = find_delivery(node, binding.program)
    if delivery is not None and has_peer_memory(device):
        out = binding.program.buffers[delivery.out]
        transfer = bind_transfer(delivery, out, binding.rank, binding.loops)
        sent = PeerBuffer(slot, buffer.memory_order, dtype, device, transfer.cause)
        return ReserveStep(sent, transfer, extents)
    received = tuple(
        bind_collective(found, binding.program.buffers[found.src], buffer, binding.rank)
        for found in binding.filling.get(node.buffer, ())
        if binding.rank in found.ranks
    )
    return AllocateStep(slot, buffer.shape, buffer.memory_order, dtype, device, received)


@final
@frozen_dataclass
class EmptyStep(Step):
    """Tensors that the rank has no part of: slot, number of axes and type of each."""

    tensors: tuple[tuple[int, int, torch.dtype], ...]
    device: torch.device
    extents: tuple[IntExpr, ...] = ()
    traced: Traced | None = None

    def bind(self, sizes: Sizes) -> Action:
        tensors, device = self.tensors, self.device

        def make_empty(slots: Slots) -> None:
            for slot, ndim, dtype in tensors:
                slots[slot] = torch.empty(shape_outside(ndim), dtype=dtype, device=device)

        return make_empty


def bind_empty(names: Iterable[TensorName], binding: Binding) -> Step:
    """The step that puts an empty tensor in place of each that other ranks make."""
    buffers = [binding.program.buffers[name] for name in names]
    return EmptyStep(
        tuple(
            (slot, len(buffer.shape), to_torch_dtype(buffer.dtype))
            for slot, buffer in zip(binding.slots(names), buffers, strict=True)
        ),
        binding.device,
    )


@final
@frozen_dataclass
class FreeStep(Step):
    """`shared`: the slots of what peers fetch, each with the team."""

    freed: tuple[int, ...]
    shared: tuple[tuple[tuple[int, ...], int], ...] = ()
    extents: tuple[IntExpr, ...] = ()
    traced: Traced | None = None

    @property
    def is_idle(self) -> bool:
        return True

    def bind(self, sizes: Sizes) -> Action:
        freed = self.freed

        def free(slots: Slots) -> None:
            for slot in freed:
                slots[slot] = None

        return free

    def expand(self, sizes: Sizes) -> Iterator[Bound]:
        for team, slot in self.shared:
            yield Bound.asking(GiveBackSlot(team, slot), self.traced)
        if self.freed:
            yield Bound(self.bind(sizes), self.traced, is_idle=True, is_letting_go=True)


@bind_step.register
def _(node: Free, binding: Binding) -> Step:
    shared = {name: binding.shared[name] for name in node.buffers if name in binding.shared}
    return FreeStep(
        binding.slots(name for name in node.buffers if name not in shared),
        tuple(
            (team_of(source.fetch, binding.rank), binding.names.slots[name])
            for name, source in shared.items()
        ),
    )


@final
@frozen_dataclass
class PartStep(Step):
    """The part of `src` that the rank is to hold: a view of it, or copied into `out`."""

    out: int
    src: int
    part: BoundPart
    copies: bool
    device: torch.device
    extents: tuple[IntExpr, ...]
    traced: Traced | None = None

    @property
    def is_idle(self) -> bool:
        return not self.copies

    def bind(self, sizes: Sizes) -> Action:
        out, src = self.out, self.src
        region = self.part.region(sizes.symbols, self.device)

        def view(slots: Slots) -> None:
            slots[out] = region.read(slots[src])

        def copy(slots: Slots) -> None:
            slots[out].copy_(region.read(slots[src]))

        return copy if self.copies else view


@bind_step.register
def _(node: View, binding: Binding) -> Step:
    return _bind_part(node, binding, copies=False)


@bind_step.register
def _(node: Pick, binding: Binding) -> Step:
    return _bind_part(node, binding, copies=True)


def _bind_part(node: View | Pick, binding: Binding, *, copies: bool) -> Step:
    out, src = binding.slots([node.out, node.src])
    buffers = binding.program.buffers
    whole = buffers[node.src]
    part = BoundPart(binding.rank, place(whole), place(buffers[node.out]), whole.extents)
    return PartStep(out, src, part, copies, binding.device, part.all_extents)
