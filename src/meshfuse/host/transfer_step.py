"""Fetches and deliveries bound to a rank: steps that post them and put the result in its slot, and
make the memory for what is delivered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import final

import torch

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.transfers import BoundTransfer, SharedChunk
from meshfuse.expr import IntExpr, free_symbols
from meshfuse.host.actions import Action, Bound, Sizes, Step, Traced
from meshfuse.host.events import PostTransfer, ReserveSlot
from meshfuse.host.nodes import Allocate, Communicate, HostBuffer, HostProgram, all_nodes
from meshfuse.ir.schedule import MemoryType
from meshfuse.runtime.allocate import dense_strides


@final
@frozen_dataclass
class ReserveStep(Step):
    """Memory for what a rank delivers to its team by `transfer`. `extents`: the most bytes, then
    the shape."""

    slot: int
    transfer: BoundTransfer
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    cause: str
    extents: tuple[IntExpr, ...]
    traced: Traced | None = None

    @staticmethod
    def of(
        node: Allocate,
        transfer: BoundTransfer,
        buffer: HostBuffer,
        slot: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ReserveStep:
        """Of a buffer that `transfer` sends."""
        extents = (node.bytes, *buffer.shape)
        order, cause = buffer.memory_order, transfer.cause
        return ReserveStep(slot, transfer, order, dtype, device, cause, extents)

    def bind(self, sizes: Sizes) -> Action:
        return self._asked(sizes, self.transfer.at(sizes.symbols).team).reserve

    def expand(self, sizes: Sizes) -> Iterator[Bound]:
        """What all ranks keep is read by no peer."""
        sized = self.transfer.at(sizes.symbols)
        asked = self._asked(sizes, sized.team)
        if sized.transfer.moves:
            yield Bound.asking(asked, self.traced)
        else:
            yield Bound(asked.make, self.traced)

    def _asked(self, sizes: Sizes, team: tuple[int, ...]) -> ReserveSlot:
        most_bytes, *found = sizes.values
        shape = tuple(found)
        strides = dense_strides(shape, self.order)
        chunk = SharedChunk(team, shape, strides, self.dtype, self.device, most_bytes, self.cause)
        return ReserveSlot(chunk, self.slot)


def find_delivery(node: Allocate, program: HostProgram) -> Communicate | None:
    """What delivers the buffer of an allocation in symmetric memory."""
    if node.memory is not MemoryType.symmetric:
        return None
    nodes = (found for found in all_nodes(program.body) if isinstance(found, Communicate))
    return next((found for found in nodes if found.src == node.buffer), None)


@final
@frozen_dataclass
class TransferStep(Step):
    """`stride`: by how many numbers iterations are apart. `into`: the slot that takes the place of
    `out`, in the first iteration of the loop `sum_over` if there is one."""

    transfer: BoundTransfer
    src: int
    out: int
    traced: Traced | None
    extents: tuple[IntExpr, ...]
    stride: int
    into: int | None = None
    sum_over: str | None = None

    def bind(self, sizes: Sizes) -> Action:
        return self._asked(sizes).post

    def expand(self, sizes: Sizes) -> Iterator[Bound]:
        yield Bound.asking(self._asked(sizes), self.traced)

    def _asked(self, sizes: Sizes) -> PostTransfer:
        is_first = self.sum_over is None or sizes.symbols[self.sum_over] == 0
        number = self.transfer.number + sizes.iteration * self.stride
        transfer = replace(self.transfer.at(sizes.symbols), number=number)
        return PostTransfer(transfer, self.src, self.out, self.into if is_first else None)


def bind_transfer(
    node: Communicate, out: HostBuffer, rank: int, loops: Sequence[str]
) -> BoundTransfer:
    """What `rank` asks for, to get `out`. `loops`: the indices of those around it."""
    if node.owner is None or node.mesh_axis is None:
        raise InvariantError(f"{node.collective.value} of {node.src} has no owner")
    chosen = {found.name for found in free_symbols(node.owner)}
    return BoundTransfer(
        node.number,
        node.collective.value,
        rank,
        node.mesh,
        node.mesh_axis,
        out.name,
        out.shape,
        out.memory_order,
        node.owner,
        node.cause,
        node.bytes,
        tuple(name for name in loops if name not in chosen),
    )
