"""Merge groups of expressions greedily, never through something outside that lies between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import final

Allows = Callable[[tuple[int, ...]], bool]
"""Whether expressions, by position in the program, may be one group."""


@final
@dataclass(frozen=True, slots=True)
class Edge:
    """Two expressions, by position, and the bytes that one kernel for both need not read again."""

    first: int
    second: int
    saved: int


@final
@dataclass(slots=True)
class Groups:
    """A partition of expressions into groups whose graph has no cycle.

    A group goes by the position of its first member. `above` has, for each group, those that must
    run before it, as the bits of an integer.
    """

    members: dict[int, tuple[int, ...]]
    predecessors: dict[int, set[int]]
    above: dict[int, int] = field(default_factory=dict[int, int])
    merged_into: dict[int, int] = field(default_factory=dict[int, int])

    def group_of(self, position: int) -> int:
        """The group that an expression is in."""
        while position in self.merged_into:
            position = self.merged_into[position]
        return position

    def may_merge(self, a: int, b: int) -> bool:
        """Whether no path leads from one group to the other through a third."""
        return not (self._leads_outside(a, b) or self._leads_outside(b, a))

    def _leads_outside(self, a: int, b: int) -> bool:
        bit = 1 << a
        return any(p != a and self.above[p] & bit for p in self.predecessors[b])

    def merge(self, a: int, b: int) -> None:
        """Put the two groups together, under the smaller name."""
        kept, gone = min(a, b), max(a, b)
        both = (1 << a) | (1 << b)
        self.members[kept] = tuple(sorted(self.members[kept] + self.members.pop(gone)))
        self.predecessors[kept] |= self.predecessors.pop(gone)
        self.predecessors[kept] -= {a, b}
        self.merged_into[gone] = kept
        above = (self.above[kept] | self.above.pop(gone)) & ~both
        self.above[kept] = above
        for group, bits in self.above.items():
            if bits & both:
                self.above[group] = (bits & ~both) | above | (1 << kept)
        for predecessors in self.predecessors.values():
            if gone in predecessors:
                predecessors.discard(gone)
                predecessors.add(kept)


def single_groups(predecessors: Mapping[int, Sequence[int]]) -> Groups:
    """Each expression by itself. `predecessors`, in program order: those that each reads from."""
    above: dict[int, int] = {}
    for position, before in predecessors.items():
        bits = 0
        for p in before:
            bits |= above[p] | (1 << p)
        above[position] = bits
    return Groups(
        members={position: (position,) for position in predecessors},
        predecessors={position: set(before) for position, before in predecessors.items()},
        above=above,
    )


def merge_greedily(groups: Groups, edges: Sequence[Edge], allows: Allows) -> None:
    """Merge the groups that edges join, most bytes first, unless a cycle or `allows` forbids it.

    A merge may open the way for an edge that failed before: edges are tried until none helps.
    """
    refused: set[tuple[int, ...]] = set()
    pending = sorted(edges, key=lambda edge: (-edge.saved, edge.first, edge.second))
    progress = True
    while progress:
        progress, waiting = False, list[Edge]()
        for edge in pending:
            a, b = groups.group_of(edge.first), groups.group_of(edge.second)
            if a == b:
                continue
            union = tuple(sorted(groups.members[a] + groups.members[b]))
            if union in refused or not groups.may_merge(a, b):
                waiting.append(edge)
            elif allows(union):
                groups.merge(a, b)
                progress = True
            else:
                refused.add(union)
                waiting.append(edge)
        pending = waiting


def in_order(
    partition: Iterable[tuple[int, ...]], predecessors: Mapping[int, Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """The groups of an acyclic partition, each after those it reads from, else in program order."""
    group_of = {position: members[0] for members in partition for position in members}
    members_of = {members[0]: members for members in partition}
    waiting = {
        group: {group_of[p] for m in members for p in predecessors[m]} - {group}
        for group, members in members_of.items()
    }
    readers: dict[int, list[int]] = {group: [] for group in members_of}
    for group, before in waiting.items():
        for p in before:
            readers[p].append(group)
    ready = sorted(group for group, before in waiting.items() if not before)
    ordered: list[tuple[int, ...]] = []
    while ready:
        group = heappop(ready)
        ordered.append(members_of[group])
        for reader in readers[group]:
            waiting[reader].discard(group)
            if not waiting[reader]:
                heappush(ready, reader)
    return tuple(ordered)
