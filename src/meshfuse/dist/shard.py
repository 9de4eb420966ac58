"""Cutting a global tensor into the parts that ranks hold, and putting it together again.

A sharding sees each tensor axis as digits of its index, most significant first. Cutting views the
tensor with one dim per digit and picks, on each dim that a mesh axis owns, this rank's coordinate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from meshfuse.base.errors import Unsupported, UserError
from meshfuse.dist.collectives import reduce_blocks
from meshfuse.expr import const_value
from meshfuse.facts.sharding import Digits, Sharding, describe
from meshfuse.ir.mesh import DeviceMesh, ParallelType


@final
@dataclass(frozen=True, slots=True)
class _DigitView:
    """A tensor of `shape` seen with one dim per digit: sizes, and per dim the mesh axis that owns
    it."""

    shape: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    owners: tuple[tuple[ParallelType | None, ...], ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` with one dim per digit. A view, whatever its strides."""
        for axis in reversed(range(len(self.shape))):
            tensor = tensor.unflatten(axis, self.sizes[axis])
        return tensor

    def index(self, coordinates: Mapping[ParallelType, int]) -> tuple[int | slice, ...]:
        """Picks from the view what the rank with these coordinates holds."""
        return tuple(
            slice(None) if owner is None else coordinates[owner]
            for owners in self.owners
            for owner in owners
        )

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(
            math.prod(n for n, owner in zip(sizes, owners, strict=True) if owner is None)
            for sizes, owners in zip(self.sizes, self.owners, strict=True)
        )


