"""Loops as what they do: the nodes of their iterations in a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from meshfuse.expr import const_value, evaluate
from meshfuse.host.nodes import (
    Communicate,
    Evaluate,
    ForLoop,
    HostProgram,
    Node,
    OnStream,
    Wait,
    all_nodes,
)

_SHOWN = 3
"""Iterations that show all: the first, one that follows on one and is followed, the last."""


def iterations(
    body: Iterable[Node], sizes: Mapping[str, int]
) -> Iterator[tuple[Node, Mapping[str, int]]]:
    """The nodes of all iterations, each with the values of all symbols there, in the order in which
    they are issued, on whatever stream."""
    for node in body:
        if isinstance(node, ForLoop):
            for k in range(evaluate(node.count, sizes)):
                yield from iterations(node.body, {**sizes, node.index: k})
        elif isinstance(node, OnStream):
            yield from iterations(node.body, sizes)
        else:
            yield node, sizes


def unrolled(program: HostProgram) -> HostProgram:
    """The program with three iterations of each loop, or fewer, in a row: enough to check it.

    Sizes still name the indices. A program without loops is itself.
    """
    if not any(isinstance(node, ForLoop) for node in all_nodes(program.body)):
        return program
    stride = sum(isinstance(node, Communicate) for node in all_nodes(program.body))
    return replace(program, body=tuple(_unrolled(program.body, 0, stride, {})))


def _unrolled(
    body: Iterable[Node], iteration: int, stride: int, indices: Mapping[str, int]
) -> Iterator[Node]:
    """What adds to a sum writes it in the first iteration, and what arrives then arrives there."""
    for node in body:
        match node:
            case ForLoop(count=count):
                known = const_value(count)
                shown = _SHOWN if known is None else min(known, _SHOWN)
                for k in range(shown):
                    inside = {**indices, node.index: k}
                    yield from _unrolled(node.body, iteration * shown + k, stride, inside)
            case OnStream(body=body):
                yield replace(node, body=tuple(_unrolled(body, iteration, stride, indices)))
            case Communicate(number=number):
                into = node.into if node.is_first_term(indices) else None
                number += iteration * stride
                yield replace(node, number=number, into=into, sum_over=None)
            case Wait(number=number):
                yield replace(node, number=number + iteration * stride)
            case Evaluate() if not node.adds(indices):
                yield replace(node, sum_over=None)
            case _:
                yield node
