"""What peers fetch is made in memory that they can read: it is not copied there to be sent.

T4 = allocate(global, 48)                       T4 = allocate(symmetric, 48)
.. terms are added up in T4 ..             ->   ..
T5 = communicate(fetch, T4, .., owner=..)       T5 = communicate(fetch, T4, .., owner=..)

So is a buffer of which each iteration of a loop fetches a piece. On GPUs each piece then has memory
of its own, for peers are told of each by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import const_value
from meshfuse.expr.polynomial import quotient_if_exact
from meshfuse.host.nodes import (
    Allocate,
    Chunk,
    Collective,
    Communicate,
    ForLoop,
    Free,
    HostBuffer,
    HostProgram,
    Node,
    OnStream,
    all_nodes,
)
from meshfuse.host.uses import names_defined, names_needed, views_made
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.schedule import MemoryType


@final
@frozen_dataclass
class SharedSource:
    """A buffer that peers fetch by `fetch`: whole, or one by one `pieces` along `axis`."""

    fetch: Communicate
    axis: int = 0
    pieces: int | None = None


def with_shared_sources(
    body: Sequence[Node],
    buffers: Mapping[TensorName, HostBuffer],
    kept: Collection[TensorName | ScalarName],
) -> Iterator[Node]:
    """The body, with each source of one fetch in symmetric memory that the program makes for it.

    Where it is an output, or is seen by another name outside of loops, it stays where it is: peers'
    memory is used again when its own name is freed. So does what a collective fills, which may want
    room behind it.
    """
    made = [node.buffer for node in body if isinstance(node, Allocate)]
    viewed = {src for node in body for _, src in views_made(node)}
    shared = {
        name
        for name in made
        if name not in kept and name not in viewed and _source(name, body, buffers) is not None
    }
    for node in body:
        if isinstance(node, Allocate) and node.buffer in shared:
            yield replace(node, memory=MemoryType.symmetric)
        else:
            yield node


def shared_sources(program: HostProgram) -> dict[TensorName, SharedSource]:
    """Those that the program has in symmetric memory."""
    symmetric = (
        node.buffer
        for node in program.body
        if isinstance(node, Allocate) and node.memory is MemoryType.symmetric
    )
    found = ((name, _source(name, program.body, program.buffers)) for name in symmetric)
    return {name: source for name, source in found if source is not None}


def _source(
    name: TensorName, body: Sequence[Node], buffers: Mapping[TensorName, HostBuffer]
) -> SharedSource | None:
    """How peers fetch a buffer, if one fetch in a loop is all that is communicated of it, and finds
    it as it lies in memory."""
    nodes = [node for node in all_nodes(body) if not isinstance(node, ForLoop | OnStream | Free)]
    chunks = {node.out: node for node in nodes if isinstance(node, Chunk) and node.src == name}
    parts = {name, *chunks}
    posted = [node for node in nodes if isinstance(node, Communicate)]
    if any(node.out in parts and not node.is_transfer for node in posted):
        return None
    posted = [node for node in posted if node.src in parts]
    if len(posted) != 1 or posted[0].collective is not Collective.fetch or posted[0] in body:
        return None
    (fetch,) = posted
    src, out, whole = buffers[fetch.src], buffers[fetch.out], buffers[name]
    if src.gaps or out.gaps or src.memory_order != out.memory_order or whole.mesh != fetch.mesh:
        return None
    if fetch.src == name:
        return SharedSource(fetch)
    touching = [n for n in nodes if name in (*names_needed(n), *names_defined(n))]
    piece = chunks[fetch.src]
    pieces = _pieces(whole, piece, touching, buffers)
    return None if pieces is None else SharedSource(fetch, piece.axis, pieces)


def _pieces(
    whole: HostBuffer,
    piece: Chunk,
    touching: Sequence[Node],
    buffers: Mapping[TensorName, HostBuffer],
) -> int | None:
    """How many equal pieces a buffer has, if nothing that touches it knows more than one."""
    axis, length = piece.axis, buffers[piece.out].shape[piece.axis]
    for node in touching:
        match node:
            case Allocate():
                continue
            case Chunk(out, _, at, start, None) if at == axis:
                if buffers[out].shape != buffers[piece.out].shape or buffers[out].gaps:
                    return None
                if quotient_if_exact(start, length) is None:
                    return None
            case _:
                return None
    extent, known = const_value(whole.shape[axis]), const_value(length)
    return extent // known if extent and known and extent % known == 0 else None
