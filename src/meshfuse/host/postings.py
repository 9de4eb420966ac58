"""The communications of a call as one rank posts them, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from meshfuse.expr import evaluate
from meshfuse.host.nodes import Communicate, HostProgram, all_nodes
from meshfuse.host.unroll import iterations


def postings_of(program: HostProgram, sizes: Mapping[str, int], rank: int) -> Iterator[str]:
    """A line for each, in order, those in loops once for each iteration: kind, number, the ranks
    that meet, what the rank hands over, and what for. `sizes` are the values of all symbols on it.

    Of an exchange all ranks of both sides are named, of which those meet that have parts in common.
    """
    stride = sum(isinstance(node, Communicate) for node in all_nodes(program.body))
    seen: Counter[int] = Counter()
    for node, there in iterations(program.body, sizes):
        if not isinstance(node, Communicate) or rank not in node.ranks:
            continue
        number = node.number + seen[node.number] * stride
        seen[node.number] += 1
        yield (
            f"{node.collective.value} number {number} over ranks {_team(node, rank)} "
            f"({_function(node)}{evaluate(node.bytes, there)} bytes, for {node.cause})"
        )


def _team(node: Communicate, rank: int) -> tuple[int, ...]:
    if node.mesh_axis is not None:
        return node.mesh.team(rank, node.mesh_axis)
    return tuple(sorted(node.ranks))


def _function(node: Communicate) -> str:
    return "" if node.function is None else f"{node.function}, "
