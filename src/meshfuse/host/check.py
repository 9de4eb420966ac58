"""The checker of host programs: all ranks run on devices without data, before anything runs.

It finds what one rank does wrong with its memory (virtual_device.py), what ranks do that others do
not wait for, or wait for for ever (meetings.py), and what data comes to a wrong place or is missing
(data_flow.py), and says it as values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshfuse.base.errors import InvariantError
from meshfuse.expr import free_symbols
from meshfuse.host.assumed_sizes import assumed_sizes, meets_demands, other_sizes
from meshfuse.host.data_flow import check_data_flow
from meshfuse.host.faults import Fault, FaultKind
from meshfuse.host.meetings import (
    Meeting,
    check_meetings,
    check_movements,
    check_owners,
    check_updates,
    meetings_of,
    requests_of,
)
from meshfuse.host.nodes import Chunk, HostProgram
from meshfuse.host.unroll import Unrolled, unrolled
from meshfuse.host.virtual_device import Name, Report, check_memory

Standing = tuple[bool, ...]
"""On which of a program's meshes a rank is: ranks that stand alike do the same."""

_MOST_SHOWN = 20
"""Faults that an error lists."""
_MOST_FOLLOWED = 16
"""So many ranks are all followed."""


def check_host_program(
    program: HostProgram, ranks: Sequence[int] | None = None
) -> tuple[Fault, ...]:
    """All that is wrong with a program; () if nothing is. The kernels that it launches exist.

    `ranks`: those to look at, all of its meshes if None. One is looked at for all that do the same,
    with one rank of each other kind that it meets: the cost is linear in the nodes and the kinds of
    ranks. Loops are looked at unrolled, and places in the body are those there. Where chunks depend
    on the rank, the last is looked at, too: of uneven blocks it has the smallest.

    Of a program that is sound so far is looked at what data comes where, of loops in all iterations
    in a row, and sizes that a call gives are assumed to be others, until there is a fault.
    """
    base = assumed_sizes(program)
    faults = _check_at(program, base, ranks)
    if faults or not meets_demands(program, base):
        return faults
    found = (_check_at(program, sizes, ranks) for sizes in other_sizes(program))
    return next(filter(None, found), ())


def _check_at(
    program: HostProgram, sizes: Mapping[str, int], ranks: Sequence[int] | None
) -> tuple[Fault, ...]:
    """What is wrong if these are the sizes."""
    shown, standings = unrolled(program, sizes), _standings(program)
    alike: dict[Standing, list[int]] = {}
    for rank in standings if ranks is None else ranks:
        if rank in standings:
            alike.setdefault(standings[rank], []).append(rank)
    looked_at = dict(_chosen(shown, alike.values()))
    partners = _partners(shown.program, tuple(looked_at), standings)
    faults = _check(dict.fromkeys((*looked_at, *partners), shown), looked_at)
    if faults or not meets_demands(program, sizes):
        return faults
    return check_data_flow(program, sizes, _followed(program, tuple(standings)))


def _followed(program: HostProgram, ranks: Sequence[int]) -> tuple[int, ...]:
    """Ranks whose data is followed: of many, some that are on a line with the first."""
    if len(ranks) <= _MOST_FOLLOWED:
        return tuple(ranks)
    found = dict.fromkeys(
        rank
        for mesh in program.meshes
        for axis in mesh.parallel_types()
        for rank in mesh.team(mesh.ids[0], axis)
    )
    return tuple(found)[: 2 * _MOST_FOLLOWED]


def check_ranks(programs: Mapping[int, HostProgram]) -> tuple[Fault, ...]:
    """As `check_host_program`, where each rank has a program of its own: all ranks are looked at,
    but not what data comes where.

    Ranks that are not given are taken to post what those that are expect of them.
    """
    unrolled_once = {id(program): unrolled(program) for program in programs.values()}
    shown = {rank: unrolled_once[id(program)] for rank, program in programs.items()}
    return _check(shown, {rank: (rank,) for rank in programs})


def require_sound(program: HostProgram) -> None:
    """Raise InvariantError with the list of faults, if there are any."""
    faults = check_host_program(program)
    if faults:
        lines = [str(fault) for fault in faults[:_MOST_SHOWN]]
        lines += [f"and {len(faults) - _MOST_SHOWN} more"] if len(faults) > _MOST_SHOWN else []
        raise InvariantError("\n  ".join(["the host program is not sound:", *lines]))


def _check(
    programs: Mapping[int, Unrolled], looked_at: Mapping[int, tuple[int, ...]]
) -> tuple[Fault, ...]:
    """`looked_at`: the ranks whose memory is looked at, each with all that do the same."""
    faults: list[Fault] = []
    having: dict[int, list[int]] = {}
    for rank, program in programs.items():
        having.setdefault(id(program), []).append(rank)
    posts: dict[int, tuple[Meeting, ...]] = {}
    for ranks in having.values():
        shown = programs[ranks[0]]
        program, requests = shown.program, requests_of(shown.program)
        members = sorted(member for rank in ranks for member in looked_at.get(rank, ()))
        check_movements(program, requests, members, faults.append)
        check_owners(shown, members, faults.append)
        check_updates(program, members, faults.append)
        posts.update({rank: tuple(meetings_of(program, requests, rank)) for rank in ranks})
    for rank, alike in looked_at.items():
        check_memory(programs[rank], rank, _about(alike, faults))
    check_meetings(posts, faults.append)
    return tuple(faults)


def _about(ranks: tuple[int, ...], faults: list[Fault]) -> Report:
    """What keeps the faults of one rank's memory: they are those of all `ranks`."""

    def report(
        kind: FaultKind, node: int | None, buffer: Name | None, why: str, number: int | None
    ) -> None:
        faults.append(Fault(kind, node, ranks, buffer, why, number))

    return report


def _chosen(
    shown: Unrolled, alike: Iterable[Sequence[int]]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Ranks to look at, each with those that it stands for."""
    names = {found.symbol for found in shown.program.coordinates}
    by_rank = any(
        names.intersection(name.name for name in free_symbols(node.start))
        or names.intersection(name.name for name in free_symbols(length))
        for node in shown.program.body
        if isinstance(node, Chunk)
        for length in [shown.program.buffers[node.out].shape[node.cut_axis]]
    )
    for ranks in alike:
        apart = len(ranks) - 1 if by_rank and len(ranks) > 1 else len(ranks)
        yield ranks[0], tuple(ranks[:apart])
        yield from ((rank, (rank,)) for rank in ranks[apart:])


def _standings(program: HostProgram) -> dict[int, Standing]:
    """Where each rank of a program stands, in the order of its meshes; of one without, rank 0."""
    meshes = program.meshes
    ranks = dict.fromkeys(rank for mesh in meshes for rank in mesh.ids) if meshes else (0,)
    return {rank: tuple(rank in mesh.places for mesh in meshes) for rank in ranks}


def _partners(
    program: HostProgram, looked_at: Sequence[int], standings: Mapping[int, Standing]
) -> tuple[int, ...]:
    """Of each team of the ranks looked at, one rank of each kind, if none is looked at yet."""
    found: dict[int, None] = dict.fromkeys(looked_at)
    requests = requests_of(program)
    for rank in looked_at:
        teams = dict.fromkeys(meeting.team for meeting in meetings_of(program, requests, rank))
        for team in teams:
            kinds = {standings[member] for member in team if member in found}
            for member in team:
                if member in standings and standings[member] not in kinds:
                    kinds.add(standings[member])
                    found[member] = None
    return tuple(rank for rank in found if rank not in looked_at)
