"""Loops on worker streams: each iteration of an outermost loop on the stream of its number.

    record(0, 0)
    for_loop(j0, 8) {
      on_stream(j0 % 4) {
        wait_event(0, 0)
        ...
        record(1, j0)
      }
    }
    for_loop(j1, 4) {
      wait_event(1, 7 - j1)
    }

An iteration begins behind what the caller's stream did before the loop, and behind the one before
it on its stream: there is the memory of one iteration for each stream. The caller's stream goes on
behind the last iteration of each. Of loops in one another, with nothing else in the outer one, all
iterations of the inner one take turns. What iterations add to is theirs one after the other. Where
they compute before they have waited for anything, they begin to do so in order: a device that is
busy with a later one could not send what the first has made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, dropwhile, takewhile
from typing import Final, final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, const, const_value, free_symbols, minimum, mod, mul
from meshfuse.facts.streams import loop_index
from meshfuse.host.nodes import (
    Chunk,
    Communicate,
    Evaluate,
    ForLoop,
    Free,
    KernelName,
    Launch,
    Node,
    OnStream,
    Record,
    View,
    Wait,
    WaitEvent,
    all_nodes,
)
from meshfuse.host.uses import names_defined, names_needed, names_written, views_made
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.kernel.nodes import IndexName, Kernel

_ONCE: Final = const(0)
"""The instance of an event that is recorded once."""

Name = TensorName | ScalarName


def with_streams(
    body: Sequence[Node],
    number_of_streams: int,
    kernels: Mapping[KernelName, Kernel],
    taken: Collection[str],
) -> Iterator[Node]:
    """The body with its loops on streams, where there are several and a loop may run twice.

    Joins are loops, too: their indices are none of the names `taken`.
    """
    events, names = count(), (f"j{k}" for k in count())
    free_names = (name for name in names if name not in taken)
    for node in body:
        if not isinstance(node, ForLoop) or number_of_streams == 1:
            yield node
            continue
        loop = _iterations_of(node)
        if const_value(loop.count) == 1:
            yield node
            continue
        entry, end = next(events), next(events)
        ordered = _with_sums_in_order(loop, kernels, events)
        ordered = _begun_in_order(loop, ordered, events)
        inside = (WaitEvent(entry, _ONCE), *ordered, Record(end, loop.number))
        yield Record(entry, _ONCE)
        yield loop.around(OnStream(mod(loop.number, number_of_streams), inside))
        yield _join(end, loop, number_of_streams, next(free_names))


@final
@frozen_dataclass
class _Iterations:
    """Those of loops that stand in one another, of which the innermost has `body`, in one row: how
    many there are, and the number of one."""

    loops: tuple[ForLoop, ...]
    count: IntExpr
    number: IntExpr
    body: tuple[Node, ...]

    @property
    def indices(self) -> frozenset[str]:
        return frozenset(loop.index for loop in self.loops)

    def before(self, chosen: Collection[str]) -> IntExpr:
        """The number of the iteration before, of those with the same indices of outer loops that
        are `chosen`, or of inner ones if it is no outer one; negative where there is none."""
        row: IntExpr = const(0)
        for loop in dropwhile(lambda loop: loop.index in chosen, self.loops):
            row = row * loop.count + loop_index(loop.index, loop.count)
        if row is self.number:
            return self.number - self._inside(chosen)
        return self.number - 1 - self.count + self.count * minimum(row, 1)

    def _inside(self, chosen: Collection[str]) -> IntExpr:
        """How many iterations there are for one of a loop, inside of which all are `chosen`."""
        inner = takewhile(lambda loop: loop.index in chosen, reversed(self.loops))
        return mul(const(1), *(loop.count for loop in inner))

    def around(self, node: Node) -> ForLoop:
        """The loops with a node for the body."""
        *outer, innermost = self.loops
        placed = replace(innermost, body=(node,))
        for loop in reversed(outer):
            placed = replace(loop, body=(placed,))
        return placed


def _iterations_of(loop: ForLoop) -> _Iterations:
    loops, count, number = [loop], loop.count, loop_index(loop.index, loop.count)
    while isinstance(inner := loops[-1].body[0], ForLoop) and len(loops[-1].body) == 1:
        loops.append(inner)
        number = number * inner.count + loop_index(inner.index, inner.count)
        count = count * inner.count
    return _Iterations(tuple(loops), count, number, loops[-1].body)


def _join(event: int, loop: _Iterations, number_of_streams: int, name: str) -> ForLoop:
    """The caller's stream waits for the last iteration on each."""
    last = minimum(number_of_streams, loop.count)
    wait = WaitEvent(event, loop.count - 1 - loop_index(name, last))
    return ForLoop(IndexName(name), last, (wait,))


