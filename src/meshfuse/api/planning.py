"""`multidevice.plan`: what a program would do on its meshes, found out without their devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch

from meshfuse.api.definition import FusionDefinition
from meshfuse.api.known_sizes import bind_sizes
from meshfuse.api.mesh_plan import MeshPlan, PlannedCommunication
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.expr import IntExpr, free_symbols
from meshfuse.facts.nominal import nominal_size
from meshfuse.host.memory_use import memory_use
from meshfuse.host.nodes import HostProgram
from meshfuse.host.printer import print_host_program
from meshfuse.host.traffic import Traffic, mesh_axis_name, traffic_of
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.program import Program
from meshfuse.pipeline import outline_program

BETWEEN_MESHES = "between meshes"
"""The link class of what goes from one mesh to another."""
_GIGA = 1e9


def plan(
    fd: FusionDefinition,
    inputs: Sequence[object] | None = None,
    *,
    link_classes: Mapping[str, str] | None = None,
    bandwidths: Mapping[str, float] | None = None,
) -> MeshPlan:
    """Compile a definition for its meshes as far as can be without devices, and account for it.

    `inputs`: for each a global shape, a tensor with that shape (on any device, meta too) or None;
    for a scalar its value or None. Sizes that this leaves open are nominal, which the plan says.
    `link_classes` names the link that each mesh axis uses, `{"tp": "nvlink", "dp": "network"}`, by
    default the axis' own name; an exchange along several axes counts for the first of the mesh.
    `bandwidths`: GB/s that a rank receives over a link, for estimates of time.

    No process, process group, device or C++ compiler is needed, and the definition stays open for
    changes. Raises what `execute` does for a program that cannot be compiled, UserError for shapes
    or link classes that do not fit.
    """
    if not isinstance(fd, FusionDefinition):
        raise UserTypeError(f"plan({type(fd).__name__}): takes a FusionDefinition first")
    program = fd.fusion.recording.program
    compilation = outline_program(program)
    known = {} if inputs is None else _bind_inputs(program, inputs)
    host, meshes = compilation.host, compilation.host.meshes
    _check_link_names(meshes, link_classes or {})
    nominal = _nominal_sizes(host, known)
    sizes = {**known, **nominal}
    first = {coordinate.symbol: 0 for coordinate in host.coordinates}
    found = [
        (each, _describe(each, link_classes or {}, bandwidths or {}))
        for each in traffic_of(host, {**sizes, **first})
    ]
    uses = [memory_use(host, {**sizes, **_place(host, r)}, r) for r in _first_ranks(meshes)]
    return MeshPlan(
        program=print_host_program(replace(host, kernels={})),
        ranks=len({rank for mesh in meshes for rank in mesh.ids}) or 1,
        communications=tuple(described for _, described in found),
        links=max((_links(found, rank) for rank in _first_ranks(meshes)), key=_total),
        memory=max(uses, key=lambda use: use.peak),
        sizes=sizes,
        nominal=tuple(nominal),
    )


# Sizes.


def _bind_inputs(program: Program, inputs: Sequence[object]) -> dict[str, int]:
    """The symbols that the inputs give. UserError for what does not fit them."""
    names = program.fusion.inputs
    if not isinstance(inputs, list | tuple):
        raise UserTypeError(f"plan(inputs={type(inputs).__name__}): takes one entry for each input")
    if len(inputs) != len(names):
        raise UserError(f"plan(inputs): expected {len(names)} entries, but got {len(inputs)}")
    shapes: list[tuple[Sequence[IntExpr], object]] = []
    known: dict[str, int] = {}
    for name, given in zip(names, cast(Sequence[object], inputs), strict=True):
        if given is None:
            continue
        if name in program.fusion.scalars:
            if isinstance(given, int):
                known[name] = int(given)
            continue
        extents = tuple(axis.extent for axis in program.tensor(TensorName(name)).tensor_axes)
        shapes.append((extents, list(given.shape) if isinstance(given, torch.Tensor) else given))
    return {**known, **bind_sizes("plan(inputs)", shapes)}


def _nominal_sizes(host: HostProgram, known: Mapping[str, int]) -> dict[str, int]:
    """Values for the symbols of the host program that are not known and say nothing of a rank."""
    extents = {
        extent for buffer in host.buffers.values() for extent in (*buffer.shape, *buffer.extents)
    }
    given = {*known, *(coordinate.symbol for coordinate in host.coordinates)}
    found = {symbol.name: symbol for extent in extents for symbol in free_symbols(extent)}
    return {name: nominal_size(found[name]) for name in sorted(found.keys() - given)}


# Ranks.


def _first_ranks(meshes: Sequence[DeviceMesh]) -> tuple[int, ...]:
    """One rank of each mesh, the first: blocks that are not even are largest there."""
    return tuple(dict.fromkeys(mesh.ids[0] for mesh in meshes)) or (0,)


def _place(host: HostProgram, rank: int) -> dict[str, int]:
    """The coordinates of a rank; 0 on meshes that it is not in."""
    return {each.symbol: each.of(rank) for each in host.coordinates}


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


def _check_link_names(meshes: Sequence[DeviceMesh], names: Mapping[str, str]) -> None:
    known = dict.fromkeys(
        name
        for mesh in meshes
        for axis in mesh.parallel_types()
        for name in (mesh_axis_name(mesh, axis), str(axis))
    )
    for name in names:
        if name not in known and name != BETWEEN_MESHES:
            raise UserError(
                f"plan(link_classes={dict(names)}): {name!r} is no mesh axis; there are "
                f"{', '.join(map(repr, (*known, BETWEEN_MESHES)))}"
            )


def _describe(
    traffic: Traffic, link_classes: Mapping[str, str], bandwidths: Mapping[str, float]
) -> PlannedCommunication:
    node = traffic.node
    names = tuple(mesh_axis_name(node.mesh, axis) for axis in traffic.mesh_axes)
    spoken = (names[0], str(traffic.mesh_axes[0])) if names else (BETWEEN_MESHES,)
    link = next((link_classes[name] for name in spoken if name in link_classes), spoken[0])
    bandwidth = bandwidths.get(link)
    return PlannedCommunication(
        node.number,
        node.collective.value,
        names,
        link,
        traffic.team,
        traffic.received,
        node.cause,
        None if bandwidth is None else traffic.received / (bandwidth * _GIGA),
    )
