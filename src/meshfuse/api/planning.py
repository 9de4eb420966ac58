"""`multidevice.plan`: what a program would do on its meshes, found out without their devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshfuse.api.definition import FusionDefinition
from meshfuse.api.known_sizes import bind_input_sizes, coordinates_of, nominal_sizes
from meshfuse.api.links import Links, axis_names, ranks_of, read_links
from meshfuse.api.mesh_plan import MeshPlan, PlannedCommunication
from meshfuse.api.overlap_choice import Overlapping, form_unmeasured
from meshfuse.base.errors import UserTypeError
from meshfuse.host.memory_use import memory_use
from meshfuse.host.printer import print_host_program
from meshfuse.host.traffic import Traffic, traffic_of
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.pipeline import outline_program


def plan(
    fd: FusionDefinition,
    inputs: Sequence[object] | None = None,
    *,
    link_classes: Mapping[str, str] | None = None,
    bandwidths: Mapping[str, float] | None = None,
    overlap: Overlapping | None = None,
) -> MeshPlan:
    """Compile a definition for its meshes as far as can be without devices, and account for it.

    `inputs`: for each a global shape, a tensor with that shape (on any device, meta too) or None;
    for a scalar its value or None. Sizes that this leaves open are nominal, which the plan says.
    `link_classes` names the link that each mesh axis uses, `{"tp": "nvlink", "dp": "network"}`, by
    default the axis' own name; an exchange along several axes counts for the first of the mesh.
    `bandwidths`: GB/s that a rank receives over a link, for estimates of time. `overlap`: a form
    instead of the plain one, multidevice.Overlap.chunks(n) or .peers().

    No process, process group, device or C++ compiler is needed, and the definition stays open for
    changes. Raises what `execute` does for a program that cannot be compiled, UserError for shapes
    or link classes that do not fit.
    """
    if not isinstance(fd, FusionDefinition):
        raise UserTypeError(f"plan({type(fd).__name__}): takes a FusionDefinition first")
    program = fd.fusion.recording.program
    compilation = outline_program(program, form_unmeasured("plan", overlap))
    known = bind_input_sizes("plan", program, inputs)
    host, meshes = compilation.host, compilation.host.meshes
    links = read_links("plan", host, link_classes, bandwidths)
    nominal = nominal_sizes(host, known)
    sizes = {**known, **nominal}
    first = {coordinate.symbol: 0 for coordinate in host.coordinates}
    found = [(each, _describe(each, links)) for each in traffic_of(host, {**sizes, **first})]
    ranks = _first_ranks(meshes)
    uses = [memory_use(host, {**sizes, **coordinates_of(meshes, r)}, r) for r in ranks]
    return MeshPlan(
        program=print_host_program(replace(host, kernels={})),
        ranks=len(ranks_of(meshes)),
        communications=tuple(described for _, described in found),
        links=max((_links(found, rank) for rank in ranks), key=_total),
        memory=max(uses, key=lambda use: use.peak),
        sizes=sizes,
        nominal=tuple(nominal),
    )


# Ranks.


def _first_ranks(meshes: Sequence[DeviceMesh]) -> tuple[int, ...]:
    """One rank of each mesh, the first: blocks that are not even are largest there."""
    return tuple(dict.fromkeys(mesh.ids[0] for mesh in meshes)) or (0,)


# Links.


def _links(found: Sequence[tuple[Traffic, PlannedCommunication]], rank: int) -> dict[str, int]:
    """The bytes that a rank receives over each link."""
    links: dict[str, int] = {}
    for traffic, described in found:
        mesh = traffic.node.to_mesh or traffic.node.mesh
        received = described.bytes if rank in mesh.places else 0
        links[described.link] = links.get(described.link, 0) + received
    return links


def _total(links: Mapping[str, int]) -> int:
    return sum(links.values())


def _describe(traffic: Traffic, links: Links) -> PlannedCommunication:
    node, link = traffic.node, links.link_of(traffic)
    speed = links.bytes_per_second(link)
    return PlannedCommunication(
        node.number,
        node.collective.value,
        axis_names(traffic),
        link,
        traffic.team,
        traffic.received,
        node.cause,
        None if speed is None else traffic.busiest / speed,
    )
