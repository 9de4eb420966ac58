"""Orders of dims: checking dims that users write, permutations, and the layout of strided memory.

Two ways to write the memory order of n dims. An *order* lists the dims, slowest first, as
allocations do. A *stride order* gives each dim its rank counted from the fastest, as users write
it: 0 is the fastest dim, so row-major is (n-1, ..., 1, 0).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshfuse.base.errors import UserError, UserTypeError

# Dims as users write them. `call` restates the user's call in errors.


def wrap_dim(dim: object, rank: int, call: str) -> int:
    """`dim`, counted from the end if negative, as one in [0, rank)."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise UserTypeError(f"{call}: a dim is an int, got {dim!r} of type {type(dim).__name__}")
    if not -rank <= dim < rank:
        limits = f"must lie in [-{rank}, {rank})" if rank else "has no place in a 0-dim tensor"
        raise UserError(f"{call}: dim {dim} {limits}")
    return dim % rank


def wrap_dims(dims: Sequence[int], rank: int, call: str) -> tuple[int, ...]:
    """Distinct dims, wrapped, in the order given."""
    if not isinstance(dims, Sequence) or isinstance(dims, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # users' values
        raise UserTypeError(f"{call}: dims are a list of ints, got {type(dims).__name__}")
    wrapped = tuple(wrap_dim(dim, rank, call) for dim in dims)
    for dim in wrapped:
        if wrapped.count(dim) > 1:
            raise UserError(f"{call}: dim {dim} stands twice in {list(dims)}")
    return wrapped


def wrap_permutation(dims: Sequence[int], rank: int, call: str) -> tuple[int, ...]:
    """A permutation of range(rank), wrapped."""
    wrapped = wrap_dims(dims, rank, call)
    if len(wrapped) != rank:
        raise UserError(f"{call}: got {len(wrapped)} dims; the tensor has {rank} axes")
    return wrapped


# Permutations.


def invert(permutation: Sequence[int]) -> tuple[int, ...]:
    """The inverse: invert(p)[p[k]] == k."""
    inverse = [0] * len(permutation)
    for position, value in enumerate(permutation):
        inverse[value] = position
    return tuple(inverse)


def order_of_stride_order(stride_order: Sequence[int]) -> tuple[int, ...]:
    """(1, 2, 0): dim 1 is slowest, dim 2 fastest  ->  (1, 0, 2)."""
    return tuple(reversed(invert(stride_order)))


def stride_order_of_order(order: Sequence[int]) -> tuple[int, ...]:
    """(1, 0, 2): dim 1 is slowest, dim 2 fastest  ->  (1, 2, 0)."""
    return invert(tuple(reversed(order)))


# Strided memory.


def compute_tensor_descriptor(
    sizes: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[bool | None, ...], tuple[int, ...]]:
    """(contiguity, stride_order) of a strided tensor.

    `contiguity` stands in memory order, slowest first: None for a dim of size 1 or stride 0, else
    whether the stride is size * stride of the next dim that is not None (1 for the last). Raises
    UserError for lengths that differ or a negative size or stride.
    """
    order = memory_order(sizes, strides)
    return contiguity_in_order(sizes, strides, order), stride_order_of_order(order)


def memory_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Dims by falling stride, equal ones in place; a dim of stride 0 keeps its position."""
    if len(sizes) != len(strides):
        raise UserError(f"sizes {list(sizes)} and strides {list(strides)} differ in length")
    if any(size < 0 for size in sizes):
        raise UserError(f"sizes {list(sizes)}: a size must not be negative")
    if any(stride < 0 for stride in strides):
        raise UserError(f"strides {list(strides)}: negative strides are not supported")
    moving = sorted((d for d, s in enumerate(strides) if s), key=lambda d: -strides[d])
    by_stride = iter(moving)
    return tuple(next(by_stride) if stride else dim for dim, stride in enumerate(strides))


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
