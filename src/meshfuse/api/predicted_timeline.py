"""Timelines of programs that nobody has run: compiled as far as can be without devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshfuse.api.known_sizes import bind_input_sizes, coordinates_of, nominal_sizes
from meshfuse.api.links import Links, ranks_of, read_links
from meshfuse.api.timeline import Timeline, nominal_notes
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.expr import IntExpr
from meshfuse.facts.overlap_form import PLAIN, Overlap
from meshfuse.facts.sharding import rank_extents
from meshfuse.host.device_rates import CPU_RATES, DeviceRates
from meshfuse.host.nodes import HostProgram, KernelName
from meshfuse.host.prediction import Transmission, predict_items
from meshfuse.host.timeline import Segments
from meshfuse.host.traffic import traffic_of
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.program import Program
from meshfuse.pipeline import Compilation, outline_program


def predict_timeline(
    program: Program,
    inputs: Sequence[object] | None,
    rank: int | None,
    rates: DeviceRates | None,
    link_classes: Mapping[str, str] | None,
    bandwidths: Mapping[str, float] | None,
    global_sizes: object = None,
    form: Overlap = PLAIN,
) -> Timeline:
    """The timeline of `rank` in a form of overlap, by a cost model. Inputs, links and errors as for
    `plan`."""
    if global_sizes is not None:
        raise UserError(
            f"timeline(global_sizes={global_sizes!r}): for a prediction the shapes in inputs are "
            "global; global_sizes goes with measured=True"
        )
    rank, rates = 0 if rank is None else rank, CPU_RATES if rates is None else rates
    if not isinstance(rates, DeviceRates):
        raise UserTypeError(f"timeline(rates={rates!r}): takes DeviceRates")
    compilation = outline_program(program, form)
    host, segments = compilation.host, segments_of(compilation)
    meshes = host.meshes
    _check_rank(rank, meshes)
    links = read_links("timeline", host, link_classes, bandwidths)
    known = bind_input_sizes("timeline", program, inputs)
    known |= coordinates_of(meshes, rank)
    nominal = nominal_sizes(host, known, _extents(segments))
    sizes = {**known, **nominal}
    transmissions, notes = _transmissions(host, sizes, links, rates)
    return Timeline(
        rank,
        is_measured=False,
        source=rates.name,
        items=predict_items(host, segments, sizes, rank, rates, transmissions),
        notes=(*nominal_notes(nominal), *notes),
    )


def predict_call(
    compilation: Compilation, known: Mapping[str, int], rank: int, rates: DeviceRates
) -> Timeline:
    """The timeline of `rank` for what is compiled, by a cost model. `known`: sizes by symbol."""
    host, segments = compilation.host, segments_of(compilation)
    known = {**known, **coordinates_of(host.meshes, rank)}
    sizes = {**known, **nominal_sizes(host, known, _extents(segments))}
    transmissions, _ = _transmissions(host, sizes, Links({}, {}), rates)
    items = predict_items(host, segments, sizes, rank, rates, transmissions)
    return Timeline(rank, is_measured=False, source=rates.name, items=items)


def segments_of(compilation: Compilation) -> Segments:
    """The program of each kernel: kernels are named like their segments."""
    parts = compilation.segmented.segments
    return {KernelName(part.name): part.program for part in parts}


def _extents(segments: Segments) -> list[IntExpr]:
    return [
        extent
        for program in segments.values()
        for name in program.fusion.tensors
        for extent in rank_extents(program, TensorName(name))
    ]


def _check_rank(rank: object, meshes: Sequence[DeviceMesh]) -> None:
    if type(rank) is not int:
        raise UserTypeError(f"timeline(rank={rank!r}): a rank is an int")
    ranks = ranks_of(meshes)
    if rank not in ranks:
        raise UserError(
            f"timeline(rank={rank}): the program runs on {len(ranks)} ranks, {min(ranks)} to "
            f"{max(ranks)}, and that is none of them"
        )


def _transmissions(
    host: HostProgram, sizes: Mapping[str, int], links: Links, rates: DeviceRates
) -> tuple[dict[int, list[Transmission]], tuple[str, ...]]:
    """What each communication takes of the rank that receives most, and what was taken for it.

    One for which no ranks meet takes nothing.
    """
    first = {coordinate.symbol: 0 for coordinate in host.coordinates}
    found: dict[int, list[Transmission]] = {}
    taken: dict[str, str] = {}
    for traffic in traffic_of(host, {**sizes, **first}):
        link = links.link_of(traffic)
        speed = links.bytes_per_second(link)
        if speed is None:
            speed = rates.link_bytes
            taken[link] = f"{link}: {speed / 1e9:g} GB/s, taken for want of a bandwidth"
        sent = Transmission(traffic.received, traffic.busiest / speed, rates.communication)
        if not traffic.node.moves:
            sent = Transmission(traffic.received, 0.0)
        elif not traffic.node.is_transfer:  # ranks meet for it, over the link
            sent = Transmission(traffic.received, sent.begin + sent.seconds)
        found.setdefault(traffic.node.number, []).append(sent)
    return found, tuple(taken.values())
