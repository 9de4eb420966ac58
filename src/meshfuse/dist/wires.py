"""What a collective moves: tensors as flat memory, on both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.packing import Packing


@final
@frozen_dataclass
class Wire:
    """What a rank sends and receives, as flat memory. `finish` makes `out` of what has arrived."""

    send: torch.Tensor
    receive: torch.Tensor
    finish: Callable[[], None]


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as a 1-D view of stride 1, in memory order.

    Axes of size 1 may have any stride, and `view` would keep it where all axes are. Raises
    InvariantError for memory with holes or overlaps.
    """
    if tensor.is_contiguous():
        return tensor.as_strided((tensor.numel(),), (1,))
    squeezed = tensor.squeeze()
    order = sorted(range(squeezed.ndim), key=squeezed.stride, reverse=True)
    ordered = squeezed.permute(order)
    if not ordered.is_contiguous():
        raise InvariantError(
            f"a buffer of a collective must be dense in memory; this one has sizes "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}"
        )
    return ordered.as_strided((tensor.numel(),), (1,))


def wire_of(src: torch.Tensor, out: torch.Tensor, packing: Packing | None) -> Wire:
    """What a collective sends and receives: the memory of its buffers where they need no
    packing."""
    if packing is None:
        return Wire(memory_of(src), memory_of(out), lambda: None)
    send, memory = packing.sends.pack(src), packing.received_in(out)
    receive = out.new_empty(packing.receives.elements) if memory is None else memory

    def finish() -> None:
        if memory is None:
            packing.receives.unpack(receive, out)
        packing.keep(src, out)

    return Wire(send, receive, finish)
