"""Faults by which the wrong data comes to a place, or none: each name is there, and all is in order.

As in planted_faults.py, a planter yields one spoilt copy for each place where its fault fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshfuse.expr import IntExpr, Symbol, const, const_value, free_symbols, minimum, substitute
from meshfuse.host.faults import FaultKind
from meshfuse.host.nodes import Chunk, Communicate, ForLoop, HostProgram, all_nodes
from meshfuse.ir.axes import TensorName
from planted_stream_faults import LoopPlanter, Path, PlantedInLoop, body_at, changed, nodes_of

Kind = FaultKind
UNWRITTEN = frozenset({Kind.unwritten_read, Kind.output_unwritten})
MISPLACED = frozenset({Kind.wrong_part})
MISADDED = frozenset({Kind.terms_missing, Kind.terms_twice})
AMISS = UNWRITTEN | MISPLACED | MISADDED


def loops_around(program: HostProgram, path: Path) -> list[tuple[Path, ForLoop]]:
    """Outermost first."""
    found: list[tuple[Path, ForLoop]] = []
    for depth in range(1, len(path)):
        node = body_at(program.body, path[:depth])[path[depth - 1]]
        if isinstance(node, ForLoop):
            found.append((path[:depth], node))
    return found


def index_of(loop: ForLoop) -> Symbol:
    return Symbol(loop.index, 0, None, 1)


def _chunks(program: HostProgram) -> Iterator[tuple[Path, Chunk, ForLoop, int]]:
    """Those that depend on a loop of several iterations, with that loop and its count."""
    for path, node in nodes_of(program.body, Chunk):
        names = {found.name for found in free_symbols(node.start)}
        for _, loop in loops_around(program, path):
            count = const_value(loop.count)
            if loop.index in names and count is not None and count > 1:
                yield path, node, loop, count


def _is_counted_by(program: HostProgram, loop: ForLoop) -> bool:
    """Whether other loops end with what this one does: joins, which wait for its iterations."""
    return any(isinstance(n, ForLoop) and n is not loop for n in all_nodes(program.body))


# Chunks that miss a part.


def last_iteration_dropped(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, loop in nodes_of(program.body, ForLoop):
        if any(isinstance(node, Chunk | Communicate) for node in all_nodes(loop.body)):
            fewer = replace(loop, count=loop.count - 1)
            yield PlantedInLoop(AMISS, changed(program, path, fewer))


def written_chunk_too_short(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, chunk, _, _ in _chunks(program):
        if _is_written(program, path, chunk):
            length = program.buffers[chunk.out].shape[chunk.axis]
            if const_value(length) != 1:
                yield PlantedInLoop(AMISS, _with_length(program, chunk, length - 1))


def last_chunk_empty(program: HostProgram) -> Iterator[PlantedInLoop]:
    """The rest of an axis is left out."""
    for path, chunk, loop, count in _chunks(program):
        if _is_written(program, path, chunk):
            length = program.buffers[chunk.out].shape[chunk.axis]
            left = (const(count - 1) - index_of(loop)) * length
            yield PlantedInLoop(AMISS, _with_length(program, chunk, minimum(length, left)))


def _is_written(program: HostProgram, path: Path, chunk: Chunk) -> bool:
    """Whether it is of a tensor that is made in chunks: not of what the caller gives."""
    return chunk.src not in program.inputs and not any(
        isinstance(node, Chunk) and node is not chunk and node.src == chunk.src
        for node in all_nodes(program.body[: path[0]])
    )


def _with_length(program: HostProgram, chunk: Chunk, length: IntExpr) -> HostProgram:
    buffer = program.buffers[chunk.out]
    shape = (*buffer.shape[: chunk.axis], length, *buffer.shape[chunk.axis + 1 :])
    spoilt: Mapping[TensorName, object] = {chunk.out: replace(buffer, shape=shape)}
    return replace(program, buffers={**program.buffers, **spoilt})


# Chunks in place of others.


def chunks_shifted_by_one(program: HostProgram) -> Iterator[PlantedInLoop]:
    """All is covered."""
    for path, chunk, loop, count in _chunks(program):
        following = (index_of(loop) + 1) % count
        start = substitute(chunk.start, {loop.index: following})
        yield PlantedInLoop(AMISS, changed(program, path, replace(chunk, start=start)))


def chunks_in_reverse(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, chunk, loop, count in _chunks(program):
        start = substitute(chunk.start, {loop.index: const(count - 1) - index_of(loop)})
        yield PlantedInLoop(AMISS, changed(program, path, replace(chunk, start=start)))


def all_ranks_take_the_next_owner(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, post in nodes_of(program.body, Communicate):
        if post.owner is not None and post.mesh_axis is not None:
            size = post.mesh.axis_size(post.mesh_axis)
            spoilt = replace(post, owner=(post.owner + 1) % size)
            yield PlantedInLoop(AMISS, changed(program, path, spoilt))


def terms_of_one_chunk(program: HostProgram) -> Iterator[PlantedInLoop]:
    """What all iterations read is the first chunk: of a sum, all add the same."""
    for _, loop in nodes_of(program.body, ForLoop):
        spoilt = program
        for path, chunk, around, _ in _chunks(program):
            if around is loop:
                start = substitute(chunk.start, {loop.index: const(0)})
                spoilt = changed(spoilt, path, replace(chunk, start=start))
        if spoilt is not program:
            yield PlantedInLoop(AMISS, spoilt)


DATA_PLANTERS: Mapping[str, LoopPlanter] = {
    planter.__name__: planter
    for planter in (
        last_iteration_dropped,
        written_chunk_too_short,
        last_chunk_empty,
        chunks_shifted_by_one,
        chunks_in_reverse,
        all_ranks_take_the_next_owner,
        terms_of_one_chunk,
    )
}
