"""Programs with a fault somewhere in their loops, and how nodes in nested bodies are changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from meshfuse.host.check import check_host_program, check_ranks
from meshfuse.host.faults import Fault, FaultKind
from meshfuse.host.nodes import ForLoop, HostProgram, Node, OnStream
from planted_faults import ranks_of

Path = tuple[int, ...]
"""A place in the body, in the body of the node there, and so on."""
Body = Sequence[Node]


@dataclass(frozen=True)
class PlantedInLoop:
    """One of the kinds `wanted` must be found. `only`: the rank that has the program, others have
    the `sound` one."""

    wanted: frozenset[FaultKind]
    program: HostProgram
    sound: HostProgram | None = None
    only: int | None = None

    def check(self) -> tuple[Fault, ...]:
        if self.sound is None or self.only is None:
            return check_host_program(self.program)
        return check_ranks(
            {**dict.fromkeys(ranks_of(self.sound), self.sound), self.only: self.program}
        )

    def is_found(self) -> bool:
        return any(fault.kind in self.wanted for fault in self.check())


LoopPlanter = Callable[[HostProgram], Iterator[PlantedInLoop]]


def count_found(planter: LoopPlanter, programs: Mapping[str, HostProgram]) -> int:
    """How many faults are planted, all of which must be found."""
    count = 0
    for name, program in programs.items():
        for planted in planter(program):
            assert planted.is_found(), (name, planted, list(map(str, planted.check())))
            count += 1
    return count


_Node = TypeVar("_Node", bound=Node)


# Places in nested bodies.


def nodes_of(body: Body, kind: type[_Node], path: Path = ()) -> Iterator[tuple[Path, _Node]]:
    for place, node in enumerate(body):
        if isinstance(node, kind):
            yield (*path, place), node
        if isinstance(node, ForLoop | OnStream):
            yield from nodes_of(node.body, kind, (*path, place))


def body_at(body: Body, path: Path) -> Body:
    """The body in which the last place of a path is."""
    for place in path[:-1]:
        node = body[place]
        assert isinstance(node, ForLoop | OnStream)
        body = node.body
    return body


def edited(body: Body, path: Path, *nodes: Node) -> tuple[Node, ...]:
    """The body with other nodes in one place."""
    place, *inner = path
    node = body[place]
    if inner:
        assert isinstance(node, ForLoop | OnStream)
        nodes = (replace(node, body=edited(node.body, tuple(inner), *nodes)),)
    return (*body[:place], *nodes, *body[place + 1 :])


def changed(program: HostProgram, path: Path, *nodes: Node) -> HostProgram:
    return replace(program, body=edited(program.body, path, *nodes))


def moved(program: HostProgram, path: Path, to: int) -> HostProgram:
    """The node at a path stands in front of another place of its body, which is earlier."""
    body = list(body_at(program.body, path))
    body.insert(to, body.pop(path[-1]))
    return with_body_around(program, path, body)


def with_body_around(program: HostProgram, path: Path, body: Body) -> HostProgram:
    if len(path) == 1:
        return replace(program, body=tuple(body))
    around = body_at(program.body, path[:-1])[path[-2]]
    assert isinstance(around, ForLoop | OnStream)
    return changed(program, path[:-1], replace(around, body=tuple(body)))
