"""Faults planted into sound host programs, each with what must be found of it.

A planter goes through a program and yields one spoilt copy for each place where its fault fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshfuse.facts.sharding import Digit, Sharding
from meshfuse.host.check import check_host_program, check_ranks
from meshfuse.host.faults import Fault, FaultKind
from meshfuse.host.nodes import (
    Allocate,
    Collective,
    Communicate,
    Evaluate,
    Free,
    HostProgram,
    Launch,
    Node,
    Wait,
)
from meshfuse.host.presence import takes_part
from meshfuse.host.uses import names_needed, views_made
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import make_mesh
from meshfuse.ir.ops import Set

Body = Sequence[Node]


@dataclass(frozen=True)
class Planted:
    """`wanted`: a kind of fault, about `buffer`, `number` and one of `ranks` where given.

    With a `sound` program, that is what all but `ranks` have.
    """

    wanted: FaultKind
    program: HostProgram
    buffer: str | None = None
    number: int | None = None
    sound: HostProgram | None = None
    ranks: tuple[int, ...] = ()

    def check(self) -> tuple[Fault, ...]:
        if self.sound is None:
            return check_host_program(self.program)
        every = dict.fromkeys(ranks_of(self.sound), self.sound)
        return check_ranks({**every, **dict.fromkeys(self.ranks, self.program)})

    def is_named_by(self, fault: Fault) -> bool:
        return (
            fault.kind is self.wanted
            and self.buffer in (None, fault.buffer)
            and self.number in (None, fault.number)
            and (not self.ranks or not set(self.ranks).isdisjoint(fault.ranks))
        )


Planter = Callable[[HostProgram], Iterator[Planted]]


def ranks_of(program: HostProgram) -> list[int]:
    meshes = [buffer.mesh for buffer in program.buffers.values() if buffer.mesh is not None]
    return sorted({rank for mesh in meshes for rank in mesh.ids})


def _with(program: HostProgram, body: Body) -> HostProgram:
    return replace(program, body=tuple(body))


def _posts(program: HostProgram) -> Iterator[tuple[int, Communicate]]:
    """Those by which data moves, with their places."""
    for place, node in enumerate(program.body):
        if isinstance(node, Communicate) and node.moves:
            yield place, node


def _wait_of(program: HostProgram, number: int) -> int:
    return next(i for i, n in enumerate(program.body) if isinstance(n, Wait) and n.number == number)


def _reads(node: Node, name: str) -> bool:
    return not isinstance(node, Free) and name in names_needed(node)


def _without(body: Body, *places: int) -> list[Node]:
    return [node for place, node in enumerate(body) if place not in places]


def _inserted(body: Body, place: int, *nodes: Node) -> list[Node]:
    return [*body[:place], *nodes, *body[place:]]


def _unfreed(body: Body, name: TensorName) -> list[Node]:
    """The body without the free of one name."""
    found: list[Node] = []
    for node in body:
        if isinstance(node, Free):
            kept = tuple(buffer for buffer in node.buffers if buffer != name)
            found += [Free(kept)] if kept else []
        else:
            found.append(node)
    return found


def _freed(program: HostProgram) -> Iterator[tuple[int, TensorName]]:
    for place, node in enumerate(program.body):
        if isinstance(node, Free):
            yield from ((place, name) for name in node.buffers)


def _overwrite(name: TensorName) -> Evaluate:
    return Evaluate(name, (Set(name, name),))


# Waits.


def wait_dropped(program: HostProgram) -> Iterator[Planted]:
    for _, post in _posts(program):
        body = _without(program.body, _wait_of(program, post.number))
        kind = FaultKind.never_awaited
        yield Planted(kind, _with(program, body), post.out, post.number)


def wait_after_the_first_read(program: HostProgram) -> Iterator[Planted]:
    for _, post in _posts(program):
        place = _wait_of(program, post.number)
        body = _without(program.body, place)
        read = next((i for i in range(place, len(body)) if _reads(body[i], post.out)), None)
        if read is not None:
            late = _inserted(body, read + 1, Wait(post.number))
            kind = FaultKind.read_before_wait
            yield Planted(kind, _with(program, late), post.out, post.number)


def wait_before_the_post(program: HostProgram) -> Iterator[Planted]:
    for place, post in _posts(program):
        body = _without(program.body, _wait_of(program, post.number))
        early = _inserted(body, place, Wait(post.number))
        kind = FaultKind.wait_without_post
        yield Planted(kind, _with(program, early), number=post.number)


def wait_twice(program: HostProgram) -> Iterator[Planted]:
    for _, post in _posts(program):
        body = _inserted(program.body, _wait_of(program, post.number), Wait(post.number))
        yield Planted(FaultKind.double_wait, _with(program, body), number=post.number)


def post_twice(program: HostProgram) -> Iterator[Planted]:
    for place, post in _posts(program):
        body = _inserted(program.body, place, post)
        yield Planted(FaultKind.double_post, _with(program, body), number=post.number)


# Memory.


def names_of_memory(post: Communicate) -> tuple[tuple[TensorName, ...], ...]:
    """Those of the memory that is read, and of that which is written."""
    return ((post.src, post.out),) if post.in_place else ((post.src,), (post.out,))


def allocation_removed(program: HostProgram) -> Iterator[Planted]:
    for place, node in enumerate(program.body):
        if isinstance(node, Allocate):
            body, kind = _without(program.body, place), FaultKind.use_before_allocation
            yield Planted(kind, _with(program, body), node.buffer)


def allocated_twice(program: HostProgram) -> Iterator[Planted]:
    for place, node in enumerate(program.body):
        if isinstance(node, Allocate):
            body, kind = _inserted(program.body, place, node), FaultKind.double_allocation
            yield Planted(kind, _with(program, body), node.buffer)


def freed_before_the_last_use(program: HostProgram) -> Iterator[Planted]:
    for place, name in _freed(program):
        users = [i for i in range(place) if _reads(program.body[i], name)]
        if users:
            body = _unfreed(program.body, name)
            last = next(i for i in reversed(range(len(body))) if _reads(body[i], name))
            early = _inserted(body, last, Free((name,)))
            yield Planted(FaultKind.use_after_free, _with(program, early), name)


def freed_in_flight(program: HostProgram) -> Iterator[Planted]:
    """What the transfer reads, or what it writes, where nothing else shows that memory."""
    others = [node for node in program.body if not isinstance(node, Communicate)]
    shown: set[str] = {name for node in others for pair in views_made(node) for name in pair}
    shown.update(program.inputs)
    for _, post in _posts(program):
        for names in names_of_memory(post):
            if shown.isdisjoint(names):
                body: Body = program.body
                for name in names:
                    body = _unfreed(body, name)
                place = body.index(post)
                early = _inserted(body, place + 1, Free(names))
                kind = FaultKind.free_in_flight
                yield Planted(kind, _with(program, early), names[-1], post.number)


def freed_twice(program: HostProgram) -> Iterator[Planted]:
    for place, name in _freed(program):
        body = _inserted(program.body, place, Free((name,)))
        yield Planted(FaultKind.double_free, _with(program, body), name)


def free_removed(program: HostProgram) -> Iterator[Planted]:
    for _, name in _freed(program):
        yield Planted(FaultKind.never_freed, _with(program, _unfreed(program.body, name)), name)


def input_freed(program: HostProgram) -> Iterator[Planted]:
    for name in program.inputs:
        if name in program.buffers:
            body = (*program.body, Free((TensorName(name),)))
            yield Planted(FaultKind.foreign_free, _with(program, body), name)


def result_freed(program: HostProgram) -> Iterator[Planted]:
    for output in program.outputs:
        if output.alias is None and output.buffer not in program.inputs:
            body = (*program.body, Free((output.buffer,)))
            yield Planted(FaultKind.output_missing, _with(program, body), output.buffer)


def written_in_flight(program: HostProgram) -> Iterator[Planted]:
    """What the transfer reads, or what it writes, is used for something else."""
    for place, post in _posts(program):
        for name in (post.src, post.out):
            body = _inserted(program.body, place + 1, _overwrite(name))
            kind = FaultKind.write_in_flight
            yield Planted(kind, _with(program, body), name, post.number)


def kernel_dropped(program: HostProgram) -> Iterator[Planted]:
    """Where a view shows what is not written, it is the view that is named."""
    returned = {output.buffer for output in program.outputs if output.alias is None}
    shown = {source for node in program.body for _, source in views_made(node)}
    for place, node in enumerate(program.body):
        if not isinstance(node, Launch):
            continue
        flags = [buffer.written for buffer in program.kernels[node.kernel].buffers]
        body = _without(program.body, place)
        for name in (name for name, out in zip(node.buffers, flags, strict=True) if out):
            if any(_reads(later, name) for later in body[place:]):
                named = None if name in shown else name
                yield Planted(FaultKind.unwritten_read, _with(program, body), named)
            elif name in returned:
                yield Planted(FaultKind.output_unwritten, _with(program, body), name)


def update_dropped(program: HostProgram) -> Iterator[Planted]:
    for place, node in enumerate(program.body):
        if isinstance(node, Evaluate) and node.into is not None:
            body, kind = _without(program.body, place), FaultKind.output_unwritten
            yield Planted(kind, _with(program, body), node.into)


def update_placed_elsewhere(program: HostProgram) -> Iterator[Planted]:
    for output in program.outputs:
        if output.alias is not None and program.buffers[output.alias].sharding is not None:
            buffer = program.buffers[output.buffer]
            elsewhere = Sharding(make_mesh([0]), tuple((Digit(n),) for n in buffer.extents))
            spoilt = replace(buffer, sharding=elsewhere)
            buffers = {**program.buffers, output.buffer: spoilt}
            kind = FaultKind.update_misplaced
            yield Planted(kind, replace(program, buffers=buffers), output.alias)


def viewed_memory_overwritten(program: HostProgram) -> Iterator[Planted]:
    for place, node in enumerate(program.body):
        if isinstance(node, Communicate):
            continue  # what is summed in place is written on purpose
        for view, source in views_made(node):
            rest = program.body[place + 1 :]
            if any(_reads(later, view) for later in rest):
                body = _inserted(program.body, place + 1, _overwrite(source))
                yield Planted(FaultKind.overwritten_read, _with(program, body), view)


def terms_read_once_they_are_summed(program: HostProgram) -> Iterator[Planted]:
    """What a sum in place was made of."""
    for _, post in _posts(program):
        if post.in_place:
            read = Evaluate(post.out, (Set(post.out, post.src),))
            body = _inserted(program.body, _wait_of(program, post.number) + 1, read)
            yield Planted(FaultKind.overwritten_read, _with(program, body), post.src)


# Ranks.


def _last_of(program: HostProgram, node: Communicate) -> tuple[int, ...]:
    """A rank that takes part, as the one to be spoilt."""
    return tuple(rank for rank in ranks_of(program) if takes_part(program, node, rank))[-1:]


def _swapped(program: HostProgram, first: int, second: int) -> HostProgram:
    body = list(program.body)
    body[first], body[second] = body[second], body[first]
    return _with(program, body)


def _changed(program: HostProgram, place: int, node: Communicate) -> HostProgram:
    return _with(program, [*program.body[:place], node, *program.body[place + 1 :]])


def rank_skips_a_post(program: HostProgram) -> Iterator[Planted]:
    for place, post in _posts(program):
        wait = _wait_of(program, post.number)
        spoilt = _with(program, _without(program.body, place, wait))
        rank, kind = _last_of(program, post), FaultKind.missing_post
        yield Planted(kind, spoilt, post.out, post.number, program, rank)


def rank_swaps_two_posts(program: HostProgram) -> Iterator[Planted]:
    for (i, first), (j, second) in _pairs(program):
        if (first.mesh, first.mesh_axis) == (second.mesh, second.mesh_axis):
            rank = _last_of(program, first)
            spoilt, kind = _swapped(program, i, j), FaultKind.order_differs
            yield Planted(kind, spoilt, sound=program, ranks=rank)


def _pairs(
    program: HostProgram,
) -> Iterator[tuple[tuple[int, Communicate], tuple[int, Communicate]]]:
    """Neighbouring posts on one mesh."""
    posts = list(_posts(program))
    for (i, first), (j, second) in pairwise(posts):
        if first.mesh == second.mesh and first.to_mesh is None and second.to_mesh is None:
            yield (i, first), (j, second)


def ranks_swap_posts_of_two_teams(program: HostProgram) -> Iterator[Planted]:
    """Two ranks at opposite corners of a square do, the other two do not: four wait in a ring."""
    for (i, first), (j, second) in _pairs(program):
        axes = (first.mesh_axis, second.mesh_axis)
        if None in axes or axes[0] == axes[1]:
            continue
        corners = tuple(
            rank
            for rank in first.mesh.ids
            for places in [[first.mesh.coordinate(rank, axis) for axis in axes if axis is not None]]
            if places[0] == places[1] and places[0] in (0, 1)
        )
        spoilt = _swapped(program, i, j)
        yield Planted(FaultKind.cyclic_wait, spoilt, sound=program, ranks=corners[:2])


def all_take_the_wrong_axis(program: HostProgram) -> Iterator[Planted]:
    for place, post in _posts(program):
        for axis in post.mesh.parallel_types():
            if post.mesh_axis is not None and axis != post.mesh_axis:
                spoilt = _changed(program, place, replace(post, mesh_axis=axis))
                yield Planted(FaultKind.wrong_team, spoilt, post.out, post.number)


def all_take_the_wrong_mesh(program: HostProgram) -> Iterator[Planted]:
    for place, post in _posts(program):
        other = make_mesh([rank + 1 for rank in post.mesh.ids])
        spoilt = _changed(program, place, replace(post, mesh=other))
        yield Planted(FaultKind.wrong_team, spoilt, post.out, post.number)


def rank_takes_the_wrong_axis(program: HostProgram) -> Iterator[Planted]:
    for place, post in _posts(program):
        for axis in post.mesh.parallel_types():
            if post.mesh_axis is not None and axis != post.mesh_axis:
                spoilt = _changed(program, place, replace(post, mesh_axis=axis))
                rank, kind = _last_of(program, post), FaultKind.wrong_team
                yield Planted(kind, spoilt, post.out, post.number, program, rank)


def rank_asks_for_another_function(program: HostProgram) -> Iterator[Planted]:
    for place, post in _posts(program):
        if post.function is not None:
            other = "max" if post.function != "max" else "min"
            spoilt = _changed(program, place, replace(post, function=other))
            rank, kind = _last_of(program, post), FaultKind.ranks_disagree
            yield Planted(kind, spoilt, post.out, post.number, program, rank)


def rank_asks_for_another_kind(program: HostProgram) -> Iterator[Planted]:
    for place, post in _posts(program):
        if post.mesh_axis is not None:
            is_gather = post.collective is Collective.all_gather
            other = Collective.all_reduce if is_gather else Collective.all_gather
            spoilt = _changed(program, place, replace(post, collective=other))
            rank, kind = _last_of(program, post), FaultKind.ranks_disagree
            yield Planted(kind, spoilt, post.out, post.number, program, rank)


def rank_sends_more(program: HostProgram) -> Iterator[Planted]:
    for place, post in _posts(program):
        spoilt = _changed(program, place, replace(post, bytes=post.bytes * 2 + 8))
        rank, kind = _last_of(program, post), FaultKind.ranks_disagree
        yield Planted(kind, spoilt, post.out, post.number, program, rank)


def rank_expects_other_parts(program: HostProgram) -> Iterator[Planted]:
    """Of an exchange: what a rank is to get is not what others send it."""
    for _, post in _posts(program):
        source, result = program.buffers[post.src], program.buffers[post.out]
        if post.mesh_axis is None and source.mesh == result.mesh:
            other = replace(result, sharding=source.sharding)
            spoilt = replace(program, buffers={**program.buffers, post.out: other})
            rank, kind = _last_of(program, post), FaultKind.ranks_disagree
            yield Planted(kind, spoilt, post.out, post.number, program, rank)


PLANTERS: Mapping[str, Planter] = {
    planter.__name__: planter
    for planter in (
        wait_dropped,
        wait_after_the_first_read,
        wait_before_the_post,
        wait_twice,
        post_twice,
        allocation_removed,
        allocated_twice,
        freed_before_the_last_use,
        freed_in_flight,
        freed_twice,
        free_removed,
        input_freed,
        result_freed,
        written_in_flight,
        kernel_dropped,
        update_dropped,
        update_placed_elsewhere,
        viewed_memory_overwritten,
        terms_read_once_they_are_summed,
        rank_skips_a_post,
        rank_swaps_two_posts,
        ranks_swap_posts_of_two_teams,
        all_take_the_wrong_axis,
        all_take_the_wrong_mesh,
        rank_takes_the_wrong_axis,
        rank_asks_for_another_function,
        rank_asks_for_another_kind,
        rank_sends_more,
        rank_expects_other_parts,
    )
}
