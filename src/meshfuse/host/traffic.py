"""What the communications of a host program bring to one rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import final

from meshfuse.base.dtypes import ITEM_BYTES
from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.shard import number_digits
from meshfuse.expr import evaluate
from meshfuse.facts.digits import Sharding
from meshfuse.facts.holdings import value_at
from meshfuse.facts.received import exchanged, largest_part
from meshfuse.host.nodes import Collective, Communicate, HostBuffer, HostProgram
from meshfuse.host.unroll import iterations
from meshfuse.ir.mesh import DeviceMesh, ParallelType


@final
@frozen_dataclass
class Traffic:
    """One communication: the mesh axes along which data moves, none between two meshes.

    `team`: how many ranks may take part at once. `received` is in bytes, of the rank that receives
    most; `busiest` what goes out of a rank or into it, of the one for which that is most: of a
    fetch more, where several ranks fetch from one.
    """

    node: Communicate
    mesh_axes: tuple[ParallelType, ...]
    team: int
    received: int
    busiest: int


def traffic_of(program: HostProgram, sizes: Mapping[str, int]) -> tuple[Traffic, ...]:
    """The communications in the order in which they are posted, at these values of all symbols;
    those in loops once for each iteration.

    An all-reduce counts as a reduce-scatter and an all-gather: each rank receives all parts but its
    own twice.
    """
    return tuple(
        _traffic(node, program.buffers[node.src], program.buffers[node.out], there)
        for node, there in iterations(program.body, sizes)
        if isinstance(node, Communicate)
    )


def _traffic(
    node: Communicate, src: HostBuffer, out: HostBuffer, sizes: Mapping[str, int]
) -> Traffic:
    if node.is_transfer and node.mesh_axis is not None:
        brought = _brought_by_peers(node, node.mesh_axis, out, sizes)
        busy: Counter[int | None] = Counter()
        for owner, elements in brought:
            busy[owner] += elements
        received = max(elements for _, elements in brought) * ITEM_BYTES[src.dtype]
        busiest = max(busy.values()) * ITEM_BYTES[src.dtype]
        return Traffic(node, (node.mesh_axis,), len(brought), received, busiest)
    shape = [evaluate(extent, sizes) for extent in src.extents]
    if src.sharding is None or out.sharding is None:
        raise InvariantError(f"{node.src} is communicated and has no mesh")
    before, after = number_digits(src.sharding, shape), number_digits(out.sharding, shape)
    axes = _mesh_axes(node, before, after)
    team = math.prod(map(node.mesh.axis_size, axes)) if node.to_mesh is None else len(node.ranks)
    part = largest_part(after.axes, shape)
    match node.collective:
        case Collective.all_gather | Collective.exchange:
            elements = exchanged(before, after, shape)
        case Collective.reduce_scatter:
            elements = (team - 1) * part
        case Collective.all_reduce:
            elements = 2 * (part - part // team)
        case Collective.fetch | Collective.deliver:
            raise InvariantError(f"{node.out} comes from peers, but nobody says from which")
    received = elements * ITEM_BYTES[src.dtype]
    return Traffic(node, axes, team, received, received)


def _brought_by_peers(
    node: Communicate, mesh_axis: ParallelType, out: HostBuffer, sizes: Mapping[str, int]
) -> list[tuple[int | None, int]]:
    """For each place its owner, and how many elements move between them; nobody gets anything from
    itself."""
    mesh = node.mesh
    found: list[tuple[int | None, int]] = []
    for place in range(mesh.axis_size(mesh_axis)):
        owner = node.owner_at(place, sizes)
        shape = (value_at(extent, mesh, mesh_axis, place, sizes) for extent in out.shape)
        found.append((owner, 0 if owner == place else math.prod(shape)))
    return found


def _mesh_axes(node: Communicate, before: Sharding, after: Sharding) -> tuple[ParallelType, ...]:
    """Those on whose place it depends what a rank sends: of an exchange, in the mesh's order."""
    if node.mesh_axis is not None:
        return (node.mesh_axis,)
    if node.to_mesh is not None:
        return ()
    moved = {
        digit.owner
        for have, want in zip(before.axes, after.axes, strict=True)
        if have != want
        for digit in (*have, *want)
    }
    return tuple(axis for axis in node.mesh.parallel_types() if axis in moved)


def mesh_axis_name(mesh: DeviceMesh, mesh_axis: ParallelType) -> str:
    """The name that the mesh gives an axis, else `mesh_x` and so on."""
    return mesh.names[mesh.ndim - 1 - mesh_axis.mesh_position] or str(mesh_axis)
