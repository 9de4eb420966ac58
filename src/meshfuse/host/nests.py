"""Loops in one another around communications: what the outer one makes is made by the inner one.

for_loop(j0, 4) {                                 for_loop(j0, 4) {
  T2_j0 = chunk(T2, 0, 8*j0)                        for_loop(j1, 2) {
  for_loop(j1, 2) {                                   T2_j0 = chunk(T2, 0, 8*j0)
    T3_j0_j1 = communicate(fetch, ..)       ->        T3_j0_j1 = communicate(fetch, ..)
    ..                                                ..
  }                                                 }
}                                                 }

Then there is nothing in the outer loop but the inner one, and pieces of chunks take turns on
streams: one is fetched while the one before it, of the same chunk, is multiplied.

A loop that fetches what one before it has added up is done by the last iteration of that:

for_loop(j1, 2) {                                 for_loop(j1, 2) {
  T4_j1 = communicate(deliver, .., into=T4)         T4_j1 = communicate(deliver, .., into=T4)
  ..                                                ..
}                                           ->      for_loop(j2, 2*j1) {
for_loop(j2, 2) {                                     T5_j2 = communicate(fetch, T4, ..)
  T5_j2 = communicate(fetch, T4, ..)                  ..
  ..                                                }
}                                                 }
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshfuse.expr import const_value, floordiv
from meshfuse.facts.streams import loop_index
from meshfuse.host.nodes import (
    Allocate,
    Chunk,
    Collective,
    Communicate,
    Evaluate,
    ForLoop,
    Node,
    View,
    all_nodes,
)


def with_nests(body: Sequence[Node]) -> Iterator[Node]:
    """The body, with each loop that has only views beside an inner one, which communicates; and
    what is fetched behind such a loop in its last iteration."""
    for node in _with_fetches_inside(body):
        yield _nested(node) if isinstance(node, ForLoop) else node


def _nested(loop: ForLoop) -> ForLoop:
    *views, inner = _with_fetches_inside(loop.body)
    if not isinstance(inner, ForLoop) or not all(isinstance(v, Chunk | View) for v in views):
        return loop
    if not any(isinstance(node, Communicate) for node in all_nodes(inner.body)):
        return loop
    inner = _nested(replace(inner, body=(*views, *inner.body)))
    return replace(loop, body=(inner,))


def _with_fetches_inside(body: Sequence[Node]) -> list[Node]:
    """Nodes in a row, where each loop that fetches what the one before it has added up is in that
    one, behind its last iteration. Between the two there is nothing but memory and views."""
    placed: list[Node] = []
    for node in body:
        place = _place_of_sum(placed, node) if isinstance(node, ForLoop) else None
        if place is None:
            placed.append(node)
            continue
        loop, between = placed[place], placed[place + 1 :]
        assert isinstance(loop, ForLoop) and isinstance(node, ForLoop)
        is_last = floordiv(loop_index(loop.index, loop.count), loop.count - 1)
        fetching = replace(node, count=node.count * is_last)
        placed[place:] = [*between, replace(loop, body=(*loop.body, fetching))]
    return placed


def _place_of_sum(placed: Sequence[Node], fetching: ForLoop) -> int | None:
    """Where the loop stands that adds up what is fetched; None if it is not in front."""
    place = len(placed) - 1
    while place >= 0 and isinstance(placed[place], Allocate | Chunk | View):
        place -= 1
    loop = placed[place] if place >= 0 else None
    if not isinstance(loop, ForLoop) or (const_value(loop.count) or 0) < 2:
        return None
    sums = {n.into for n in loop.body if isinstance(n, Evaluate) and n.sum_over == loop.index}
    posted = [node for node in all_nodes(fetching.body) if isinstance(node, Communicate)]
    is_fetched = all(n.collective is Collective.fetch and n.src in sums for n in posted)
    return place if posted and is_fetched else None