def shard_tensor(tensor: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    """The part of a global tensor that `rank` holds, contiguous; it may share the tensor's memory.

    An axis that a mesh axis owns as a whole keeps a dim of size 1. A rank outside the mesh gets an
    empty tensor. Where ranks hold terms of a reduction, each gets the value that was given.

    Raises UserError for a tensor of another rank, Unsupported for sizes that the digits do not
    divide.
    """
    _check_ndim(tensor.shape, sharding)
    view = _view_digits(tensor.shape, sharding)
    mesh = sharding.mesh
    if mesh is None:
        return tensor.contiguous()
    if rank not in mesh.ids:
        return tensor.new_zeros((0,) * tensor.ndim)
    coordinates = {owner: _coordinate(mesh, rank, owner) for owner in mesh.parallel_types()}
    part = view.of(tensor)[view.index(coordinates)]
    return part.reshape(view.local_shape).contiguous()


def unshard_tensor(
    parts: Mapping[int, torch.Tensor], sharding: Sharding, shape: Sequence[int]
) -> torch.Tensor:
    """The global tensor of this shape, given what ranks hold: the inverse of shard_tensor.

    Of replicas one is enough; the first in mesh order counts. Terms of a reduction are reduced,
    and all of them must be given. Raises UserError for a part that is missing or has another
    shape.
    """
    _check_ndim(shape, sharding)
    mesh = sharding.mesh
    if mesh is None:
        return next(iter(parts.values())).clone()
    view = _view_digits(shape, sharding)
    shards = _axes_used(sharding)
    first = next(iter(parts.values()))
    out = first.new_empty(tuple(shape))
    target = view.of(out)
    for place in itertools.product(*(range(mesh.axis_size(axis)) for axis in shards)):
        coordinates = dict(zip(shards, place, strict=True))
        terms = _find_terms(parts, sharding, mesh, coordinates)
        block = _reduce_terms(terms, sharding)
        if block.shape != view.local_shape:
            raise UserError(
                f"unshard_tensor: a part has shape {tuple(block.shape)}; {describe(sharding)} of "
                f"{tuple(shape)} has parts of shape {view.local_shape}"
            )
        index = view.index(coordinates)
        target[index] = block.reshape(target[index].shape)
    return out


def global_shape(local_shape: Sequence[int], sharding: Sharding) -> tuple[int, ...]:
    """The shape of the whole, given what one rank holds of it."""
    return tuple(
        size * math.prod(_mesh_sizes(digits, sharding.mesh))
        for size, digits in zip(local_shape, sharding.axes, strict=True)
    )


def _check_ndim(shape: Sequence[int], sharding: Sharding) -> None:
    if len(shape) != len(sharding.axes):
        raise UserError(
            f"a tensor of shape {tuple(shape)} cannot be sharded as {describe(sharding)}: "
            f"it must have {len(sharding.axes)} axes"
        )


def _view_digits(shape: Sequence[int], sharding: Sharding) -> _DigitView:
    sizes = tuple(_digit_sizes(axis, shape[axis], sharding) for axis in range(len(shape)))
    owners = tuple(tuple(digit.owner for digit in digits) or (None,) for digits in sharding.axes)
    return _DigitView(tuple(shape), sizes, owners)


def _digit_sizes(axis: int, size: int, sharding: Sharding) -> tuple[int, ...]:
    """The extents of an axis' digits; one of them may be symbolic, and then follows from the
    size."""
    digits = sharding.axes[axis]
    if not digits:
        return (size,)
    known = [
        const_value(digit.extent)
        if digit.owner is None or sharding.mesh is None
        else sharding.mesh.axis_size(digit.owner)
        for digit in digits
    ]
    product = math.prod(n for n in known if n is not None)
    unknown = known.count(None)
    rest = size // product if unknown and product else 1
    if unknown > 1 or product * rest != size:
        size_wanted = f"a multiple of {product}" if unknown else str(product)
        raise Unsupported(
            f"a tensor with axis {axis} of size {size} cannot be sharded as {describe(sharding)}: "
            f"every rank must hold a block of the same size, so it must be {size_wanted}"
        )
    return tuple(rest if n is None else n for n in known)


def _mesh_sizes(digits: Digits, mesh: DeviceMesh | None) -> list[int]:
    if mesh is None:
        return []
    return [mesh.axis_size(digit.owner) for digit in digits if digit.owner is not None]


def _coordinate(mesh: DeviceMesh, rank: int, axis: ParallelType) -> int:
    coordinate = mesh.coordinate(rank, axis)
    if coordinate is None:
        raise UserError(f"rank {rank} is not in {mesh}")
    return coordinate


def _axes_used(sharding: Sharding) -> tuple[ParallelType, ...]:
    """The mesh axes that shard the tensor, in mesh order."""
    owners = {digit.owner for digits in sharding.axes for digit in digits}
    mesh = sharding.mesh
    return () if mesh is None else tuple(axis for axis in mesh.parallel_types() if axis in owners)


def _find_terms(
    parts: Mapping[int, torch.Tensor],
    sharding: Sharding,
    mesh: DeviceMesh,
    coordinates: Mapping[ParallelType, int],
) -> list[torch.Tensor]:
    """The terms of one block, one for each place along the partial mesh axes, in mesh order."""
    terms: dict[tuple[int, ...], torch.Tensor] = {}
    for rank in mesh.ids:
        here = all(mesh.coordinate(rank, axis) == place for axis, place in coordinates.items())
        if here and rank in parts:
            term = tuple(_coordinate(mesh, rank, axis) for axis in sharding.partial)
            terms.setdefault(term, parts[rank])
    wanted = math.prod(mesh.axis_size(axis) for axis in sharding.partial)
    if len(terms) != wanted:
        place = ", ".join(f"{axis}={k}" for axis, k in coordinates.items()) or "anywhere"
        raise UserError(
            f"unshard_tensor: {describe(sharding)} needs {wanted} part(s) of the ranks at {place}; "
            f"of those, ranks {tuple(parts)} hold {len(terms)}"
        )
    return list(terms.values())


def _reduce_terms(terms: Sequence[torch.Tensor], sharding: Sharding) -> torch.Tensor:
    if not sharding.partial:
        return terms[0]
    functions = set(sharding.partial.values())
    if len(functions) > 1:
        raise Unsupported(f"{describe(sharding)}: reductions of several kinds at once")
    reduced = torch.empty_like(terms[0])
    reduce_blocks(terms, functions.pop(), reduced)
    return reduced
