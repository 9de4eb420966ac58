"""Faults planted into loops and what runs on streams, each with what must be found of it.

As in planted_faults.py, a planter yields one spoilt copy for each place where its fault fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from meshfuse.expr import Symbol, const, const_value, free_symbols, substitute
from meshfuse.host.faults import FaultKind
from meshfuse.host.nodes import (
    Allocate,
    Chunk,
    Clear,
    Collective,
    Communicate,
    Evaluate,
    ForLoop,
    Free,
    HostProgram,
    Launch,
    Node,
    OnStream,
    Record,
    Wait,
    WaitEvent,
)
from meshfuse.host.uses import names_needed, names_written
from meshfuse.ir.axes import TensorName
from planted_faults import names_of_memory, ranks_of
from planted_in_loops import (
    Body,
    LoopPlanter,
    Path,
    PlantedInLoop,
    body_at,
    changed,
    edited,
    moved,
    nodes_of,
    with_body_around,
)

Kind = FaultKind
UNJOINED = frozenset({Kind.not_joined, Kind.race, Kind.freed_in_use, Kind.free_in_flight})
UNORDERED = frozenset({Kind.race, Kind.write_in_flight, Kind.read_before_wait})
"""A transfer that another stream awaits may be what is found unordered first."""


# Places.


def _loops_on_streams(program: HostProgram) -> Iterator[tuple[int, ForLoop, OnStream]]:
    for place, node in enumerate(program.body):
        if isinstance(node, ForLoop) and isinstance(node.body[0], OnStream):
            yield place, node, node.body[0]


def _waits_on_streams(program: HostProgram) -> Iterator[tuple[Path, WaitEvent]]:
    """Those of iterations."""
    for path, wait in nodes_of(program.body, WaitEvent):
        if len(path) > 2:
            yield path, wait


def _sum_waits(program: HostProgram) -> Iterator[tuple[Path, WaitEvent]]:
    """Those for the iteration before, but for which sums would be added to at once; not those that
    only say who computes first, behind which the same event is recorded."""
    for path, wait in _waits_on_streams(program):
        following = body_at(program.body, path)[path[-1] + 1]
        is_pace = isinstance(following, Record) and following.event == wait.event
        if free_symbols(wait.instance) and not is_pace:
            yield path, wait


def _joins(program: HostProgram) -> Iterator[tuple[int, ForLoop, WaitEvent]]:
    """Of loops whose iterations may end in any order, and that no later loop puts in order."""
    loops = list(_loops_on_streams(program))
    for number, (place, _, _) in enumerate(loops):
        join = program.body[place + 1]
        assert isinstance(join, ForLoop) and isinstance(join.body[0], WaitEvent)
        if not any(_is_ordered(on) for _, _, on in loops[number:]):
            yield place + 1, join, join.body[0]


def _is_ordered(on: OnStream) -> bool:
    """Whether the last work of an iteration is marked for the next."""
    works = [k for k, n in enumerate(on.body) if isinstance(n, Evaluate | Launch | ForLoop)]
    records = [k for k, n in enumerate(on.body) if isinstance(n, Record)]
    return any(works[-1] < k for k in records[:-1])


# Events.


def entry_wait_dropped(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, wait in _waits_on_streams(program):
        if not free_symbols(wait.instance):
            yield PlantedInLoop(frozenset({Kind.race}), changed(program, path))


def entry_marked_too_early(program: HostProgram) -> Iterator[PlantedInLoop]:
    """In front of all that the caller's stream makes for the loop."""
    for path, record in nodes_of(program.body, Record):
        needed = names_needed(program.body[path[0] + 1])
        made = (n for n in program.body[: path[0]] if isinstance(n, Allocate))
        if len(path) == 1 and any(node.buffer in needed for node in made):
            early = moved(program, path, 0)
            assert early.body[0] == record
            yield PlantedInLoop(frozenset({Kind.race}), early)


def join_dropped(program: HostProgram) -> Iterator[PlantedInLoop]:
    for place, _, _ in _loops_on_streams(program):
        yield PlantedInLoop(UNJOINED, changed(program, (place + 1,)))


def join_lacks_a_stream(program: HostProgram) -> Iterator[PlantedInLoop]:
    for place, join, _ in _joins(program):
        yield PlantedInLoop(
            UNJOINED, changed(program, (place,), replace(join, count=join.count - 1))
        )


