"""The first term of a sum over a loop goes where the sum is: it arrives there, and is not copied.

T4 = communicate(deliver, T3, ..)        T4 = communicate(deliver, T3, .., into=T2, sum_over=j0)
wait(0)                             ->   wait(0)
T2 = set(T4), a sum over j0              T2 = set(T4), a sum over j0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from meshfuse.host.nodes import (
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


def with_first_terms(
    body: Iterable[Node], buffers: Mapping[TensorName, HostBuffer]
) -> Iterator[Node]:
    """The last step: what a communication writes early is ordered by the sum's own events only from
    the second iteration on."""
    for node in body:
        match node:
            case ForLoop():
                totals = _totals(node, buffers)
                yield replace(node, body=tuple(_arriving(node.body, totals, buffers)))
            case OnStream():
                yield replace(node, body=tuple(with_first_terms(node.body, buffers)))
            case _:
                yield node


def _arriving(
    body: Sequence[Node],
    totals: Mapping[TensorName, Evaluate],
    buffers: Mapping[TensorName, HostBuffer],
) -> Iterator[Node]:
    """The body of a loop; `totals` has the sums by the names of their terms."""
    for node in body:
        match node:
            case OnStream():
                yield replace(node, body=tuple(_arriving(node.body, totals, buffers)))
            case Communicate() if node.is_transfer and node.out in totals:
                total = totals[node.out]
                yield replace(node, into=total.into, sum_over=total.sum_over)
            case _:
                yield from with_first_terms([node], buffers)


def _totals(loop: ForLoop, buffers: Mapping[TensorName, HostBuffer]) -> dict[TensorName, Evaluate]:
    """The sums over a loop that add up terms as they lie in memory, which nobody else reads."""
    found: dict[TensorName, Evaluate] = {}
    nodes = list(nodes_in_row(loop.body))
    for node in nodes:
        match node:
            case Evaluate(into, (Set(_, term),), index) if into is not None and index == loop.index:
                readers = [other for other in nodes if term in _read(other)]
                if readers == [node] and buffers[term].lies_like(buffers[into]):
                    found[term] = node
            case _:
                pass
    return found


def _read(node: Node) -> Sequence[str]:
    return names_needed(node) if isinstance(node, Evaluate | Communicate | ForLoop) else ()
