"""Fetches and deliveries bound to a rank: steps that post them and put the result in its slot, and
make the memory that peers read."""

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
from meshfuse.host.nodes import (
    Allocate,
    Collective,
    Communicate,
    HostBuffer,
    HostProgram,
    all_nodes,
)
from meshfuse.host.shared_sources import SharedSource
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
        return self._asked(sizes, self.transfer.at(sizes.symbols).team).act

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


@final
@frozen_dataclass
class ShareStep(Step):
    """Memory for what a rank makes and its `team` fetches: whole, or in `pieces` along `axis`, each
    in a chunk of its own. `extents`: the most bytes, then the shape."""

    slot: int
    team: tuple[int, ...]
    pieces: int | None
    axis: int
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    cause: str
    extents: tuple[IntExpr, ...]
    traced: Traced | None = None

    @staticmethod
    def of(
        node: Allocate,
        source: SharedSource,
        buffer: HostBuffer,
        rank: int,
        slot: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ShareStep:
        fetch, extents = source.fetch, (node.bytes, *buffer.shape)
        return ShareStep(
            slot,
            team_of(fetch, rank),
            source.pieces,
            source.axis,
            buffer.memory_order,
            dtype,
            device,
            fetch.cause,
            extents,
        )

    def bind(self, sizes: Sizes) -> Action:
        raise InvariantError("pieces are reserved one by one; expand it")

    def expand(self, sizes: Sizes) -> Iterator[Bound]:
        most_bytes, *shape = sizes.values
        if self.pieces is None:
            asked = [ReserveSlot(self._chunk(shape, most_bytes), self.slot)]
        else:
            shape[self.axis] //= self.pieces
            chunk = self._chunk(shape, most_bytes // self.pieces)
            asked = [ReserveSlot(chunk, self.slot, piece) for piece in range(self.pieces)]
        for found in asked:
            yield Bound.asking(found, self.traced)

    def _chunk(self, shape: Sequence[int], most_bytes: int) -> SharedChunk:
        strides = dense_strides(shape, self.order)
        dtype, device, cause = self.dtype, self.device, self.cause
        return SharedChunk(
            self.team, tuple(shape), strides, dtype, device, most_bytes, cause, lasts=True
        )


def find_delivery(node: Allocate, program: HostProgram) -> Communicate | None:
    """What delivers the buffer of an allocation in symmetric memory."""
    if node.memory is not MemoryType.symmetric:
        return None
    nodes = (found for found in all_nodes(program.body) if isinstance(found, Communicate))
    sent = (found for found in nodes if found.collective is Collective.deliver)
    return next((found for found in sent if found.src == node.buffer), None)


def team_of(transfer: Communicate, rank: int) -> tuple[int, ...]:
    """The ranks that send one another chunks, `rank` among them."""
    assert transfer.mesh_axis is not None
    return transfer.mesh.team(rank, transfer.mesh_axis)


def has_peer_memory(device: torch.device) -> bool:
    """Whether there may be memory on such devices that peers read."""
    return device.type == "cuda"


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
        return self._asked(sizes).act

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
