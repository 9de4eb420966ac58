"""Memory that a user keeps and peers can reach, and how tensors are found in it."""

from __future__ import annotations

from bisect import bisect_right
from typing import final

import torch

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.arena import Window


@final
@frozen_dataclass
class KeptMemory:
    """The `serial`-th of its team, from an address on; `size` in bytes."""

    team: tuple[int, ...]
    serial: int
    window: Window
    address: int
    size: int


@final
class KeptMemories:
    """All that there are, by address: each call asks where its inputs lie."""

    __slots__ = ("_addresses", "_memories")

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._memories: list[KeptMemory] = []

    def __len__(self) -> int:
        return len(self._memories)

    def add(self, memory: KeptMemory) -> None:
        place = bisect_right(self._addresses, memory.address)
        self._addresses.insert(place, memory.address)
        self._memories.insert(place, memory)

    def find(self, tensor: torch.Tensor) -> tuple[KeptMemory, int] | None:
        """Where a dense tensor lies: the memory, and at which byte of it. None for one that is
        elsewhere."""
        address = tensor.data_ptr()
        place = bisect_right(self._addresses, address) - 1
        if place < 0:
            return None
        memory = self._memories[place]
        start = address - memory.address
        return (memory, start) if start + tensor.nbytes <= memory.size else None


def order_in_memory(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes of a dense tensor, slowest first; () for one with gaps."""
    order = tuple(range(tensor.ndim))
    if tensor.is_contiguous():
        return order
    order = tuple(sorted(order, key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else ()
