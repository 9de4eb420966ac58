"""Whether ranks meet: in each team the same collectives, in one order, and no circle of waits.

A collective is over when all of its team have posted it. Posts of one rank are in order, so it is
enough that the posts of all ranks together can be put into one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import cast, final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.facts.sharding import Sharding, describe, describe_axes, owners_of
from meshfuse.host.faults import Fault, FaultKind, node_text, ranks_text
from meshfuse.host.nodes import Collective, Communicate, HostProgram
from meshfuse.host.presence import takes_part
from meshfuse.host.unroll import Unrolled
from meshfuse.ir.mesh import DeviceMesh, ParallelType

Team = tuple[int, ...]
Tell = Callable[[Fault], None]


@final
@frozen_dataclass
class Request:
    """A communication of a program. `facts`: by name, what must be alike on all ranks of a team."""

    place: int
    node: Communicate
    facts: Mapping[str, object]

    @property
    def number(self) -> int:
        return self.node.number


@final
@frozen_dataclass
class Meeting:
    """A request of one rank, and the ranks that it is to meet in it."""

    request: Request
    team: Team

    @property
    def number(self) -> int:
        return self.request.number


Instance = tuple[Team, int]
"""A collective that ranks meet in: the team and the number."""


# What each rank asks for.


def requests_of(program: HostProgram) -> list[Request]:
    """The communications of an unrolled program, in order: posts are made in that of the text, on
    whatever streams they stand."""
    return [
        Request(place, node, _facts(program, node))
        for place, node in enumerate(program.body)
        if isinstance(node, Communicate)
    ]


def _facts(program: HostProgram, node: Communicate) -> Mapping[str, object]:
    source, result = program.buffers[node.src], program.buffers[node.out]
    return {
        "kind": node.collective.value,
        "function": node.function,
        "bytes": node.bytes,
        "element type": source.dtype.name,
        "global sizes": source.extents,
        "sharding of the source": source.sharding,
        "sharding of the result": result.sharding,
        "memory order": source.memory_order,
        "order of sums": node.in_team_order,
        "owner": node.owner,
    }


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(str, cast(tuple[object, ...], value)))})"
    return describe(value) if isinstance(value, Sharding) else str(value)


def meetings_of(program: HostProgram, requests: Sequence[Request], rank: int) -> Iterator[Meeting]:
    """What a rank posts. All that may take part in an exchange are its team: who does depends on
    sizes."""
    teams: dict[object, Team] = {}
    for request in requests:
        node = request.node
        if not takes_part(program, node, rank):
            continue
        line = (program.buffers[node.src].mesh, node.mesh_axis, node.mesh, node.to_mesh)
        if line not in teams:
            teams[line] = _team_of(program, node, rank)
        yield Meeting(request, teams[line])


def _team_of(program: HostProgram, node: Communicate, rank: int) -> Team:
    """The ranks that `rank` meets there; itself alone if it is on no line of the source's mesh."""
    if node.mesh_axis is None:
        return tuple(sorted(node.ranks))
    mesh = program.buffers[node.src].mesh
    if mesh is None or rank not in mesh.places or not mesh.has(node.mesh_axis):
        return (rank,)
    return mesh.team(rank, node.mesh_axis)


# What a communication does to shardings.


def check_movements(
    program: HostProgram, requests: Sequence[Request], ranks: Sequence[int], tell: Tell
) -> None:
    """The mesh and the axis of each must be those along which its source and result differ.

    `ranks` have this program.
    """
    for request in requests:
        node = request.node
        source, result = program.buffers[node.src].sharding, program.buffers[node.out].sharding
        reason = _wrong_movement(node, source, result)
        if reason is not None:
            why = f"{node_text(node)}: {reason}"
            who = tuple(rank for rank in ranks if rank in node.ranks) or tuple(ranks)
            tell(Fault(FaultKind.wrong_team, request.place, who, node.out, why, request.number))


def _wrong_movement(
    node: Communicate, source: Sharding | None, result: Sharding | None
) -> str | None:
    if source is None or result is None or source.mesh is None or result.mesh is None:
        return "one side has no mesh"
    meshes = (node.mesh, node.to_mesh or node.mesh)
    if meshes != (source.mesh, result.mesh):
        return (
            f"goes from {meshes[0]} to {meshes[1]}, but {node.src} lies on {source.mesh} and "
            f"{node.out} on {result.mesh}"
        )
    if node.mesh_axis is None or not node.moves:
        return None
    before, after = (_cuts(side, node.mesh_axis) for side in (source, result))
    if (before, after) in _CUTS[node.collective] and _alike(source, result, node.mesh_axis):
        return None
    return (
        f"{describe_axes(source)} does not become {describe_axes(result)} on {node.mesh} by "
        f"{node.collective.value} along {node.mesh_axis}"
    )


