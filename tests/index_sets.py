"""Redistributions on sets of indices: what ranks hold, moves by what they are said to do, and the
cheapest sequence of steps found by trying them all. Nothing here asks the planner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import combinations, permutations, product

from meshfuse.expr import const, const_value
from meshfuse.facts.digits import Digit, Digits, Sharding
from meshfuse.facts.redistribute import Move
from meshfuse.facts.routes import exchange_routes
from meshfuse.facts.sharding import canonical
from meshfuse.ir.comm import AllGather, AllReduce, Exchange, LocalSlice, ReduceScatter
from meshfuse.ir.mesh import DeviceMesh, ParallelType

Element = tuple[int, ...]
Terms = frozenset[Element]
"""The terms that are in a value, each by its place along the mesh axes that had terms at first."""
Held = dict[int, dict[Element, Terms]]
"""By rank and element."""


# What shardings say.


def digits(*parts: int | tuple[int, ParallelType]) -> Digits:
    """`digits((2, X), 3)` is two blocks of three."""
    return tuple(
        Digit(const(part)) if isinstance(part, int) else Digit(const(part[0]), part[1])
        for part in parts
    )


def part(sharding: Sharding, rank: int, sizes: Sequence[int]) -> frozenset[Element]:
    """The elements that a rank is to hold, one index after the other."""
    mesh = sharding.mesh
    assert mesh is not None
    axes = [
        [index for index in range(size) if _has(digits, index, rank, mesh)]
        for digits, size in zip(sharding.axes, sizes, strict=True)
    ]
    return frozenset(product(*axes))


def _has(digits: Digits, index: int, rank: int, mesh: DeviceMesh) -> bool:
    for digit in reversed(digits):
        radix = const_value(digit.extent)
        assert radix is not None
        index, number = divmod(index, radix)
        if digit.owner is not None and number != mesh.coordinate(rank, digit.owner):
            return False
    return True


def holdings(sharding: Sharding, sizes: Sequence[int], first: Sharding) -> Held:
    """What `sharding` says, of a tensor that had terms where `first` has them."""
    mesh, old = sharding.mesh, first.mesh
    assert mesh is not None and old is not None
    found: Held = {}
    for rank in mesh.ids:
        kept = [
            (mesh.coordinate(rank, axis) or 0,)
            if axis in sharding.partial
            else range(old.axis_size(axis))
            for axis in first.partial
        ]
        found[rank] = dict.fromkeys(part(sharding, rank, sizes), frozenset(product(*kept)))
    return found


# Moves.


def moved(before: Held, current: Sharding, move: Move, sizes: Sequence[int]) -> tuple[Held, int]:
    """What ranks hold after a move, and what the one received that received most."""
    after, mesh = move.after, move.after.mesh
    assert mesh is not None
    if move.communication is Exchange:
        return _exchanged(before, current, after, sizes)
    assert move.mesh_axis is not None
    found: Held = {}
    most = 0
    for rank in mesh.ids:
        team = mesh.team(rank, move.mesh_axis)
        wanted = part(after, rank, sizes)
        others = len(team) - 1
        if move.communication is LocalSlice:
            found[rank], received = {e: before[rank][e] for e in wanted}, 0
        elif move.communication is AllGather:
            found[rank] = {e: terms for peer in team for e, terms in before[peer].items()}
            received = len(found[rank]) - len(before[rank])
        else:
            assert all(before[peer].keys() == before[rank].keys() for peer in team)
            combined = {
                e: frozenset[Element]().union(*(before[p][e] for p in team)) for e in wanted
            }
            found[rank] = combined
            assert move.communication in (AllReduce, ReduceScatter)
            received = others * len(wanted)
            if move.communication is AllReduce:
                received = 2 * received // len(team)
        most = max(most, received)
    return found, most


def _exchanged(
    before: Held, current: Sharding, after: Sharding, sizes: Sequence[int]
) -> tuple[Held, int]:
    assert after.mesh is not None
    found: Held = {rank: {} for rank in after.mesh.ids}
    received = dict.fromkeys(found, 0)
    for route in exchange_routes(current, after, tuple(sizes)):
        axes = [[index for run in runs for index in run] for runs in route.indices]
        for element in product(*axes):
            assert element not in found[route.receiver]
            found[route.receiver][element] = before[route.sender][element]
            received[route.receiver] += route.sender != route.receiver
    return found, max(received.values())


def _union(sets: Iterable[frozenset[Element]]) -> frozenset[Element]:
    return frozenset[Element]().union(*sets)


# All shardings of a kind.


def arrangements(size: int, owners: Sequence[ParallelType], mesh: DeviceMesh) -> Iterator[Digits]:
    """Blocks, cyclic, and one strided form: the owners in every order, what is local in one digit
    or two, anywhere.
    """
    seen: set[Digits] = set()
    for order in permutations(owners):
        digits = [Digit(const(mesh.axis_size(owner)), owner) for owner in order]
        ranks = math.prod(mesh.axis_size(owner) for owner in order)
        rest = -(-size // ranks)
        for gap in range(len(digits) + 1):
            cut = (*digits[:gap], Digit(const(rest)), *digits[gap:])
            seen.add(canonical(cut, const(size), mesh))
        if len(order) == 1:
            seen.add(canonical((Digit(const(2)), *digits, Digit(const(rest))), const(size), mesh))
    yield from seen


def shardings(mesh: DeviceMesh, sizes: Sequence[int]) -> list[Sharding]:
    """All placements of mesh axes on tensor axes in the arrangements above."""
    found: dict[Sharding, None] = {}
    owners = [owner for owner in mesh.parallel_types() if mesh.axis_size(owner) > 1]
    for homes in product(range(-1, len(sizes)), repeat=len(owners)):
        choices = [
            sorted(
                arrangements(n, [o for o, h in zip(owners, homes, strict=True) if h == a], mesh),
                key=str,
            )
            for a, n in enumerate(sizes)
        ]
        for axes in product(*choices):
            found[Sharding(mesh, axes)] = None
    return list(found)


def with_terms(found: Sequence[Sharding]) -> Iterator[Sharding]:
    """Each, and each with terms of a sum along any of the mesh axes that do not shard it."""
    for sharding in found:
        assert sharding.mesh is not None
        used = {digit.owner for digits in sharding.axes for digit in digits}
        free = [
            owner
            for owner in sharding.mesh.parallel_types()
            if owner not in used and sharding.mesh.axis_size(owner) > 1
        ]
        for count in range(len(free) + 1):
            for chosen in combinations(free, count):
                yield Sharding(sharding.mesh, sharding.axes, dict.fromkeys(chosen, "sum"))


def is_possible(src: Sharding, dst: Sharding) -> bool:
    return dst.partial.keys() <= src.partial.keys()


# The cheapest sequence of steps along one mesh axis each.


@dataclass
class Steps:
    """All steps between some placements of one tensor on one mesh, tried on sets of indices."""

    mesh: DeviceMesh
    sizes: tuple[int, ...]
    places: list[Sharding]
    parts: dict[Sharding, dict[int, frozenset[Element]]] = field(init=False)
    moving: dict[tuple[Sharding, Sharding], int | None] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = {
            place: {rank: part(place, rank, self.sizes) for rank in self.mesh.ids}
            for place in self.places
        }
        self.moving = {}

    def cheapest(self, src: Sharding, dst: Sharding) -> int:
        """The fewest elements received from one to the other."""
        start = (Sharding(self.mesh, src.axes), frozenset(src.partial))
        goal = (Sharding(self.mesh, dst.axes), frozenset(dst.partial))
        queue = [(0, 0, start)]
        seen: set[tuple[Sharding, frozenset[ParallelType]]] = set()
        number = 0
        while queue:
            cost, _, state = heappop(queue)
            if state == goal:
                return cost
            if state in seen:
                continue
            seen.add(state)
            for more, after in self._from(state, dst):
                number += 1
                heappush(queue, (cost + more, number, after))
        raise AssertionError(f"nothing leads from {src} to {dst}")

    def _from(
        self, state: tuple[Sharding, frozenset[ParallelType]], dst: Sharding
    ) -> Iterator[tuple[int, tuple[Sharding, frozenset[ParallelType]]]]:
        place, terms = state
        for after in self.places:
            owners = {digit.owner for digits in after.axes for digit in digits}
            if owners.isdisjoint(terms) and after != place:
                moving = self._move(place, after)
                if moving is not None:
                    yield moving, (after, terms)
        for mesh_axis in terms - dst.partial.keys():
            ranks, rest = self.mesh.axis_size(mesh_axis), terms - {mesh_axis}
            whole = max(map(len, self.parts[place].values()))
            yield 2 * (ranks - 1) * whole // ranks, (place, rest)
            for after in self.places:
                if self._scatters(place, after, mesh_axis) and after != place:
                    largest = max(map(len, self.parts[after].values()))
                    yield (ranks - 1) * largest, (after, rest)

    def _move(self, place: Sharding, after: Sharding) -> int | None:
        """What a slice, gather or all-to-all along one mesh axis brings; None if it cannot be."""
        key = (place, after)
        if key not in self.moving:
            have, want = self.parts[place], self.parts[after]
            lacking = max(len(want[rank] - have[rank]) for rank in self.mesh.ids)
            along_one = any(
                all(
                    want[rank] <= _union(have[peer] for peer in self.mesh.team(rank, axis))
                    for rank in self.mesh.ids
                )
                for axis in self.mesh.parallel_types()
            )
            self.moving[key] = lacking if along_one else None
        return self.moving[key]

    def _scatters(self, place: Sharding, after: Sharding, mesh_axis: ParallelType) -> bool:
        """Whether the parts of each team are the part that all of it have, each element once."""
        have, want = self.parts[place], self.parts[after]
        owners = {digit.owner for digits in after.axes for digit in digits}
        return mesh_axis in owners and all(
            sum(len(want[peer]) for peer in team) == len(have[team[0]])
            and _union(want[peer] for peer in team) == have[team[0]]
            for team in self.mesh.teams(mesh_axis)
        )
