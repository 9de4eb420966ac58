"""What the ranks of a host program must agree on before they run it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshfuse.dist.agreement import CommunicationSequence
from meshfuse.expr import IntExpr, free_symbols
from meshfuse.facts.sharding import describe
from meshfuse.host.nodes import (
    Communicate,
    ForLoop,
    HostBuffer,
    HostProgram,
    all_nodes,
    loop_around,
)
from meshfuse.host.printer import print_node
from meshfuse.host.symbols import SizeOf


def sequences_of(
    program: HostProgram, rank: int, origins: Mapping[str, SizeOf], drawing: Sequence[int]
) -> tuple[CommunicationSequence, ...]:
    """For each set of ranks that meet, `rank` among them: their collectives, and their sizes.

    All ranks of a set know all of its sizes: they need them for what they send or receive. By team,
    so that ranks come to the agreements of several teams in one order. `origins` say where this
    rank reads sizes; ranks of `drawing` draw random numbers together.
    """
    nodes: dict[tuple[int, ...], list[Communicate]] = {}
    loops = [node for node in all_nodes(program.body) if isinstance(node, ForLoop)]
    for node in all_nodes(program.body):
        if isinstance(node, Communicate) and node.moves and rank in node.ranks:
            nodes.setdefault(tuple(sorted(node.ranks)), []).append(node)
    drawn = tuple(sorted(drawing))
    if len(drawn) > 1 and rank in drawn:
        nodes.setdefault(drawn, [])
    local = {coordinate.symbol for coordinate in program.coordinates}
    local.update(loop.index for loop in loops)
    counts = {found.name for loop in loops for found in free_symbols(loop.count)} - local
    found: list[CommunicationSequence] = []
    for team in sorted(nodes):
        entries = [_agreed_text(program, node) for node in nodes[team]]
        entries += ["random numbers"] if team == drawn else []
        names = {name for node in nodes[team] for name in _sizes_of(program, node)} - local
        names |= counts if any(loop_around(program.body, node) for node in nodes[team]) else set()
        texts = {name: _describe_size(name, origins) for name in names}
        found.append(CommunicationSequence.of(team, entries, texts))
    return tuple(found)


def _agreed_text(program: HostProgram, node: Communicate) -> str:
    """All that a communication depends on but sizes; the same on every rank."""
    loop = loop_around(program.body, node)
    times = "" if loop is None else f", {loop.count} times"
    sides = (program.buffers[node.src].sharding, program.buffers[node.out].sharding)
    src, out = ("" if side is None else describe(side) for side in sides)
    return f"{print_node(node)}, from {src} to {out}{times}"


def _sizes_of(program: HostProgram, node: Communicate) -> Iterable[str]:
    for extent in _extents_of(program.buffers[node.src], program.buffers[node.out]):
        for symbol in free_symbols(extent):
            yield symbol.name


def _extents_of(*buffers: HostBuffer) -> Iterable[IntExpr]:
    for buffer in buffers:
        yield from buffer.extents
        if buffer.sharding is not None:
            yield from (digit.extent for digits in buffer.sharding.axes for digit in digits)


def _describe_size(name: str, origins: Mapping[str, SizeOf]) -> str:
    origin = origins.get(name)
    return name if origin is None else f"{name}, axis {origin.axis} of {origin.tensor}"
