"""Where calls are recorded as CUDA graphs: streams and memory of a device, and for how many."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from contextlib import suppress
from threading import Lock
from typing import Any, ClassVar, Final, Protocol, final
from weakref import WeakSet

import torch

from meshfuse.host.cuda_streams import StreamPool

FIRST: Final = -5
"""The priority of the stream whose work a GPU does first. In a graph all that depends on nothing is
ready together, and nothing else tells which of two products a peer waits for."""

MOST_GRAPHS: Final = 256
"""Of a device: some tens of megabytes of the host's memory. Those that were of no use for long make
room for others."""
LONG: Final = 4096
"""Calls without a use."""
_PAUSE: Final = 256
"""Calls between two looks for graphs of no use."""


class Owner(Protocol):
    """Who has recorded calls, and lets go of them when they are of no use."""

    @property
    def oldest_use(self) -> int | None:
        """The last use of the graph that was used least recently; None if there is none."""
        ...

    def drop_unused(self, since: int) -> None:
        """Let go of graphs that were not used since then."""
        ...


@final
class Recorder:
    """The streams of a device on which the calls from one stream are recorded, and the graphs'
    memory. There is one for a device: graphs that share memory must not run at once.

    `clock` counts calls that were replayed, or might have been.
    """

    __slots__ = (
        "_device",
        "_graphs",
        "_memory",
        "_next_look",
        "clock",
        "home",
        "owners",
        "stream",
        "workers",
    )

    _found: ClassVar[dict[torch.device, Recorder]] = {}
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, device: torch.device, home: int) -> None:
        self._device = device
        self.home = home
        self.stream = torch.cuda.Stream(device, priority=FIRST)
        self.workers = StreamPool(device, FIRST)
        self._memory: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self.clock = self._next_look = 0
        self.owners: WeakSet[Owner] = WeakSet()

    @classmethod
    def of(cls, device: torch.device, home: int) -> Recorder:
        """That of a device. If it is new, it is for calls from the stream with this handle."""
        with cls._lock:
            if device not in cls._found:
                cls._found[device] = Recorder(device, home)
            return cls._found[device]

    def has_room(self) -> bool:
        """Whether there may be another graph."""
        self.clock += 1
        if len(self._graphs) < MOST_GRAPHS:
            return True
        if self.clock < self._next_look:
            return False
        self._next_look = self.clock + _PAUSE
        for owner in self.owners:
            oldest = owner.oldest_use
            if oldest is not None and self.clock - oldest > LONG:
                owner.drop_unused(self.clock - LONG)
        return len(self._graphs) < MOST_GRAPHS

    def memory(self) -> Any:
        """That of the graphs that exist. When all are gone, it is too, and torch takes no other."""
        if not self._graphs:
            self._memory = torch.cuda.graph_pool_handle()
        return self._memory

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        """A graph that was recorded to `memory`; for as long as it exists."""
        self._graphs.add(graph)

    def leave_memory(self) -> None:
        """Behind a capture that has failed torch takes its memory for still being recorded to."""
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index, self._memory)
        self._graphs.clear()
