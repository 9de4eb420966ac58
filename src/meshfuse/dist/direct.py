"""Communications that a plan posts in every call: what can be known of them is looked up once.

On GPUs a small program is as fast as its host. The first call goes the long way, through a
request, by which sizes, types and memory are checked; later ones have the same. On CUDA they then
go to the backend, or to symmetric memory, directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist

from meshfuse.dist.bound_collectives import SizedCollective
from meshfuse.dist.collectives import CollectiveRequest, Start
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.groups import Group
from meshfuse.dist.packing import Blocks, Packing, room_behind
from meshfuse.dist.pending import Pending
from meshfuse.dist.transfers import SizedTransfer
from meshfuse.runtime.allocate import is_dense, memory_with_room

Flatten = Callable[[torch.Tensor], torch.Tensor]
"""Makes of a dense tensor what is sent, or the memory for what is received."""

Unpack = Callable[[torch.Tensor, torch.Tensor], None]
"""Puts what was received into a result."""


def _as_flat(elements: int) -> Flatten:
    """The memory of dense tensors, as torch's backends want it."""
    shape = (elements,)
    return lambda tensor: tensor.as_strided(shape, (1,))


def _sending(sends: Blocks, src: torch.Tensor) -> Flatten | None:
    """How what is sent is made of sources like this one; None: they are that."""
    padding = sends.padding_behind(src)
    if padding == 0:
        return None if src.is_contiguous() else _as_flat(sends.elements)
    axis = next((axis for axis, size in enumerate(src.shape) if size != 1), 0)
    before, after = src.shape[:axis], src.shape[axis + 1 :]
    row = math.prod(after)
    if padding is None or row == 0 or padding % row or not src.is_contiguous():
        return sends.pack
    behind = src.new_zeros((*before, padding // row, *after))

    def lengthen(src: torch.Tensor) -> torch.Tensor:
        return torch.cat((src, behind), axis)

    return lengthen if room_behind(src) < padding else _with_room_behind(sends.elements, lengthen)


def _with_room_behind(elements: int, otherwise: Flatten) -> Flatten:
    """What lies in memory from where a tensor begins, for as long as memory always went on."""
    shape, has_room = (elements,), True

    def send(src: torch.Tensor) -> torch.Tensor:
        nonlocal has_room
        if has_room:
            try:
                return src.as_strided(shape, (1,))
            except RuntimeError:  # torch has looked, and will not again: an error takes long
                has_room = False
        return otherwise(src)

    return send


def _receiving(packing: Packing, out: torch.Tensor) -> tuple[Flatten | None, Unpack | None]:
    """Where results like this one receive, None: in themselves; and what is left to do then."""
    receives = packing.receives
    padding, elements = receives.padding_behind(out), receives.elements
    if padding == 0:
        return (None if out.is_contiguous() else _as_flat(elements)), None
    if padding is not None and packing.has_room:
        return lambda out: memory_with_room(out, (elements,)), None
    return lambda out: out.new_empty(elements), receives.unpack


@final
class DirectCollective:
    """A collective of a plan. To be posted and awaited in turns.

    Once it is bound, `_send` makes of a source what is sent, `_receive` of a result the memory for
    what is received, and `_unpack` puts that in its places; None where there is nothing to do.
    `_arriving`: that memory and the result, until the wait. `_strides`: of source and result for
    which all this was chosen, unless both are contiguous. `quick` starts it if that is so and there
    is nothing to make or to unpack; who calls it in place of `post` has seen that both are
    contiguous, and has `follow` await the work that it gives, if any.
    """

    __slots__ = (
        "_arriving",
        "_collective",
        "_communicator",
        "_device",
        "_group",
        "_pending",
        "_receive",
        "_send",
        "_sequence",
        "_start",
        "_strides",
        "_text",
        "_unpack",
        "_work",
        "quick",
    )

    def __init__(self, communicator: Communicator, collective: SizedCollective) -> None:
        self.quick: Start | None = None
        self._communicator = communicator
        self._collective = collective
        self._pending: Pending | None = None
        self._group: Group | None = None
        self._start: Start | None = None
        self._strides: tuple[object, object] | None = None
        self._send: Flatten | None = None
        self._receive: Flatten | None = None
        self._unpack: Unpack | None = None
        self._arriving: tuple[torch.Tensor, torch.Tensor] | None = None
        self._text = ""
        self._work: dist.Work | None = None
        self._sequence = 0
        self._device = torch.device("cpu")

    def post(self, src: torch.Tensor, out: torch.Tensor) -> None:
        """Raises as Communicator.post does."""
        start, group, strides = self._start, self._group, self._strides
        if strides is None:
            lie_as_before = src.is_contiguous() and out.is_contiguous()
        else:
            lie_as_before = (src.stride(), out.stride()) == strides
        if start is None or group is None or not lie_as_before:
            self._post_request(src, out)
            return
        if self._send is not None:
            src = self._send(src)
        memory = out if self._receive is None else self._receive(out)
        work = start(memory, src)
        if work is not None:
            self._work, self._sequence, self._arriving = work, group.posted, (memory, out)
        elif self._unpack is not None:
            self._unpack(memory, out)

    def perform(self, src: torch.Tensor, out: torch.Tensor) -> None:
        """`post` and `wait`."""
        self.post(src, out)
        if self._work is not None or self._pending is not None:
            self.wait()

    def follow(self, work: dist.Work) -> None:
        """As `wait`, of the work that `quick` has just given. Raises as Pending.wait does."""
        if self._group is not None:
            self._group.await_on_stream(work, self._device, self._group.posted, self._text)

    def _post_request(self, src: torch.Tensor, out: torch.Tensor) -> None:
        request = self._collective.request(src, out)
        pending = self._pending = self._communicator.post(request)
        order = self._collective.order
        if self._start is None and pending.group is not None:
            if is_dense(src, order) and is_dense(out, order):
                self._bind(pending.group, request)

    def _bind(self, group: Group, request: CollectiveRequest) -> None:
        """Later posts, of tensors that lie alike, are like this one."""
        start, packing = group.bind(request), request.packing
        if start is None or (packing is not None and packing.kept is not None):
            return
        src, out = request.src, request.out
        if packing is not None:
            self._send = _sending(packing.sends, src)
            self._receive, self._unpack = _receiving(packing, out)
        if not (src.is_contiguous() and out.is_contiguous()):
            self._strides = src.stride(), out.stride()
            if packing is None:
                self._send, self._receive = _as_flat(src.numel()), _as_flat(out.numel())
        self._group, self._device, self._text = group, out.device, str(request)
        self._start = group.counted(start, self._device, self._text)
        if self._strides is None and self._send is None and self._receive is None:
            self.quick = self._start

    def wait(self) -> None:
        """Raises as Pending.wait does."""
        pending, work = self._pending, self._work
        if pending is not None:
            self._pending = None
            pending.wait()
        elif work is not None and self._group is not None:
            arriving, self._work, self._arriving = self._arriving, None, None
            self._group.await_on_stream(work, self._device, self._sequence, self._text)
            if arriving is not None and self._unpack is not None:
                self._unpack(*arriving)


@final
class DirectTransfer:
    """A fetch or delivery of a plan. To be posted and awaited in turns.

    `group`: its team's, when it was posted and needs no request any more. `text`: what it is.
    `_start` then puts it on the stream, and `_counted` tells the group of that, too.
    """

    __slots__ = ("_communicator", "_counted", "_pending", "_start", "_transfer", "group", "text")

    def __init__(self, communicator: Communicator, transfer: SizedTransfer) -> None:
        self._communicator = communicator
        self._transfer = transfer
        self._pending: Pending | None = None
        self._start: Start | None = None
        self._counted: Start | None = None
        self.group: Group | None = None
        self.text = ""

    def post(self, src: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        """What the rank gets, once it has come. Raises as Communicator.post does."""
        start = self._counted
        if start is None:
            return self._post_request(self._transfer.request(src, into))
        src, out = self._transfer.buffers(src, into)
        start(out, src)
        return out

    def record(self, src: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        """As `post`, of one that has a group, onto a stream that records: the group does not
        count it."""
        assert self._start is not None
        src, out = self._transfer.buffers(src, into)
        self._start(out, src)
        return out

    def _post_request(self, request: CollectiveRequest) -> torch.Tensor:
        pending = self._pending = self._communicator.post(request)
        group = pending.group
        if group is not None and group.transport is not None:
            self.group, self.text = group, str(request)
            self._start = group.bind(request)
            if self._start is not None:
                self._counted = group.counted(self._start, request.out.device, self.text)
        return request.out

    def wait(self) -> None:
        """Raises as Pending.wait does. Nothing is to be waited for on the stream that has got the
        transfer."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
