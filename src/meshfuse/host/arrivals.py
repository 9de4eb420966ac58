"""What comes from a peer goes where it is wanted: it arrives there, and is not copied.

The first term of a sum over a loop:

T4 = communicate(deliver, T3, ..)        T4 = communicate(deliver, T3, .., into=T2, sum_over=j0)
wait(0)                             ->   wait(0)
T2 = set(T4), a sum over j0              T2 = set(T4), a sum over j0

A block of a result:

T4 = communicate(fetch, T1, ..)          T3 = chunk(T2, ..)
T3 = chunk(T2, ..)                  ->   T4 = communicate(fetch, T1, .., into=T3)
wait(0)                                  wait(0)
T3 = set(T4)                             T3 = set(T4)

The copy stays for what is the rank's own, which does not move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from meshfuse.host.nodes import (
    Chunk,
    Communicate,
    Evaluate,
    ForLoop,
    HostBuffer,
    Node,
    OnStream,
    nodes_in_row,
)
from meshfuse.host.uses import names_needed
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Set
from meshfuse.kernel.nodes import IndexName

_Wanted: TypeAlias = tuple[TensorName, IndexName | None]
"""A place, and the loop over which what arrives is added up there."""


def with_arrivals(
    body: Iterable[Node],
    buffers: Mapping[TensorName, HostBuffer],
    around: frozenset[IndexName] = frozenset(),
) -> Iterator[Node]:
    """The last step: what a communication writes early is ordered by the sum's own events only from
    the second iteration on. `around`: the indices of loops around the body."""
    for node in body:
        match node:
            case ForLoop():
                loops = around | {node.index}
                wanted = _wanted(node, loops, buffers)
                yield replace(node, body=tuple(_arriving(node.body, wanted, loops, buffers)))
            case OnStream():
                yield replace(node, body=tuple(with_arrivals(node.body, buffers, around)))
            case _:
                yield node


def _arriving(
    body: Sequence[Node],
    wanted: Mapping[TensorName, _Wanted],
    loops: frozenset[IndexName],
    buffers: Mapping[TensorName, HostBuffer],
) -> Iterator[Node]:
    """The body of the innermost of `loops`; `wanted` has the places, by the names of what
    arrives."""
    places = {place for place, _ in wanted.values()}
    chunks = {n.out: n for n in body if isinstance(n, Chunk) and n.out in places}
    named: set[TensorName] = set()
    for node in body:
        match node:
            case OnStream():
                yield replace(node, body=tuple(_arriving(node.body, wanted, loops, buffers)))
            case Communicate() if node.is_transfer and node.out in wanted:
                place, sum_over = wanted[node.out]
                if place in chunks and place not in named:
                    named.add(place)
                    yield chunks[place]
                yield replace(node, into=place, sum_over=sum_over)
            case Chunk(out) if out in named:
                continue
            case _:
                named.update([node.out] if isinstance(node, Chunk) else [])
                yield from with_arrivals([node], buffers, loops)


def _wanted(
    loop: ForLoop, loops: frozenset[IndexName], buffers: Mapping[TensorName, HostBuffer]
) -> dict[TensorName, _Wanted]:
    """Where what comes from peers is copied as it lies in memory, or added up over one of `loops`,
    if nobody else reads it."""
    found: dict[TensorName, _Wanted] = {}
    nodes = list(nodes_in_row(loop.body))
    transfers = {n.out for n in nodes if isinstance(n, Communicate) and n.is_transfer}
    for node in nodes:
        match node:
            case Evaluate(into, (Set(_, term),), index) if into is not None and term in transfers:
                readers = [other for other in nodes if term in _read(other)]
                is_alike = buffers[term].lies_like(buffers[into])
                if readers == [node] and is_alike and index in (None, *loops):
                    found[term] = into, index
            case _:
                pass
    return found


def _read(node: Node) -> Sequence[str]:
    return names_needed(node) if isinstance(node, Evaluate | Communicate | ForLoop) else ()
