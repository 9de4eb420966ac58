"""What a loaded host program tells whoever drives it: what the driver must do next. And what it is
known to ask of the communicator before it runs."""

from __future__ import annotations

from typing import Any, Final, final

import torch

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.bound_collectives import SizedCollective
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.transfers import SharedChunk, SizedTransfer

CALLER: Final = -1
"""The number of the caller's stream; worker streams count from 0."""


@final
@frozen_dataclass
class Post:
    """Start this collective."""

    request: CollectiveRequest


@final
@frozen_dataclass
class AwaitWork:
    """Go on when the collective of this number is complete."""

    number: int


@final
@frozen_dataclass
class Reserve:
    """Put memory for a chunk that peers read into this slot; `piece`: see ReserveSlot."""

    chunk: SharedChunk
    slots: list[Any]
    slot: int
    piece: int | None = None

    def fill(self, memory: torch.Tensor) -> None:
        put_reserved(self.slots, self.slot, memory, self.piece)


@final
@frozen_dataclass
class GiveBack:
    """The program lets go of memory that was reserved, which peers may be reading yet."""

    team: tuple[int, ...]
    memory: tuple[torch.Tensor, ...]


@final
@frozen_dataclass
class SwitchStream:
    """What follows runs on this stream."""

    stream: int


@final
@frozen_dataclass
class Mark:
    """All that was put on the stream so far is marked: an event, and which instance of it."""

    event: int
    instance: int


@final
@frozen_dataclass
class AwaitMark:
    """What follows on the stream begins behind a mark. The host goes on."""

    mark: Mark


@final
@frozen_dataclass
class PostCollective:
    """What posts a collective of a plan, from one slot into the tensor in another; `in_place`: into
    the source itself, which is in that other slot, too, from then on."""

    collective: SizedCollective
    src: int
    out: int
    in_place: bool = False

    def act(self, slots: list[Any]) -> Post:
        if self.in_place:
            slots[self.out] = slots[self.src]
        return Post(self.collective.request(slots[self.src], slots[self.out]))


@final
@frozen_dataclass
class PostTransfer:
    """What posts a fetch or delivery of a plan, and puts the result into slot `out`. `into`: the
    slot that has the memory for it, if there is some."""

    transfer: SizedTransfer
    src: int
    out: int
    into: int | None

    def act(self, slots: list[Any]) -> Post:
        into = None if self.into is None else slots[self.into]
        request = self.transfer.request(slots[self.src], into)
        slots[self.out] = request.out
        return Post(request)


@final
@frozen_dataclass
class ReserveSlot:
    """What asks for memory for a chunk that peers read, into a slot.

    `piece`: of a buffer that is in pieces, each with memory of its own; the slot has them in a row.
    """

    chunk: SharedChunk
    slot: int
    piece: int | None = None

    def act(self, slots: list[Any]) -> Reserve:
        return Reserve(self.chunk, slots, self.slot, self.piece)

    def make(self, slots: list[Any]) -> None:
        """Memory that no peer reaches."""
        put_reserved(slots, self.slot, self.chunk.ordinary(), self.piece)


def put_reserved(
    slots: list[Any], slot: int, memory: torch.Tensor, piece: int | None = None
) -> None:
    """Memory into its slot: the next piece behind those before it."""
    if piece is None:
        slots[slot] = memory
    else:
        slots[slot] = (*slots[slot], memory) if piece else (memory,)


@final
@frozen_dataclass
class GiveBackSlot:
    """What lets go of the memory in a slot, which was reserved."""

    team: tuple[int, ...]
    slot: int

    def act(self, slots: list[Any]) -> GiveBack:
        memory, slots[self.slot] = slots[self.slot], None
        return GiveBack(self.team, memory if isinstance(memory, tuple) else (memory,))


Asked = PostCollective | PostTransfer | ReserveSlot | GiveBackSlot
"""What an action of a plan asks of the communicator, but for the tensors: those are in slots."""

Event = Post | AwaitWork | Reserve | GiveBack | SwitchStream | Mark | AwaitMark
