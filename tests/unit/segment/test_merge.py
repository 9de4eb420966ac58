"""Merging never makes a cycle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshfuse.segment.merge import Edge, in_order, merge_greedily, single_groups

Graph = dict[int, tuple[int, ...]]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Nodes in an order that defines before use, each reading some earlier ones."""
    size = draw(st.integers(1, 12))
    return {
        node: tuple(sorted(draw(st.sets(st.integers(0, node - 1), max_size=3)) if node else ()))
        for node in range(size)
    }


@given(graphs(), st.sets(st.integers(0, 11)), st.integers(1, 12))
def test_groups_stay_acyclic_and_merged_as_far_as_allowed(
    graph: Graph, alone: set[int], limit: int
) -> None:
    edges = [
        Edge(before, node, saved=(before * 7 + node) % 5)
        for node, reads in graph.items()
        for before in reads
        if not {before, node} & alone
    ]
    groups = single_groups(graph)
    merge_greedily(groups, edges, lambda union: len(union) <= limit)
    partition = list(groups.members.values())
    assert sorted(node for members in partition for node in members) == list(graph)
    assert all(len(members) <= limit for members in partition)
    assert all(len(members) == 1 for members in partition if alone & set(members))
    ordered = in_order(partition, graph)
    assert sorted(ordered) == sorted(partition)
    place = {node: k for k, members in enumerate(ordered) for node in members}
    assert all(place[before] <= place[node] for node in graph for before in graph[node])


@given(graphs(), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=12))
def test_groups_know_of_every_path(graph: Graph, pairs: list[tuple[int, int]]) -> None:
    """Against paths found by walking the graph; each group has a number above what it reads."""
    groups = single_groups(graph)

    def reaches(start: int, goal: int) -> bool:
        return start == goal or any(reaches(start, p) for p in groups.predecessors[goal])

    def through_another(start: int, goal: int) -> bool:
        return any(p != start and reaches(start, p) for p in groups.predecessors[goal])

    for pair in pairs:
        a, b = (groups.group_of(position % len(graph)) for position in pair)
        if a != b:
            may = groups.may_merge(a, b)
            assert may is not (through_another(a, b) or through_another(b, a))
            if may:
                groups.merge(a, b)
        for group, before in groups.predecessors.items():
            assert all(groups.order[p] < groups.order[group] for p in before)
            assert all(group in groups.readers[p] for p in before)


def test_a_diamond_merges_whole() -> None:
    graph: Graph = {0: (), 1: (0,), 2: (0,), 3: (1, 2)}
    edges = [Edge(0, 1, 1), Edge(0, 2, 1), Edge(1, 3, 9), Edge(2, 3, 1)]
    groups = single_groups(graph)
    merge_greedily(groups, edges, lambda union: True)
    assert groups.members == {0: (0, 1, 2, 3)}


def test_an_edge_past_a_barrier_waits_until_the_barrier_is_inside() -> None:
    """0 -> 1 -> 2 with an edge 0 -> 2 of most bytes: it merges once 1 has joined one of them."""
    graph: Graph = {0: (), 1: (0,), 2: (0, 1)}
    groups = single_groups(graph)
    merge_greedily(groups, [Edge(0, 2, 9), Edge(0, 1, 1)], lambda union: True)
    assert groups.members == {0: (0, 1, 2)}
