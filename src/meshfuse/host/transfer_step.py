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
from meshfuse.ir.schedule import MemoryType
from meshfuse.runtime.allocate import dense_strides


@final
@frozen_dataclass
class PeerBuffer:
    """A buffer that peers read: the slot for its memory, and how it lies there. `cause`: what it is
    sent for."""

    slot: int
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    cause: str

    def ask(
        self,
        team: tuple[int, ...],
        shape: Sequence[int],
        most_bytes: int,
        piece: int | None = None,
        *,
        lasts: bool = False,
    ) -> ReserveSlot:
        """What asks for memory of it, or of a piece of it, of this local shape."""
        chunk = SharedChunk(
            team,
            tuple(shape),
            dense_strides(shape, self.order),
            self.dtype,
            self.device,
            most_bytes,
            self.cause,
            lasts,
        )
        return ReserveSlot(chunk, self.slot, piece)


@final
@frozen_dataclass
class ReserveStep(Step):
    """Memory for what a rank delivers to its team by `transfer`. `extents`: the most bytes, then
    the shape."""

    buffer: PeerBuffer
    transfer: BoundTransfer
    extents: tuple[IntExpr, ...]
    traced: Traced | None = None

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
        most_bytes, *shape = sizes.values
        return self.buffer.ask(team, shape, most_bytes)


@final
@frozen_dataclass
class ShareStep(Step):
    """Memory for what a rank makes and its `team` fetches: whole, or in `pieces` along `axis`, each
    in a chunk of its own. `extents`: the most bytes, then the shape."""

    buffer: PeerBuffer
    team: tuple[int, ...]
    pieces: int | None
    axis: int
    extents: tuple[IntExpr, ...]
    traced: Traced | None = None

    def bind(self, sizes: Sizes) -> Action:
        raise InvariantError("pieces are reserved one by one; expand it")

    def expand(self, sizes: Sizes) -> Iterator[Bound]:
        most_bytes, *shape = sizes.values
        numbers: Sequence[int | None] = (None,)
        if self.pieces is not None:
            shape[self.axis] //= self.pieces
            most_bytes, numbers = most_bytes // self.pieces, range(self.pieces)
        for number in numbers:
            asked = self.buffer.ask(self.team, shape, most_bytes, number, lasts=True)
            yield Bound.asking(asked, self.traced)


def find_delivery(node: Allocate, program: HostProgram) -> Communicate | None:
    """What delivers the buffer of an allocation in symmetric memory."""
    if node.memory is not MemoryType.symmetric:
        return None
    posted = (found for found in all_nodes(program.body) if isinstance(found, Communicate))
    delivered = (found for found in posted if found.collective is Collective.deliver)
    return next((found for found in delivered if found.src == node.buffer), None)


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
