"""Merge groups of expressions greedily, never through something outside that lies between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import final

from meshfuse.base.frozen import frozen_dataclass

Allows = Callable[[tuple[int, ...]], bool]
"""Whether expressions, by position in the program, may be one group."""


@final
@frozen_dataclass
class Edge:
    """Two expressions, by position, and the bytes that one kernel for both need not read again."""

    first: int
    second: int
    saved: int


@final
@dataclass(slots=True, eq=False, repr=False)
class Groups:
    """A partition of expressions into groups whose graph has no cycle.

    A group goes by the position of its first member. `order` numbers the groups such that each
    stands after those that it reads from, so that a path is looked for only between its ends.
    """

    members: dict[int, tuple[int, ...]]
    predecessors: dict[int, set[int]]
    readers: dict[int, set[int]]
    order: dict[int, int]
    merged_into: dict[int, int] = field(default_factory=dict[int, int])

    def group_of(self, position: int) -> int:
        """The group that an expression is in."""
        while position in self.merged_into:
            position = self.merged_into[position]
        return position

    def may_merge(self, a: int, b: int) -> bool:
        """Whether no path leads from one group to the other through a third."""
        first, last = sorted((a, b), key=self.order.__getitem__)
        return not any(first in self.predecessors[p] for p in self._before(last, first))

    def _before(self, last: int, first: int) -> dict[int, None]:
        """The groups that `last` depends on and that stand after `first`."""
        return self._reached(self.predecessors, last, lambda p: self.order[p] > self.order[first])

    def _behind(self, first: int, last: int) -> dict[int, None]:
        """The groups that depend on `first` and stand before `last`."""
        return self._reached(self.readers, first, lambda p: self.order[p] < self.order[last])

    def _reached(
        self, edges: Mapping[int, set[int]], start: int, inside: Callable[[int], bool]
    ) -> dict[int, None]:
        found: dict[int, None] = {}
        pending = [start]
        while pending:
            for group in edges[pending.pop()]:
                if group not in found and inside(group):
                    found[group] = None
                    pending.append(group)
        return found

    def merge(self, a: int, b: int) -> None:
        """Put two groups that may merge together, under the smaller name."""
        self._renumber(*sorted((a, b), key=self.order.__getitem__))
        kept, gone = min(a, b), max(a, b)
        self.members[kept] = tuple(sorted(self.members[kept] + self.members.pop(gone)))
        self.merged_into[gone] = kept
        del self.order[gone]
        for edges, back in ((self.predecessors, self.readers), (self.readers, self.predecessors)):
            moved = edges.pop(gone)
            for other in moved:
                back[other].discard(gone)
                back[other].add(kept)
            edges[kept] = (edges[kept] | moved) - {a, b}
        self.predecessors[kept].discard(kept)
        self.readers[kept].discard(kept)

    def _renumber(self, first: int, last: int) -> None:
        """Number `first` and `last` next to each other, what lies between before or after both.

        What `last` depends on comes before them, what depends on `first` after them, each in its
        old order and on the numbers that these groups had (Pearce and Kelly, A dynamic topological
        sort algorithm for directed acyclic graphs, 2006).
        """
        before = sorted(self._before(last, first), key=self.order.__getitem__)
        behind = sorted(self._behind(first, last), key=self.order.__getitem__)
        numbers = sorted(self.order[p] for p in (*before, first, last, *behind))
        self.order.update(zip((*before, first, last, *behind), numbers, strict=True))


def single_groups(predecessors: Mapping[int, Sequence[int]]) -> Groups:
    """Each expression by itself. `predecessors`, in program order: those that each reads from."""
    readers: dict[int, set[int]] = {position: set() for position in predecessors}
    for position, before in predecessors.items():
        for p in before:
            readers[p].add(position)
    return Groups(
        members={position: (position,) for position in predecessors},
        predecessors={position: set(before) for position, before in predecessors.items()},
        readers=readers,
        order={position: place for place, position in enumerate(predecessors)},
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


Preference = Callable[[Sequence[tuple[int, ...]], tuple[int, ...]], int]
"""How late a group should stand behind those that are placed: the least comes next."""


def in_order(
    partition: Iterable[tuple[int, ...]],
    predecessors: Mapping[int, Sequence[int]],
    preference: Preference | None = None,
) -> tuple[tuple[int, ...], ...]:
    """The groups of an acyclic partition, each after those it reads from, else by `preference`,
    else in program order."""
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
        if preference is None:
            group = heappop(ready)
        else:
            late = {preference(ordered, members_of[g]): g for g in sorted(ready, reverse=True)}
            group = late[min(late)]
            ready.remove(group)
            heapify(ready)
        ordered.append(members_of[group])
        for reader in readers[group]:
            waiting[reader].discard(group)
            if not waiting[reader]:
                heappush(ready, reader)
    return tuple(ordered)