def join_waits_for_earlier_iterations(program: HostProgram) -> Iterator[PlantedInLoop]:
    for place, join, wait in _joins(program):
        earlier = replace(wait, instance=wait.instance - 1)
        spoilt = changed(program, (place,), replace(join, body=(earlier,)))
        yield PlantedInLoop(UNJOINED, spoilt)


def more_streams_than_are_joined(program: HostProgram) -> Iterator[PlantedInLoop]:
    for place, join, _ in _joins(program):
        loop = program.body[place - 1]
        assert isinstance(loop, ForLoop) and isinstance(loop.body[0], OnStream)
        index = Symbol(loop.index, 0, None, 1)
        count, streams = const_value(loop.count), const_value(join.count)
        if count is None or streams is None or count > streams:
            on = replace(loop.body[0], stream=index)
            spoilt = changed(program, (place - 1,), replace(loop, body=(on,)))
            yield PlantedInLoop(UNJOINED, spoilt)


def sum_wait_dropped(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, _ in _sum_waits(program):
        yield PlantedInLoop(UNORDERED, changed(program, path))


def sum_waits_for_the_iteration_before_the_last(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, wait in _sum_waits(program):
        loop = program.body[path[0]]
        assert isinstance(loop, ForLoop)
        if const_value(loop.count) != 2:
            spoilt = changed(program, path, replace(wait, instance=wait.instance - 1))
            yield PlantedInLoop(UNORDERED, spoilt)


def sum_is_marked_before_it_is_touched(program: HostProgram) -> Iterator[PlantedInLoop]:
    events = {wait.event: path for path, wait in _sum_waits(program)}
    for path, record in nodes_of(program.body, Record):
        if record.event in events:
            spoilt = moved(program, path, events[record.event][-1] + 1)
            yield PlantedInLoop(UNORDERED, spoilt)


def waits_for_its_own_mark(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, wait in _waits_on_streams(program):
        if free_symbols(wait.instance):
            row = body_at(program.body, path)
            marks = [n for n in row if isinstance(n, Record) and n.event == wait.event]
            spoilt = changed(program, path, replace(wait, instance=marks[0].instance))
            yield PlantedInLoop(frozenset({Kind.unrecorded_event}), spoilt)


def waits_for_no_event(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, wait in nodes_of(program.body, WaitEvent):
        spoilt = changed(program, path, replace(wait, event=99))
        yield PlantedInLoop(frozenset({Kind.unrecorded_event}), spoilt)


def mark_dropped(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, _ in nodes_of(program.body, Record):
        yield PlantedInLoop(frozenset({Kind.unrecorded_event}), changed(program, path))


# Regions.


def _written_chunks(program: HostProgram) -> Iterator[tuple[Path, Chunk]]:
    """Those that iterations on several streams write, each its own."""
    for place, loop, on in _loops_on_streams(program):
        inside = [*on.body, *(n for _, inner in nodes_of(on.body, ForLoop) for n in inner.body)]
        works = [node for node in inside if not isinstance(node, Chunk | ForLoop)]
        written = {name for node in works for name in names_written(node, program.kernels)}
        for path, node in nodes_of(on.body, Chunk):
            names = {s.name for s in free_symbols(node.start)}
            if node.out in written and loop.index in names:
                yield (place, 0, *path), node


def chunks_begin_at_the_same_place(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, chunk in _written_chunks(program):
        loop = program.body[path[0]]
        assert isinstance(loop, ForLoop)
        start = substitute(chunk.start, {loop.index: const(0)})
        spoilt = changed(program, path, replace(chunk, start=start))
        yield PlantedInLoop(UNORDERED, spoilt)


def chunks_overlap(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, chunk in _written_chunks(program):
        spoilt = changed(program, path, replace(chunk, start=chunk.start // 2))
        yield PlantedInLoop(UNORDERED, spoilt)


def chunks_of_every_other_iteration(program: HostProgram) -> Iterator[PlantedInLoop]:
    """Iteration j + 2 comes to where iteration j may still be, on a stream that is not its."""
    for path, chunk in _written_chunks(program):
        loop, join = program.body[path[0]], program.body[path[0] + 1]
        assert isinstance(loop, ForLoop) and isinstance(join, ForLoop)
        streams = const_value(join.count)
        length = const_value(program.buffers[chunk.out].shape[chunk.axis])
        if streams and streams > 2 and length:
            wrapped = chunk.start % (2 * length)
            yield PlantedInLoop(UNORDERED, changed(program, path, replace(chunk, start=wrapped)))


def all_is_written_in_an_iteration(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, chunk in _written_chunks(program):
        place, inside = path[0], path[:2]
        loop = program.body[place]
        assert isinstance(loop, ForLoop) and isinstance(loop.body[0], OnStream)
        on = loop.body[0]
        if chunk.src in {node.buffer for node in program.body if isinstance(node, Allocate)}:
            entry = next(k for k, node in enumerate(on.body) if isinstance(node, WaitEvent))
            body = (*on.body[: entry + 1], Clear(chunk.src), *on.body[entry + 1 :])
            yield PlantedInLoop(UNORDERED, changed(program, inside, replace(on, body=body)))


# Memory.


def freed_before_the_join(program: HostProgram) -> Iterator[PlantedInLoop]:
    """The caller's memory, last used by a loop."""
    for path, free in nodes_of(program.body, Free):
        at = next(iter(path))
        places = [p for p, _, _ in _loops_on_streams(program) if p < at]
        if len(path) > 1 or not places:
            continue
        between = program.body[places[-1] + 2 : at]
        made = {node.buffer for node in program.body if isinstance(node, Allocate)}
        for name in (name for name in free.buffers if name in made):
            used = name in names_needed(program.body[places[-1]])
            if used and not any(name in names_needed(node) for node in between):
                rest = tuple(other for other in free.buffers if other != name)
                body = edited(program.body, path, *([Free(rest)] if rest else []))
                join = places[-1] + 1
                spoilt = replace(program, body=(*body[:join], Free((name,)), *body[join:]))
                kinds = frozenset({Kind.freed_in_use, Kind.free_in_flight})
                yield PlantedInLoop(kinds, spoilt)


def _made_inside(program: HostProgram) -> Iterator[tuple[Path, Allocate]]:
    yield from ((path, node) for path, node in nodes_of(program.body, Allocate) if len(path) > 1)


def allocation_removed(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, _ in _made_inside(program):
        kinds = frozenset({Kind.use_before_allocation, Kind.use_after_free})
        yield PlantedInLoop(kinds, changed(program, path))


def free_removed(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, _ in nodes_of(program.body, Free):
        if len(path) > 1:
            kinds = frozenset({Kind.double_allocation, Kind.never_freed})
            yield PlantedInLoop(kinds, changed(program, path))


def freed_twice(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, free in nodes_of(program.body, Free):
        if len(path) > 1:
            spoilt = changed(program, path, free, Free(free.buffers[:1]))
            yield PlantedInLoop(frozenset({Kind.double_free}), spoilt)


# Communications.


def _posts(program: HostProgram) -> Iterator[tuple[Path, Communicate]]:
    for path, node in nodes_of(program.body, Communicate):
        if len(path) > 1 and node.moves:
            yield path, node


def wait_dropped(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, _ in nodes_of(program.body, Wait):
        if len(path) > 1:
            yield PlantedInLoop(frozenset({Kind.never_awaited}), changed(program, path))


def wait_behind_the_first_use(program: HostProgram) -> Iterator[PlantedInLoop]:
    """At the end of the iteration."""
    posts = {post.number: post for _, post in nodes_of(program.body, Communicate)}
    for path, wait in nodes_of(program.body, Wait):
        body, post = body_at(program.body, path), posts[wait.number]
        readers = (n for n in body[path[-1] + 1 :] if not isinstance(n, Free))
        if len(path) > 1 and any(post.out in names_needed(node) for node in readers):
            late = [*body[: path[-1]], *body[path[-1] + 1 :], wait]
            kinds = frozenset({Kind.read_before_wait})
            yield PlantedInLoop(kinds, with_body_around(program, path, late))


def freed_in_flight(program: HostProgram) -> Iterator[PlantedInLoop]:
    """Memory of the iteration, right behind the post that reads or writes it."""
    for path, post in _posts(program):
        body = body_at(program.body, path)
        made = {node.buffer for node in body if isinstance(node, Allocate)}
        if post.is_transfer and post.into is None:
            made.add(post.out)
        for names in names_of_memory(post):
            if made.isdisjoint(names):
                continue
            early = [*body[: path[-1] + 1], Free(names), *_unfreed(body[path[-1] + 1 :], names)]
            kinds = frozenset({Kind.free_in_flight})
            yield PlantedInLoop(kinds, with_body_around(program, path, early))


def _unfreed(body: Body, names: Sequence[TensorName]) -> Iterator[Node]:
    for node in body:
        if not isinstance(node, Free):
            yield node
        elif kept := tuple(buffer for buffer in node.buffers if buffer not in names):
            yield Free(kept)


def post_twice(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, post in _posts(program):
        yield PlantedInLoop(frozenset({Kind.double_post}), changed(program, path, post, post))


def rank_swaps_two_posts(program: HostProgram) -> Iterator[PlantedInLoop]:
    for (first, a), (second, b) in pairwise(_posts(program)):
        if first[:-1] == second[:-1] and (a.mesh, a.mesh_axis) == (b.mesh, b.mesh_axis):
            spoilt = changed(changed(program, first, b), second, a)
            kinds = frozenset({Kind.order_differs})
            yield PlantedInLoop(kinds, spoilt, program, ranks_of(program)[-1])


def all_deliver_to_one(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, post in _posts(program):
        if post.collective is Collective.deliver:
            spoilt = changed(program, path, replace(post, owner=const(0)))
            yield PlantedInLoop(frozenset({Kind.wrong_owner}), spoilt)


def fetched_from_nobody(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, post in _posts(program):
        if post.owner is not None:
            spoilt = changed(program, path, replace(post, owner=post.owner + 1))
            yield PlantedInLoop(frozenset({Kind.wrong_owner}), spoilt)


def rank_asks_another_owner(program: HostProgram) -> Iterator[PlantedInLoop]:
    for path, post in _posts(program):
        if post.owner is not None and post.mesh_axis is not None:
            size = post.mesh.axis_size(post.mesh_axis)
            spoilt = changed(program, path, replace(post, owner=(post.owner + 1) % size))
            kinds = frozenset({Kind.ranks_disagree})
            yield PlantedInLoop(kinds, spoilt, program, ranks_of(program)[-1])


LOOP_PLANTERS: Mapping[str, LoopPlanter] = {
    planter.__name__: planter
    for planter in (
        entry_wait_dropped,
        entry_marked_too_early,
        join_dropped,
        join_lacks_a_stream,
        join_waits_for_earlier_iterations,
        more_streams_than_are_joined,
        sum_wait_dropped,
        sum_waits_for_the_iteration_before_the_last,
        sum_is_marked_before_it_is_touched,
        waits_for_its_own_mark,
        waits_for_no_event,
        mark_dropped,
        chunks_begin_at_the_same_place,
        chunks_overlap,
        chunks_of_every_other_iteration,
        all_is_written_in_an_iteration,
        freed_before_the_join,
        allocation_removed,
        free_removed,
        freed_twice,
        wait_dropped,
        wait_behind_the_first_use,
        freed_in_flight,
        post_twice,
        rank_swaps_two_posts,
        all_deliver_to_one,
        fetched_from_nobody,
        rank_asks_another_owner,
    )
}


# What changes nothing that matters.


def all_on_one_worker(program: HostProgram) -> Iterator[HostProgram]:
    for place, loop, on in _loops_on_streams(program):
        inside = replace(loop, body=(replace(on, stream=const(0)),))
        yield changed(program, (place,), inside)


def all_on_the_callers_stream(program: HostProgram) -> Iterator[HostProgram]:
    for place, loop, on in _loops_on_streams(program):
        yield changed(program, (place,), replace(loop, body=on.body))


def pace_dropped(program: HostProgram) -> Iterator[HostProgram]:
    """Who computes first matters to speed alone."""
    sums = dict(_sum_waits(program))
    for path, wait in _waits_on_streams(program):
        if free_symbols(wait.instance) and path not in sums:
            yield changed(program, path)


SOUND_CHANGES = (all_on_one_worker, all_on_the_callers_stream, pace_dropped)
