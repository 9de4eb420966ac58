"""Communications that a plan posts in every call: what can be known of them is looked up once.

On GPUs a small program is as fast as its host. The first call goes the long way, through a
request, by which sizes, types and memory are checked; later ones have the same. On CUDA they then
go to the backend, or to symmetric memory, directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist

from meshfuse.dist.bound_collectives import SizedCollective
from meshfuse.dist.collectives import CollectiveRequest, Start
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.groups import Group
from meshfuse.dist.packing import Packing, room_behind
from meshfuse.dist.pending import Pending
from meshfuse.dist.transfers import SizedTransfer

Flatten = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Makes of contiguous tensors what is sent and received."""


def _flattening(packing: Packing, src: torch.Tensor, out: torch.Tensor) -> Flatten | None:
    """What is received comes right into `out`, and what is sent lies in `src` or is packed; None
    where there is more to do behind a collective."""
    memory = packing.received_in(out)
    if memory is None or memory.data_ptr() != out.data_ptr() or packing.kept is not None:
        return None
    sends, received = packing.sends, memory.shape
    sent = sends.memory_in(src, room_behind(src))
    if sent is None or sent.data_ptr() != src.data_ptr():
        return lambda src, out: (sends.pack(src), out.as_strided(received, (1,)))
    length, padding = sent.numel(), sent.numel() - src.numel()

    def flatten(src: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        has_room = padding <= 0 or room_behind(src) >= padding
        send = src.as_strided((length,), (1,)) if has_room else sends.pack(src)
        return send, out.as_strided(received, (1,))

    return flatten


@final
class DirectCollective:
    """A collective of a plan. To be posted and awaited in turns."""

    __slots__ = (
        "_collective",
        "_communicator",
        "_device",
        "_flatten",
        "_group",
        "_pending",
        "_sequence",
        "_start",
        "_text",
        "_work",
    )

    def __init__(self, communicator: Communicator, collective: SizedCollective) -> None:
        self._communicator = communicator
        self._collective = collective
        self._pending: Pending | None = None
        self._group: Group | None = None
        self._start: Start | None = None
        self._flatten: Flatten | None = None
        self._text = ""
        self._work: dist.Work | None = None
        self._sequence = 0
        self._device = torch.device("cpu")

    def post(self, src: torch.Tensor, out: torch.Tensor) -> None:
        """Raises as Communicator.post does."""
        start, group, flatten = self._start, self._group, self._flatten
        is_dense = src.is_contiguous() and out.is_contiguous()
        if start is None or group is None or not is_dense:
            self._post_request(self._collective.request(src, out), is_dense)
            return
        if flatten is not None:
            src, out = flatten(src, out)
        self._work = group.start(start, src, out, self._text)
        self._sequence, self._device = group.posted, out.device

    def _post_request(self, request: CollectiveRequest, is_dense: bool) -> None:
        pending = self._pending = self._communicator.post(request)
        order = self._collective.order
        if pending.group is None or not is_dense or order != tuple(range(len(order))):
            return
        if request.packing is not None:
            self._flatten = _flattening(request.packing, request.src, request.out)
            if self._flatten is None:
                return
        self._group, self._text = pending.group, str(request)
        self._start = pending.group.bind(request)

    def wait(self) -> None:
        """Raises as Pending.wait does."""
        pending, work = self._pending, self._work
        self._pending = self._work = None
        if pending is not None:
            pending.wait()
        elif work is not None and self._group is not None:
            self._group.await_on_stream(work, self._device, self._sequence, self._text)


@final
class DirectTransfer:
    """A fetch or delivery of a plan. To be posted and awaited in turns.

    `group`: its team's, when it was posted and needs no request any more. `text`: what it is.
    """

    __slots__ = ("_communicator", "_pending", "_start", "_transfer", "group", "text")

    def __init__(self, communicator: Communicator, transfer: SizedTransfer) -> None:
        self._communicator = communicator
        self._transfer = transfer
        self._pending: Pending | None = None
        self._start: Start | None = None
        self.group: Group | None = None
        self.text = ""

    def post(self, src: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        """What the rank gets, once it has come. Raises as Communicator.post does."""
        start, group = self._start, self.group
        if start is None or group is None:
            return self._post_request(self._transfer.request(src, into))
        src, out = self._transfer.buffers(src, into)
        group.start(start, src, out, self.text)
        return out

    def record(self, src: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        """As `post`, of one that has a group, onto a stream that records: the group does not
        count it."""
        assert self._start is not None
        src, out = self._transfer.buffers(src, into)
        self._start(src, out)
        return out

    def _post_request(self, request: CollectiveRequest) -> torch.Tensor:
        pending = self._pending = self._communicator.post(request)
        if pending.group is not None and pending.group.transport is not None:
            self.group, self.text = pending.group, str(request)
            self._start = pending.group.bind(request)
        return request.out

    def wait(self) -> None:
        """Raises as Pending.wait does. Nothing is to be waited for on the stream that has got the
        transfer."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