def _with_sums_in_order(
    loop: _Iterations, kernels: Mapping[KernelName, Kernel], events: Iterator[int]
) -> list[Node]:
    """The body, where iterations that write the same memory do so one after the other."""
    number = loop.number
    before: dict[int, list[Node]] = {}
    behind: dict[int, list[Node]] = {}
    touched = [_memory_touched(loop, node) for node in loop.body]
    for name, chosen in _written_together(loop, kernels).items():
        places = [place for place, names in enumerate(touched) if name in names]
        event = next(events)
        before.setdefault(places[0], []).append(WaitEvent(event, loop.before(chosen)))
        behind.setdefault(places[-1], []).append(Record(event, number))
    ordered: list[Node] = []
    for place, node in enumerate(loop.body):
        ordered += (*before.get(place, ()), node, *behind.get(place, ()))
    return ordered


def _begun_in_order(loop: _Iterations, body: Sequence[Node], events: Iterator[int]) -> list[Node]:
    """The body, whose first computation is not issued to the device before that of the iteration
    before; as it is where transfers say when each may begin."""
    place = next((k for k, node in enumerate(body) if isinstance(node, Evaluate | Launch)), None)
    posts = any(isinstance(node, Communicate) for node in all_nodes(body))
    if place is None or not posts or any(isinstance(node, Wait) for node in body[:place]):
        return list(body)
    number, event = loop.number, next(events)
    return [*body[:place], WaitEvent(event, number - 1), Record(event, number), *body[place:]]


def _written_together(
    loop: _Iterations, kernels: Mapping[KernelName, Kernel]
) -> dict[Name, frozenset[str]]:
    """What exists outside and is written in the loop, some of it by several iterations, not each
    its own chunk; with the indices that choose which chunk of it."""
    sources, chosen = _views_in(loop), _chosen_by(loop)
    inside = {name for node in all_nodes(loop.body) for name in names_defined(node)}
    written: dict[Name, None] = {}
    shared: dict[Name, frozenset[str]] = {}
    for node, when in _nodes_with_counts(loop.body):
        if isinstance(node, ForLoop | Chunk | View | Free):
            continue
        for name in names_needed(node):
            line = _line(name, sources)
            by = loop.indices & when.union(*(chosen.get(view, ()) for view in line))
            shared[line[-1]] = shared.get(line[-1], by) & by
        for name in names_written(node, kernels):
            written[_line(name, sources)[-1]] = None
    return {
        name: shared[name]
        for name in written
        if name not in inside and shared.get(name, loop.indices) != loop.indices
    }


def _nodes_with_counts(
    body: Sequence[Node], when: frozenset[str] = frozenset()
) -> Iterator[tuple[Node, frozenset[str]]]:
    """All nodes, each with the symbols that say how often it runs: of iterations around it, one may
    be the only one in which it does."""
    for node in body:
        yield node, when
        if isinstance(node, ForLoop):
            named = when | {found.name for found in free_symbols(node.count)}
            yield from _nodes_with_counts(node.body, named)


def _memory_touched(loop: _Iterations, node: Node) -> set[Name]:
    """The memory that a node of the body uses, under the first name that it has."""
    sources = _views_in(loop)
    posted = {n.number: n for n in loop.body if isinstance(n, Communicate)}
    found: set[Name] = set()
    for inner in all_nodes([node]):
        user = posted.get(inner.number) if isinstance(inner, Wait) else inner
        if user is not None and not isinstance(user, Chunk | View | Free):
            found.update(_line(name, sources)[-1] for name in names_needed(user))
    return found


def _views_in(loop: _Iterations) -> dict[Name, Name]:
    return {out: src for node in all_nodes(loop.body) for out, src in views_made(node)}


def _chosen_by(loop: _Iterations) -> dict[Name, frozenset[str]]:
    """For each chunk the indices that it depends on: what all of them choose is the iteration's
    own."""
    return {
        node.out: frozenset(s.name for s in free_symbols(node.start))
        for node in all_nodes(loop.body)
        if isinstance(node, Chunk)
    }


def _line(name: Name, sources: Mapping[Name, Name]) -> list[Name]:
    """A name, what it is a view of, and so on: the last is no view."""
    line = [name]
    while line[-1] in sources:
        line.append(sources[line[-1]])
    return line
