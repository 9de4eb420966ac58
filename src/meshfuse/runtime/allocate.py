"""Memory of local buffers: contiguous in a given memory order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch


def dense_strides(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose dims lie in memory in `order`, slowest first, without gaps."""
    strides = [0] * len(sizes)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return tuple(strides)


def allocate(
    sizes: Sequence[int], order: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Uninitialised memory for a tensor, dense in memory order."""
    return torch.empty_strided(sizes, dense_strides(sizes, order), dtype=dtype, device=device)


def allocator(
    sizes: Sequence[int],
    order: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    room: int = 0,
) -> Callable[[], torch.Tensor]:
    """What allocates such tensors, each with `room` for so many elements behind it."""
    shape, strides = tuple(sizes), dense_strides(sizes, order)
    if not room:
        return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
    whole = partial(torch.empty, math.prod(shape) + room, dtype=dtype, device=device)
    return lambda: whole().as_strided(shape, strides)


def memory_with_room(tensor: torch.Tensor, shape: tuple[int]) -> torch.Tensor:
    """The flat memory of a tensor that an allocator has made, with all the room behind it.

    `shape`: (elements of both,). Raises RuntimeError where there is less room.
    """
    whole = tensor._base  # of which it is a view, unless that was made in torch's inference mode
    if whole is not None and whole.shape == shape:
        return whole
    return tensor.as_strided(shape, (1,))


def is_dense(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether the tensor lies in memory in `order` without gaps; dims of size 1 lie anywhere."""
    if tensor.is_contiguous() and tuple(order) == tuple(range(len(order))):
        return True
    wanted = dense_strides(tensor.shape, order)
    pairs = zip(tensor.shape, tensor.stride(), wanted, strict=True)
    return tensor.numel() == 0 or all(size == 1 or have == want for size, have, want in pairs)


def as_dense(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The tensor itself if it is dense in memory order, else a copy that is."""
    if is_dense(tensor, order):
        return tensor
    return allocate(tensor.shape, order, tensor.dtype, tensor.device).copy_(tensor)
