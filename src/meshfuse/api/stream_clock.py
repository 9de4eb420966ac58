"""Time as a CUDA device passes it: moments of its streams."""

from __future__ import annotations

from threading import Lock
from typing import final

import torch

_NANOSECONDS_PER_MILLISECOND = 1e6


@final
class StreamClock:
    """A trace's clock for one CUDA device: each moment is an event on the current stream.

    The host is not held up. Moments are numbers; `nanoseconds` says when they were. Any thread may
    ask what time it is.
    """

    __slots__ = ("_device", "_events", "_lock")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = Lock()
        self._events: list[torch.cuda.Event] = []
        self()

    def __call__(self) -> int:
        event = torch.cuda.Event(enable_timing=True)
        torch.cuda.current_stream(self._device).record_event(event)
        with self._lock:
            self._events.append(event)
            return len(self._events) - 1

    def nanoseconds(self, moment: int) -> int:
        """Since the clock was made. Waits until the device has come there."""
        first, event = self._events[0], self._events[moment]
        event.synchronize()
        return round(first.elapsed_time(event) * _NANOSECONDS_PER_MILLISECOND)
