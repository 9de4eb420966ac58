"""A gloo whose transfers take as long as on a link of some latency and bandwidth, at least.

Only waiting is simulated: bytes travel as ever, but a transfer is not done before its time. The
backend that `meshfuse.dist.groups` makes is wrapped; nothing else knows of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch

from meshfuse.dist import groups


@dataclass
class Link:
    """Transfers go one after the other, at `bandwidth` bytes a second, and arrive `latency` seconds
    later. With `is_on` False there is no link, and gloo is as it is.
    """

    latency: float
    bandwidth: float
    is_on: bool = False
    free_at: float = 0.0

    def reserve(self, size: int) -> float:
        """When a transfer of so many bytes that is posted now will have arrived."""
        seconds = size / self.bandwidth
        self.free_at = max(time.monotonic(), self.free_at) + seconds
        return self.free_at + self.latency


class DelayedWork:
    """A transfer of gloo that is not done before `ready`; what meshfuse calls of torch's Work."""

    def __init__(self, work: Any, ready: float) -> None:
        self._work, self._ready = work, ready
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def is_completed(self) -> bool:
        return self._work.is_completed() and time.monotonic() >= self._ready

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As torch's: RuntimeError when the time is up, and the transfer goes on."""
        until = None if timeout is None else time.monotonic() + timeout.total_seconds()
        _ = self._work.wait() if timeout is None else self._work.wait(timeout)
        if until is not None and until < self._ready:
            time.sleep(max(0.0, until - time.monotonic()))
            raise RuntimeError("the simulated link has not delivered in time")
        time.sleep(max(0.0, self._ready - time.monotonic()))
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Done when the transfer is; a thread, which sleeps until then, sees to it."""
        if self._future is None:
            self._future = torch.futures.Future()
            Thread(target=self._complete, args=(self._future,), daemon=True).start()
        return self._future

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        try:
            self.wait()
        except RuntimeError as error:
            future.set_exception(error)  # pyright: ignore[reportArgumentType]  # torch says so
        else:
            future.set_result([])


class DelayedBackend:
    """gloo behind a link. A method that returns a transfer returns one that is delayed."""

    def __init__(self, backend: Any, link: Link, ranks: int) -> None:
        self._backend, self._link, self._ranks = backend, link, ranks

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._backend, name)
        if not callable(method) or name in ("abort", "shutdown"):
            return method

        def post(*arguments: Any) -> Any:
            work = method(*arguments)
            if not self._link.is_on or not hasattr(work, "is_completed"):
                return work
            return DelayedWork(work, self._link.reserve(self._bytes(name, arguments)))

        return post

    def _bytes(self, name: str, arguments: Sequence[Any]) -> int:
        """What comes from the others; of an all-reduce, both halves of it."""
        first = arguments[0]
        tensors = [first] if isinstance(first, torch.Tensor) else list(first)
        size = sum(tensor.nbytes for tensor in tensors)
        if name in ("send", "recv"):
            return size
        return size * (self._ranks - 1) // self._ranks * (2 if name == "allreduce" else 1)


@contextmanager
def slow_link(link: Link) -> Iterator[None]:
    """Groups for CPU tensors that are formed in here go over the link."""
    make = groups._make_backend

    def make_delayed(device_type: str, board: Any, *arguments: Any) -> Any:
        backend = make(device_type, board, *arguments)
        return DelayedBackend(backend, link, len(board.team)) if device_type == "cpu" else backend

    with patch.object(groups, "_make_backend", make_delayed):
        yield
