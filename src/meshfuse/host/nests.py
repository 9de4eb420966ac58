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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshfuse.host.nodes import Chunk, Communicate, ForLoop, Node, View, all_nodes


def with_nests(body: Sequence[Node]) -> Iterator[Node]:
    """The body, with each loop that has only views beside an inner one, which communicates."""
    for node in body:
        yield _nested(node) if isinstance(node, ForLoop) else node


def _nested(loop: ForLoop) -> ForLoop:
    *views, inner = loop.body
    if not isinstance(inner, ForLoop) or not all(isinstance(v, Chunk | View) for v in views):
        return loop
    if not any(isinstance(node, Communicate) for node in all_nodes(inner.body)):
        return loop
    inner = _nested(replace(inner, body=(*views, *inner.body)))
    return replace(loop, body=(inner,))
