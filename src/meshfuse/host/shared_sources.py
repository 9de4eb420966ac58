"""What peers fetch is made in memory that they can read: it is not copied there to be sent.

T4 = allocate(global, 48)                       T4 = allocate(symmetric, 48)
.. terms are added up in T4 ..             ->   ..
T5 = communicate(fetch, T4, .., owner=..)       T5 = communicate(fetch, T4, .., owner=..)

So is a buffer of which each iteration of a loop fetches a piece. On GPUs each piece then has memory
of its own, for peers are told of each by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
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
    viewed = {src for node in body for _, src in views_made(node)}
    shared = {
        name for name, _ in _sources(body, buffers) if name not in kept and name not in viewed
    }
    for node in body:
        if isinstance(node, Allocate) and node.buffer in shared:
            yield replace(node, memory=MemoryType.symmetric)
        else:
            yield node


def shared_sources(program: HostProgram) -> dict[TensorName, SharedSource]:
    """Those that the program has in symmetric memory."""
    symmetric = {
        node.buffer
        for node in program.body
        if isinstance(node, Allocate) and node.memory is MemoryType.symmetric
    }
    found = _sources(program.body, program.buffers)
    return {name: source for name, source in found if name in symmetric}


@final
@frozen_dataclass
class _Uses:
    """What a body does, in loops and outside, by the buffer that it does it to.

    `touching`: nodes that need or define it, but for its end. `chunks`: those cut out of it.
    `posted`: communications that send it. `filled`: what collectives write.
    """

    touching: Mapping[TensorName | ScalarName, Sequence[Node]]
    chunks: Mapping[TensorName, Sequence[Chunk]]
    posted: Mapping[TensorName, Sequence[Communicate]]
    filled: Set[TensorName]

    @staticmethod
    def of(body: Sequence[Node]) -> _Uses:
        touching: dict[TensorName | ScalarName, list[Node]] = {}
        chunks: dict[TensorName, list[Chunk]] = {}
        posted: dict[TensorName, list[Communicate]] = {}
        filled: set[TensorName] = set()
        for node in all_nodes(body):
            if isinstance(node, ForLoop | OnStream | Free):
                continue
            for name in dict.fromkeys((*names_needed(node), *names_defined(node))):
                touching.setdefault(name, []).append(node)
            if isinstance(node, Chunk):
                chunks.setdefault(node.src, []).append(node)
            if isinstance(node, Communicate):
                posted.setdefault(node.src, []).append(node)
                if not node.is_transfer:
                    filled.add(node.out)
        return _Uses(touching, chunks, posted, filled)


def _sources(
    body: Sequence[Node], buffers: Mapping[TensorName, HostBuffer]
) -> Iterator[tuple[TensorName, SharedSource]]:
    """Buffers made outside of loops of which one fetch in a loop is all that is communicated, and
    finds them as they lie in memory."""
    loops = [node for node in body if isinstance(node, ForLoop | OnStream)]
    fetches = [
        node
        for node in all_nodes(loops)
        if isinstance(node, Communicate) and node.collective is Collective.fetch
    ]
    if not fetches:  # as in most programs
        return
    uses = _Uses.of(body)
    for name in (node.buffer for node in body if isinstance(node, Allocate)):
        parts = {name: None, **{chunk.out: chunk for chunk in uses.chunks.get(name, ())}}
        posted = [node for part in parts for node in uses.posted.get(part, ())]
        if len(posted) != 1 or posted[0] not in fetches or not uses.filled.isdisjoint(parts):
            continue
        source = _source(posted[0], name, parts[posted[0].src], uses, buffers)
        if source is not None:
            yield name, source


def _source(
    fetch: Communicate,
    name: TensorName,
    piece: Chunk | None,
    uses: _Uses,
    buffers: Mapping[TensorName, HostBuffer],
) -> SharedSource | None:
    """The buffer as its only fetch sees it: whole, or by a `piece`; None if not as it lies."""
    src, out, whole = buffers[fetch.src], buffers[fetch.out], buffers[name]
    if src.gaps or out.gaps or src.memory_order != out.memory_order or whole.mesh != fetch.mesh:
        return None
    if piece is None:
        return SharedSource(fetch)
    pieces = _pieces(whole, piece, uses.touching[name], buffers)
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
