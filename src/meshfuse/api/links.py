"""Which link a communication uses, and how quick it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, final

from meshfuse.base.errors import UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.host.nodes import HostProgram
from meshfuse.host.traffic import Traffic, mesh_axis_name
from meshfuse.ir.mesh import DeviceMesh

BETWEEN_MESHES: Final = "between meshes"
"""The link class of what goes from one mesh to another."""
_GIGA = 1e9


@final
@frozen_dataclass
class Links:
    """`classes` names the link of each mesh axis, `bandwidths` has GB/s that a rank receives."""

    classes: Mapping[str, str]
    bandwidths: Mapping[str, float]

    def link_of(self, traffic: Traffic) -> str:
        """By default the axis' own name; along several axes, that of the first of the mesh."""
        names = axis_names(traffic)
        spoken = (names[0], str(traffic.mesh_axes[0])) if names else (BETWEEN_MESHES,)
        return next((self.classes[name] for name in spoken if name in self.classes), spoken[0])

    def bytes_per_second(self, link: str) -> float | None:
        bandwidth = self.bandwidths.get(link)
        return None if bandwidth is None else bandwidth * _GIGA


def read_links(
    call: str,
    host: HostProgram,
    classes: Mapping[str, str] | None,
    bandwidths: Mapping[str, float] | None,
) -> Links:
    """UserError for a mesh axis that there is not, and for a bandwidth that moves nothing."""
    links = Links(classes or {}, bandwidths or {})
    known = dict.fromkeys(
        name
        for mesh in host.meshes
        for axis in mesh.parallel_types()
        for name in (mesh_axis_name(mesh, axis), str(axis))
    )
    for name in links.classes:
        if name not in known and name != BETWEEN_MESHES:
            raise UserError(
                f"{call}(link_classes={dict(links.classes)}): {name!r} is no mesh axis; there are "
                f"{', '.join(map(repr, (*known, BETWEEN_MESHES)))}"
            )
    for name, bandwidth in links.bandwidths.items():
        if not bandwidth > 0:
            raise UserError(
                f"{call}(bandwidths={dict(links.bandwidths)}): {name!r} must be GB/s above 0"
            )
    return links


def axis_names(traffic: Traffic) -> tuple[str, ...]:
    """The mesh axes along which data moves, none between two meshes."""
    return tuple(mesh_axis_name(traffic.node.mesh, axis) for axis in traffic.mesh_axes)


def ranks_of(meshes: Sequence[DeviceMesh]) -> frozenset[int]:
    """All ranks of these meshes; rank 0 where there are none."""
    return frozenset(rank for mesh in meshes for rank in mesh.ids) or frozenset((0,))