_CUTS: Mapping[Collective, tuple[tuple[str, str], ...]] = {
    Collective.all_gather: (("parts", "whole"),),
    Collective.all_reduce: (("terms", "whole"),),
    Collective.reduce_scatter: (("terms", "parts"),),
    Collective.fetch: (("parts", "whole"),),
    Collective.deliver: (("terms", "parts"),),
}
"""What the ranks along the mesh axis of a collective hold before and after."""


def _cuts(sharding: Sharding, mesh_axis: ParallelType) -> str:
    if mesh_axis in sharding.partial:
        return "terms"
    cut = any(digit.owner == mesh_axis for digits in sharding.axes for digit in digits)
    return "parts" if cut else "whole"


def _alike(source: Sharding, result: Sharding, mesh_axis: ParallelType) -> bool:
    """Whether all other mesh axes have the same part in both."""

    def others(sharding: Sharding, mesh: DeviceMesh | None) -> object:
        owners = [() if mesh is None else owners_of(digits, mesh) for digits in sharding.axes]
        cuts = [tuple(owner for owner in found if owner != mesh_axis) for found in owners]
        partial = {axis: name for axis, name in sharding.partial.items() if axis != mesh_axis}
        return cuts, partial

    return others(source, source.mesh) == others(result, result.mesh)


def check_updates(program: HostProgram, ranks: Sequence[int], tell: Tell) -> None:
    """Each part of an input is written from the same part of what updates it."""
    for output in program.outputs:
        if output.alias is None:
            continue
        have, want = (program.buffers[name] for name in (output.buffer, output.alias))
        if have.sharding != want.sharding and have.mesh is not None and want.mesh is not None:
            why = (
                f"{output.buffer} updates {output.alias}, but one is {_shown(have.sharding)} and "
                f"the other {_shown(want.sharding)}"
            )
            tell(Fault(FaultKind.update_misplaced, None, tuple(ranks), output.alias, why))


def check_owners(shown: Unrolled, ranks: Sequence[int], tell: Tell) -> None:
    """Each rank fetches from a place that there is, and each is delivered one part."""
    for place, node in enumerate(shown.program.body):
        if not isinstance(node, Communicate) or node.owner is None or node.mesh_axis is None:
            continue
        values = {**shown.sizes, **shown.issued[place].indices}
        count = node.mesh.axis_size(node.mesh_axis)
        owners = [node.owner_at(each, values) for each in range(count)]
        wrong = [owner for owner in owners if owner not in range(count)]
        if wrong:
            reason = f"there is no place {wrong[0]} along {node.mesh_axis} of {node.mesh}"
        elif node.collective is Collective.deliver and len({*owners}) < count:
            reason = f"ranks deliver to places {_shown(tuple(owners))}: some get nothing"
        else:
            continue
        why, who = f"{node_text(node)}: {reason}", tuple(r for r in ranks if r in node.ranks)
        tell(Fault(FaultKind.wrong_owner, place, who, node.out, why, node.number))


# Whether they meet.


def check_meetings(posts: Mapping[int, Sequence[Meeting]], tell: Tell) -> None:
    """Compare what ranks post. Others of their teams are taken to do as these."""
    teams: dict[Team, dict[int, list[Meeting]]] = {}
    for rank, meetings in posts.items():
        for meeting in meetings:
            teams.setdefault(meeting.team, {}).setdefault(rank, []).append(meeting)
    settled: set[Team] = set()
    for team, found in teams.items():
        members = {rank: found.get(rank, []) for rank in team if rank in posts}
        if _check_team(team, members, posts, tell):
            settled.add(team)
    _check_circles(posts, settled, tell)


def _check_team(
    team: Team,
    members: Mapping[int, Sequence[Meeting]],
    posts: Mapping[int, Sequence[Meeting]],
    tell: Tell,
) -> bool:
    """Whether the order of the team's collectives is the same on all its ranks."""
    by_number: dict[int, dict[int, Meeting]] = {}
    for rank, meetings in members.items():
        for meeting in meetings:
            by_number.setdefault(meeting.number, {})[rank] = meeting
    common = set(by_number)
    for number, theirs in sorted(by_number.items()):
        lacking = [rank for rank in members if rank not in theirs]
        if lacking:
            common.discard(number)
            _tell_missing(team, theirs, lacking, posts, tell)
        else:
            _check_alike(theirs, tell)
    return _check_order(team, members, common, tell)


