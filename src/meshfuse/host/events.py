"""What a loaded host program tells whoever drives it: what the driver must do next."""

from __future__ import annotations

from typing import Any, Final, final

import torch

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.transfers import SharedChunk

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


Event = Post | AwaitWork | Reserve | SwitchStream | Mark | AwaitMark
