"""Cutting a global tensor into the parts that ranks hold, and putting it together again.

A rank holds all combinations of the indices that it has of each axis (facts/holdings.py): blocks,
cycles, strided pieces, several mesh axes on one tensor axis, blocks that are shorter or empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from meshfuse.base.errors import Unsupported, UserError
from meshfuse.dist.collectives import reduce_blocks
from meshfuse.dist.packing import Region
from meshfuse.expr import ceildiv, const, const_value
from meshfuse.facts.holdings import Runs, held, shape_outside
from meshfuse.facts.sharding import Digit, Digits, Sharding, describe
from meshfuse.ir.mesh import DeviceMesh, ParallelType


def shard_tensor(tensor: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    """The part of a global tensor that `rank` holds, contiguous; it may share the tensor's memory.

    An axis that a mesh axis owns as a whole keeps a dim of size 1. A rank outside the mesh gets an
    empty tensor. Where ranks hold terms of a reduction, each gets the value that was given.

    Raises UserError for a tensor of another rank, and for an axis that is longer than what the
    ranks' blocks hold in all.
    """
    places = held_places(sharding, tensor.shape, rank)
    if places is None:
        return tensor.new_zeros(shape_outside(tensor.ndim))
    return Region(places, tensor.device).read(tensor).contiguous()


def unshard_tensor(
    parts: Mapping[int, torch.Tensor], sharding: Sharding, shape: Sequence[int]
) -> torch.Tensor:
    """The global tensor of this shape, given what ranks hold: the inverse of shard_tensor.

    Of replicas one is enough; the first in mesh order counts. Terms of a reduction are reduced,
    and all of them must be given. Raises UserError for a part that is missing or has another
    shape.
    """
    mesh = sharding.mesh
    numbered = number_digits(sharding, shape)
    first = next(iter(parts.values()))
    if mesh is None:
        return first.clone()
    out = first.new_empty(tuple(shape))
    for coordinates in _places(mesh, _axes_used(sharding)):
        terms = _find_terms(parts, sharding, mesh, coordinates)
        block = _reduce_terms(terms, sharding)
        region = Region(_runs(numbered, shape, coordinates), out.device)
        if block.shape != region.shape:
            raise UserError(
                f"unshard_tensor: a part has shape {tuple(block.shape)}; {describe(sharding)} of "
                f"{tuple(shape)} has parts of shape {region.shape} there"
            )
        region.write(out, block)
    return out


def held_places(sharding: Sharding, shape: Sequence[int], rank: int) -> tuple[Runs, ...] | None:
    """The indices of each axis that `rank` holds of a tensor of this global shape.

    None for a rank outside the mesh. Raises as shard_tensor.
    """
    numbered, mesh = number_digits(sharding, shape), sharding.mesh
    if mesh is not None and rank not in mesh.ids:
        return None
    owners = () if mesh is None else mesh.parallel_types()
    coordinates = {owner: _coordinate(mesh, rank, owner) for owner in owners if mesh is not None}
    return _runs(numbered, shape, coordinates)


def local_shape(sharding: Sharding, shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """The shape of what `rank` holds of a tensor of this global shape; zeros outside the mesh."""
    places = held_places(sharding, shape, rank)
    if places is None:
        return shape_outside(len(shape))
    return tuple(sum(map(len, runs)) for runs in places)


def number_digits(sharding: Sharding, shape: Sequence[int]) -> Sharding:
    """The sharding of a tensor of this global shape, all its extents numbers.

    One digit of an axis may be symbolic, and is as large as covers the axis:

        [mesh_x{2}, (i0 + 1) // 2] with 9  ->  [mesh_x{2}, 5]

    Raises UserError for a shape of another rank, or one that the digits do not cover.
    """
    if len(shape) != len(sharding.axes):
        raise UserError(
            f"a tensor of shape {tuple(shape)} cannot be sharded as {describe(sharding)}: "
            f"it must have {len(sharding.axes)} axes"
        )
    axes = tuple(_number_axis(sharding, axis, size) for axis, size in enumerate(shape))
    return Sharding(sharding.mesh, axes, sharding.partial)


def global_shape(local_shape: Sequence[int], sharding: Sharding) -> tuple[int, ...]:
    """The shape of the whole, given what one rank holds of it, where all hold equally much."""
    return tuple(
        size * math.prod(_mesh_sizes(digits, sharding.mesh))
        for size, digits in zip(local_shape, sharding.axes, strict=True)
    )


def _number_axis(sharding: Sharding, axis: int, size: int) -> Digits:
    digits, mesh = sharding.axes[axis], sharding.mesh
    if not digits:
        return (Digit(const(size)),)
    known = [
        const_value(digit.extent)
        if digit.owner is None or mesh is None
        else mesh.axis_size(digit.owner)
        for digit in digits
    ]
    covered = math.prod(n for n in known if n is not None)
    rest = const_value(ceildiv(size, covered)) if covered else 0
    if None not in known and covered < size:
        raise UserError(
            f"a tensor with axis {axis} of size {size} cannot be sharded as {describe(sharding)}: "
            f"the blocks of all ranks make up {covered}"
        )
    return tuple(
        Digit(const(rest or 0 if n is None else n), digit.owner)
        for n, digit in zip(known, digits, strict=True)
    )


def _runs(
    numbered: Sharding, shape: Sequence[int], coordinates: Mapping[ParallelType, int]
) -> tuple[Runs, ...]:
    return tuple(
        held(digits, size, coordinates) for digits, size in zip(numbered.axes, shape, strict=True)
    )


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


def _places(mesh: DeviceMesh, axes: Sequence[ParallelType]) -> Iterator[dict[ParallelType, int]]:
    """All coordinates along some mesh axes."""
    for place in itertools.product(*(range(mesh.axis_size(axis)) for axis in axes)):
        yield dict(zip(axes, place, strict=True))


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