def _tell_missing(
    team: Team,
    theirs: Mapping[int, Meeting],
    lacking: Sequence[int],
    posts: Mapping[int, Sequence[Meeting]],
    tell: Tell,
) -> None:
    rank, meeting = next(iter(theirs.items()))
    number, request = meeting.number, meeting.request
    elsewhere = {r: m.team for r in lacking for m in posts[r] if m.number == number}
    who = f"{ranks_text(tuple(theirs))} would wait in {node_text(request.node)}, over {team}, "
    out, place = request.node.out, request.place
    for other, found in elsewhere.items():
        why = f"{who}for rank {other}, which posts number {number} over {found}"
        tell(Fault(FaultKind.wrong_team, place, (rank, other), out, why, number))
    skipping = tuple(other for other in lacking if other not in elsewhere)
    if skipping:
        why = f"{who}for {ranks_text(skipping)}, which never posts it"
        tell(Fault(FaultKind.missing_post, place, skipping, out, why, number))


def _check_alike(theirs: Mapping[int, Meeting], tell: Tell) -> None:
    """All must ask for the same; told are the first two that do not, and the first difference."""
    (first, mine), *others = theirs.items()
    for rank, meeting in others:
        if meeting.request is mine.request:
            continue
        for name, value in mine.request.facts.items():
            other = meeting.request.facts[name]
            if other != value:
                why = (
                    f"ranks {first} and {rank} disagree on the {name} of number {mine.number}: "
                    f"{_shown(value)} and {_shown(other)}"
                )
                place, out = mine.request.place, mine.request.node.out
                ranks = (first, rank)
                tell(Fault(FaultKind.ranks_disagree, place, ranks, out, why, mine.number))
                return


def _check_order(
    team: Team, members: Mapping[int, Sequence[Meeting]], common: set[int], tell: Tell
) -> bool:
    orders = {
        rank: [meeting for meeting in meetings if meeting.number in common]
        for rank, meetings in members.items()
    }
    (first, wanted), *others = orders.items()
    for rank, found in others:
        for mine, theirs in zip(wanted, found, strict=False):
            if mine.number != theirs.number:
                why = (
                    f"over {team} rank {first} posts number {mine.number} where rank {rank} posts "
                    f"number {theirs.number}"
                )
                place, out = mine.request.place, mine.request.node.out
                ranks = (first, rank)
                tell(Fault(FaultKind.order_differs, place, ranks, out, why, mine.number))
                return False
    return True


# Circles.


def _check_circles(posts: Mapping[int, Sequence[Meeting]], settled: set[Team], tell: Tell) -> None:
    """Teams that meet in different orders wait for one another, if not here then on a backend that
    does one thing at a time."""
    later: dict[Instance, dict[Instance, tuple[int, Meeting]]] = {}
    for rank, meetings in posts.items():
        moving = [m for m in meetings if len(m.team) > 1 and m.team in settled]
        for meeting, following in pairwise(moving):
            before, after = (meeting.team, meeting.number), (following.team, following.number)
            if before != after:  # a number that stands twice
                later.setdefault(before, {}).setdefault(after, (rank, meeting))
    circle = _find_circle(later)
    if not circle:
        return
    steps = [(a, b, *later[a][b]) for a, b in zip(circle, (*circle[1:], circle[0]), strict=True)]
    told = [
        f"rank {rank} posts number {number} over {team} before number {next_number} over {others}"
        for (team, number), (others, next_number), rank, _ in steps
    ]
    ranks = tuple(sorted({rank for _, _, rank, _ in steps}))
    request, why = steps[0][3].request, f"each waits for the next: {'; '.join(told)}"
    out = request.node.out
    tell(Fault(FaultKind.cyclic_wait, request.place, ranks, out, why, request.number))


def _find_circle(later: Mapping[Instance, Iterable[Instance]]) -> tuple[Instance, ...]:
    """Some circle of a graph; () if there is none."""
    done: set[Instance] = set()
    for start in later:
        path = {} if start in done else {start: iter(later[start])}
        while path:
            last = next(reversed(path))
            following = next(path[last], None)
            if following is None:
                done.add(last)
                del path[last]
            elif following in path:
                names = tuple(path)
                return names[names.index(following) :]
            elif following not in done:
                path[following] = iter(later.get(following, ()))
    return ()
