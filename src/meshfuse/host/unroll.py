"""Loops as what they do: the nodes of their iterations in a row, on the streams where they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import evaluate
from meshfuse.host.assumed_sizes import assumed_sizes
from meshfuse.host.events import CALLER
from meshfuse.host.nodes import (
    Communicate,
    Evaluate,
    ForLoop,
    HostProgram,
    Node,
    OnStream,
    Record,
    Wait,
    WaitEvent,
    all_nodes,
)


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


@final
@frozen_dataclass
class Issued:
    """Where a node is issued: the stream, the indices of the loops that it stands in, and how many
    iterations of loops came before.

    `is_sample`: of one of those loops not all iterations are shown. `stands_for`: of loops of which
    this is the last iteration before some that are not shown, how many it is shown for, itself
    included.
    """

    stream: int = CALLER
    indices: Mapping[str, int] = field(default_factory=dict[str, int])
    iteration: int = 0
    is_sample: bool = False
    stands_for: Mapping[str, int] = field(default_factory=dict[str, int])


_AT_ONCE: Final = Issued()


@final
@frozen_dataclass
class Unrolled:
    """The nodes of `program` in a row, in the order in which they are issued, without loops and
    streams: those are in `issued`, by place. `sizes` are assumed."""

    program: HostProgram
    issued: tuple[Issued, ...]
    sizes: Mapping[str, int]


def unrolled(program: HostProgram, sizes: Mapping[str, int] | None = None) -> Unrolled:
    """As many iterations of each loop in a row as show all that there is to see, for these sizes,
    or such as a call might have.

    Of a loop on n streams these are n + 1, of which the last follows the first on its stream, and
    the last n, for which the caller waits: of a loop on one stream the first two and the last.
    """
    sizes = assumed_sizes(program) if sizes is None else sizes
    nodes = list(all_nodes(program.body))
    if not any(isinstance(node, ForLoop | OnStream) for node in nodes):
        return Unrolled(program, (_AT_ONCE,) * len(program.body), sizes)
    stride = sum(isinstance(node, Communicate) for node in nodes)
    work = _Unrolling(sizes, stride)
    found = list(work.unroll(program.body, _AT_ONCE))
    body = tuple(node for node, _ in found)
    return Unrolled(replace(program, body=body), tuple(there for _, there in found), work.sizes)


@final
@dataclass(frozen=True)
class _Unrolling:
    """`stride`: by how much numbers of communications go on from one iteration to the next."""

    sizes: Mapping[str, int]
    stride: int

    def unroll(self, body: Iterable[Node], there: Issued) -> Iterator[tuple[Node, Issued]]:
        for node in body:
            match node:
                case ForLoop():
                    yield from self._unroll_loop(node, there)
                case OnStream(stream, inside):
                    stream_number = evaluate(stream, {**self.sizes, **there.indices})
                    yield from self.unroll(inside, replace(there, stream=stream_number))
                case _:
                    yield self._in_iteration(node, there), there

    def _unroll_loop(self, loop: ForLoop, there: Issued) -> Iterator[tuple[Node, Issued]]:
        count = evaluate(loop.count, {**self.sizes, **there.indices})
        shown = self._shown(loop, count, there.indices)
        is_sample = there.is_sample or len(shown) < count
        for k, following in zip(shown, [*shown[1:], count], strict=False):
            indices = {**there.indices, loop.index: k}
            iteration, stands_for = there.iteration * count + k, there.stands_for
            if following > k + 1:
                stands_for = {**stands_for, loop.index: following - k}
            inside = Issued(there.stream, indices, iteration, is_sample, stands_for)
            yield from self.unroll(loop.body, inside)

    def _shown(self, loop: ForLoop, count: int, indices: Mapping[str, int]) -> Sequence[int]:
        """Joins wait for one iteration of each stream: all of them are shown."""
        streams = self._streams(loop, count, indices)
        joins = all(isinstance(node, Record | WaitEvent) for node in loop.body)
        if joins or count <= 2 * streams + 1:
            return range(count)
        return [*range(streams + 1), *range(count - streams, count)]

    def _streams(self, loop: ForLoop, count: int, indices: Mapping[str, int]) -> int:
        """After how many iterations one runs on the stream of the first."""
        nodes = list(all_nodes(loop.body))
        found = next((node.stream for node in nodes if isinstance(node, OnStream)), None)
        if found is None:
            return 1
        inner = {node.index: 0 for node in nodes if isinstance(node, ForLoop)}
        inside = {**self.sizes, **inner, **indices}
        first = evaluate(found, {**inside, loop.index: 0})
        later = (k for k in range(1, count) if evaluate(found, {**inside, loop.index: k}) == first)
        return next(later, count)

    def _in_iteration(self, node: Node, there: Issued) -> Node:
        """What adds to a sum writes it in the first iteration, and what arrives then arrives
        there."""
        match node:
            case Communicate(number=number):
                into = node.into if node.arrives_there(there.indices) else None
                number += there.iteration * self.stride
                return replace(node, number=number, into=into, sum_over=None)
            case Wait(number=number):
                return replace(node, number=number + there.iteration * self.stride)
            case Evaluate() if node.sum_over is not None and not node.adds(there.indices):
                return replace(node, sum_over=None)
            case _:
                return node
