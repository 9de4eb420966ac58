"""Faults by which the wrong data comes to a place, or none: names are there, and all is in order.

As in planted_stream_faults.py, a planter yields one spoilt copy for each place where its fault
fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshfuse.expr import (
    IntExpr,
    Symbol,
    const,
    const_value,
    evaluate,
    free_symbols,
    minimum,
    substitute,
)
from meshfuse.host.assumed_sizes import assumed_sizes
from meshfuse.host.faults import FaultKind
from meshfuse.host.nodes import Chunk, Communicate, ForLoop, HostProgram, OnStream, all_nodes
from meshfuse.host.uses import names_written
from planted_in_loops import LoopPlanter, Path, PlantedInLoop, body_at, changed, nodes_of

Kind = FaultKind
MISSED = frozenset({Kind.unwritten_read, Kind.output_unwritten, Kind.terms_missing})
MISPLACED = frozenset({Kind.wrong_part})
AMISS = MISSED | MISPLACED | {Kind.terms_twice}


def _loops(program: HostProgram) -> Iterator[tuple[Path, ForLoop]]:
    """Those that do something, not those that wait for streams."""
    for path, loop in nodes_of(program.body, ForLoop):
        if any(isinstance(node, Chunk | Communicate) for node in all_nodes(loop.body)):
            yield path, loop


def _loops_around(program: HostProgram, path: Path) -> Iterator[ForLoop]:
    for depth in range(1, len(path)):
        node = body_at(program.body, path[:depth])[path[depth - 1]]
        if isinstance(node, ForLoop):
            yield node


def _chunks(program: HostProgram) -> Iterator[tuple[Path, Chunk, ForLoop, int]]:
    """Those that depend on a loop of several iterations, with that loop and its count."""
    for path, node in nodes_of(program.body, Chunk):
        names = {found.name for found in free_symbols(node.start)}
        for loop in _loops_around(program, path):
            count = const_value(loop.count)
            if loop.index in names and count is not None and count > 1:
                yield path, node, loop, count


def _written_chunks(program: HostProgram) -> Iterator[tuple[Path, Chunk, ForLoop, int]]:
    """Those that iterations write, each once."""
    views = (Chunk, ForLoop, OnStream)
    works = [node for node in all_nodes(program.body) if not isinstance(node, views)]
    written = {name for node in works for name in names_written(node, program.kernels)}
    for path, chunk, loop, count in _chunks(program):
        if chunk.out in written:
            yield path, chunk, loop, count


def _index_of(loop: ForLoop) -> Symbol:
    return Symbol(loop.index, 0, None, 1)


def _length(program: HostProgram, chunk: Chunk) -> IntExpr:
    return program.buffers[chunk.out].shape[chunk.cut_axis]


def _with_length(program: HostProgram, chunk: Chunk, length: IntExpr) -> HostProgram:
    buffer = program.buffers[chunk.out]
    shape = (*buffer.shape[: chunk.cut_axis], length, *buffer.shape[chunk.cut_axis + 1 :])
    return replace(program, buffers={**program.buffers, chunk.out: replace(buffer, shape=shape)})


# Chunks that miss a part.


def last_iteration_dropped(program: HostProgram) -> Iterator[PlantedInLoop]:
    """A sum lacks a term, or a tensor a chunk: all of a chunk where the loop is in another."""
    for path, loop in _loops(program):
        fewer = replace(loop, count=loop.count - 1)
        yield PlantedInLoop(MISSED, changed(program, path, fewer))


def chunks_too_short(program: HostProgram) -> Iterator[PlantedInLoop]:
    """Those that are read, too. Of pieces of blocks only those of which more than one place is
    left, in each iteration: one might stretch, and uneven ones are not followed so far."""
    for _, chunk, _, _ in _chunks(program):
        length = _length(program, chunk)
        count = const_value(length)
        if (count != 1) if chunk.pieces is None else (count is not None and count > 2):
            yield PlantedInLoop(AMISS, _with_length(program, chunk, length - 1))


def rest_left_out(program: HostProgram) -> Iterator[PlantedInLoop]:
    """The last chunk is empty."""
    for _, chunk, loop, count in _written_chunks(program):
        length = _length(program, chunk)
        left = (const(count - 1) - _index_of(loop)) * length
        yield PlantedInLoop(AMISS, _with_length(program, chunk, minimum(length, left)))


# Chunks in place of others: all is covered.


def chunks_shifted_by_one(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, chunk, loop, count in _chunks(program):
        following = (_index_of(loop) + 1) % count
        start = substitute(chunk.start, {loop.index: following})
        yield PlantedInLoop(AMISS, changed(program, path, replace(chunk, start=start)))


def chunks_in_reverse(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, chunk, loop, count in _chunks(program):
        start = substitute(chunk.start, {loop.index: const(count - 1) - _index_of(loop)})
        yield PlantedInLoop(AMISS, changed(program, path, replace(chunk, start=start)))


def all_ranks_take_the_next_owner(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, post in nodes_of(program.body, Communicate):
        if post.owner is not None and post.mesh_axis is not None:
            size = post.mesh.axis_size(post.mesh_axis)
            spoilt = replace(post, owner=(post.owner + 1) % size)
            yield PlantedInLoop(MISPLACED, changed(program, path, spoilt))


def all_iterations_take_the_first_chunk(program: HostProgram) -> Iterator[PlantedInLoop]:
    """Of a sum they add the same terms."""
    for _, loop in _loops(program):
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
        chunks_too_short,
        rest_left_out,
        chunks_shifted_by_one,
        chunks_in_reverse,
        all_ranks_take_the_next_owner,
        all_iterations_take_the_first_chunk,
    )
}


# What is right for the sizes that are assumed first.


def _loops_of_any_count(program: HostProgram) -> Iterator[tuple[Path, ForLoop, list[Symbol]]]:
    loops = list(_loops(program))
    indices = {loop.index for _, loop in loops}
    for path, loop in loops:
        named = sorted(free_symbols(loop.count), key=lambda symbol: symbol.name)
        sizes = [symbol for symbol in named if symbol.name not in indices]
        if sizes:
            yield path, loop, sizes


def as_many_iterations_as_assumed(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, loop, _ in _loops_of_any_count(program):
        most = evaluate(loop.count, assumed_sizes(program))
        few = replace(loop, count=minimum(loop.count, most))
        yield PlantedInLoop(MISSED, changed(program, path, few))


def one_iteration_less_for_even_sizes(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, loop, sizes in _loops_of_any_count(program):
        fewer = replace(loop, count=loop.count - (1 - sizes[0] % 2))
        yield PlantedInLoop(MISSED, changed(program, path, fewer))


def rest_of_two_left_out(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, loop, sizes in _loops_of_any_count(program):
        full = sizes[0] // 3 + sizes[0] % 3 % 2
        fewer = replace(loop, count=minimum(loop.count, full))
        yield PlantedInLoop(MISSED, changed(program, path, fewer))


SIZE_PLANTERS: Mapping[str, LoopPlanter] = {
    planter.__name__: planter
    for planter in (
        as_many_iterations_as_assumed,
        one_iteration_less_for_even_sizes,
        rest_of_two_left_out,
    )
}
