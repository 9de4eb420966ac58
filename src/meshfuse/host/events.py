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
    """Put memory for a chunk that is delivered into this slot."""

    chunk: SharedChunk
    slots: list[Any]
    slot: int

    def fill(self, memory: torch.Tensor) -> None:
        self.slots[self.slot] = memory


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
    """What posts a collective of a plan, from one slot into the tensor in another."""

    collective: SizedCollective
    src: int
    out: int

    def post(self, slots: list[Any]) -> Post:
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

    def post(self, slots: list[Any]) -> Post:
        into = None if self.into is None else slots[self.into]
        request = self.transfer.request(slots[self.src], into)
        slots[self.out] = request.out
        return Post(request)


@final
@frozen_dataclass
class ReserveSlot:
    """What asks for memory for a chunk that is delivered, into a slot."""

    chunk: SharedChunk
    slot: int

    def reserve(self, slots: list[Any]) -> Reserve:
        return Reserve(self.chunk, slots, self.slot)

    def make(self, slots: list[Any]) -> None:
        """Memory that no peer reaches."""
        slots[self.slot] = self.chunk.ordinary()


Asked = PostCollective | PostTransfer | ReserveSlot
"""What an action of a plan asks of the communicator, but for the tensors: those are in slots."""

Event = Post | AwaitWork | Reserve | SwitchStream | Mark | AwaitMark
