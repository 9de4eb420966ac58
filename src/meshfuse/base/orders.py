"""Memory orders: the dims of a tensor by stride, slowest first, and which are contiguous."""

from __future__ import annotations

from collections.abc import Sequence

from meshfuse.base.errors import UserError


def compute_tensor_descriptor(
    sizes: Sequence[int], strides: Sequence[int]
) -> tuple[list[bool | None], list[int]]:
    """(contiguity, stride_order) of a strided tensor.

    `contiguity` stands in memory order, slowest first: None for a dim of size 1 or stride 0, else
    whether the stride is size * stride of the next dim that is not None (1 for the last).
    `stride_order[k]` is the place of dim k counted from the fastest. Raises UserError for lengths
    that differ or a negative stride.
    """
    order = memory_order(sizes, strides)
    stride_order = [0] * len(order)
    for position, dim in enumerate(order):
        stride_order[dim] = len(order) - 1 - position
    return list(contiguity_in_order(sizes, strides, order)), stride_order


def memory_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Dims by falling stride, equal ones in place; a dim of stride 0 keeps its position."""
    if len(sizes) != len(strides):
        raise UserError(f"sizes {list(sizes)} and strides {list(strides)} differ in length")
    if any(stride < 0 for stride in strides):
        raise UserError(f"strides {list(strides)}: negative strides are not supported")
    moving = sorted((d for d, s in enumerate(strides) if s), key=lambda d: -strides[d])
    source = iter(moving)
    return tuple(next(source) if stride else dim for dim, stride in enumerate(strides))


def contiguity_in_order(
    sizes: Sequence[int], strides: Sequence[int], order: Sequence[int]
) -> tuple[bool | None, ...]:
    """The contiguity flag of each dim of `order` (slowest first)."""
    flags: list[bool | None] = []
    wanted = 1
    for dim in reversed(order):
        if sizes[dim] == 1 or strides[dim] == 0:
            flags.append(None)
            continue
        flags.append(strides[dim] == wanted)
        wanted = sizes[dim] * strides[dim]
    return tuple(reversed(flags))
