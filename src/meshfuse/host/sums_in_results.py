"""Sums that a rank keeps, and that others fetch into a result, are added up where they lie in it.

T4 = allocate(global, 48)                     T2 = allocate(global, 96)
T2 = allocate(global, 96)               ->    T4 = chunk(T2, 0, 4*x)
.. the rank's block is added up in T4         ..
T5 = communicate(fetch, T4, owner=..)         T5 = communicate(fetch, T4, owner=..)
T6 = chunk(T2, 0, 4*owner)                    T6 = chunk(T2, 0, 4*owner)
T6 = set(T5)                                  T6 = set(T5)

What the rank fetches of itself is there already. Peers that read one another's memory cannot reach
results: there the block is copied to be sent. Made where they read it, it would be copied into the
result instead, which moves as many bytes, and needs a block more on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr
from meshfuse.expr.polynomial import quotient_if_exact
from meshfuse.facts.holdings import coordinate_symbol
from meshfuse.host.nodes import (
    Allocate,
    Chunk,
    Collective,
    Communicate,
    Evaluate,
    ForLoop,
    HostBuffer,
    Node,
    all_nodes,
)
from meshfuse.host.uses import names_needed
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Set


def with_sums_in_results(
    body: Sequence[Node], buffers: Mapping[TensorName, HostBuffer]
) -> list[Node]:
    """The body, where sums that nothing else reads have no memory of their own, if a part of what
    they are fetched into lies in memory as they do."""
    placed = list(body)
    for found in _fetched_sums(placed, buffers):
        placed = list(_without_memory(placed, found))
    return placed


@final
@frozen_dataclass
class _Fetched:
    """A sum, or the `chunk` of `memory` that it is, and where the rank's own part of `result`
    begins, which is one of all ranks'."""

    sum: TensorName
    memory: TensorName
    result: TensorName
    axis: int
    start: IntExpr


def _fetched_sums(
    body: Sequence[Node], buffers: Mapping[TensorName, HostBuffer]
) -> Iterator[_Fetched]:
    nodes = list(all_nodes(body))
    chunks = {node.out: node for node in nodes if isinstance(node, Chunk)}
    allocated = {node.buffer for node in body if isinstance(node, Allocate)}
    copied = {
        node.body[0].src: node.into
        for node in nodes
        if isinstance(node, Evaluate) and node.into and isinstance(node.body[0], Set)
    }
    for node in nodes:
        if not isinstance(node, Communicate) or node.collective is not Collective.fetch:
            continue
        into = chunks.get(copied.get(node.out, node.out))
        start = None if into is None else _own_start(into, node)
        if into is None or start is None or not buffers[node.src].lies_like(buffers[into.out]):
            continue
        memory, result = (
            chunks[name].src if name in chunks else name for name in (node.src, into.src)
        )
        if {memory, result} <= allocated and _is_only_fetched(nodes, node, memory):
            yield _Fetched(node.src, memory, into.src, into.axis, start)


def _own_start(into: Chunk, fetch: Communicate) -> IntExpr | None:
    """Where the chunk begins of which the rank is the owner; None for chunks that are no blocks."""
    if fetch.owner is None or fetch.mesh_axis is None or into.pieces is not None:
        return None
    length = quotient_if_exact(into.start, fetch.owner)
    return None if length is None else length * coordinate_symbol(fetch.mesh, fetch.mesh_axis)


def _is_only_fetched(nodes: Sequence[Node], fetch: Communicate, memory: TensorName) -> bool:
    """Whether nobody reads a sum but who adds to it and who fetches it."""
    names = {memory, fetch.src}
    for node in nodes:
        match node:
            case ForLoop() | Allocate():
                continue  # of a loop its body counts
            case Chunk(out, src) if src == memory and out == fetch.src:
                continue
            case Evaluate(into, _, sum_over) if sum_over is not None and into == fetch.src:
                continue
            case _ if node is not fetch and names.intersection(names_needed(node)):
                return False
            case _:
                pass
    return True


def _without_memory(body: Sequence[Node], found: _Fetched) -> Iterator[Node]:
    """The sum as a chunk of the result, behind which it is named: where first one of the two was,
    as what is fetched may come into the result long after it was added up."""
    ends = {found.result: True, found.sum: False, found.memory: False}
    placed = [node for node in body if isinstance(node, Allocate | Chunk) and _named(node) in ends]
    result = next((node for node in placed if ends[_named(node)]), None)
    for node in body:
        match node:
            case Allocate() | Chunk() if _named(node) in ends:
                if result is not None:
                    yield result
                    yield Chunk(found.sum, found.result, found.axis, found.start)
                    result = None
            case ForLoop():
                yield replace(node, body=tuple(_without_memory(node.body, found)))
            case _:
                yield node


def _named(node: Allocate | Chunk) -> TensorName:
    return node.buffer if isinstance(node, Allocate) else node.out
