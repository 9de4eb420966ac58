"""What can be wrong with a host program, as values."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.host.events import CALLER
from meshfuse.host.nodes import Communicate, Evaluate, Node
from meshfuse.host.printer import print_node
from meshfuse.ir.axes import ScalarName, TensorName

_LONGEST_NODE = 100
"""Characters of a node that a line quotes."""


class FaultKind(Enum):
    """Of one rank's memory and waits, its streams, its results, then of ranks that meet,
    and of what data comes where."""

    use_before_allocation = "use before allocation"
    use_after_free = "use after free"
    double_allocation = "double allocation"
    double_free = "double free"
    foreign_free = "free of the caller's memory"
    never_freed = "never freed"
    unwritten_read = "read of what nothing has written"
    overwritten_read = "read of what was overwritten"
    read_before_wait = "read before wait"
    write_in_flight = "write in flight"
    free_in_flight = "free in flight"
    wait_without_post = "wait without post"
    double_wait = "double wait"
    double_post = "double post"
    never_awaited = "never awaited"

    race = "race"
    freed_in_use = "freed in use"
    not_joined = "not joined"
    unrecorded_event = "wait for an unrecorded event"

    output_missing = "output missing"
    output_unwritten = "output unwritten"
    update_misplaced = "update misplaced"

    wrong_team = "wrong team"
    missing_post = "missing post"
    order_differs = "order differs"
    ranks_disagree = "ranks disagree"
    cyclic_wait = "cyclic wait"
    wrong_owner = "wrong owner"

    wrong_part = "wrong part"
    terms_missing = "terms missing"
    terms_twice = "terms added twice"


@final
@frozen_dataclass
class Fault:
    """One thing that is wrong. `str` of it is one line.

    `node` is a place in the program's body, None for its end. `ranks` are those that it is about:
    of memory, all that would do the same. `number` is the communication's, where one takes part.
    """

    kind: FaultKind
    node: int | None
    ranks: tuple[int, ...]
    buffer: TensorName | ScalarName | None
    explanation: str
    number: int | None = None

    def __str__(self) -> str:
        place = "at the end" if self.node is None else f"node {self.node}"
        return f"{self.kind.value}, {place}, {ranks_text(self.ranks)}: {self.explanation}"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2`, `ranks 0 to 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and tuple(ranks) == tuple(range(first, last + 1)):
        return f"ranks {first} to {last}"
    return f"ranks {', '.join(map(str, ranks))}"


def stream_text(stream: int) -> str:
    """`stream 2`, `the caller's stream`."""
    return "the caller's stream" if stream == CALLER else f"stream {stream}"


def node_text(node: Node) -> str:
    """A node on one line, cut short: of an evaluation its expressions."""
    if isinstance(node, Communicate):
        return f"{node.collective.value} number {node.number} of {node.src} into {node.out}"
    lines = [line.strip() for line in print_node(node).splitlines()]
    text = "; ".join(lines[1:-1]) if isinstance(node, Evaluate) and len(lines) > 2 else lines[0]
    return text if len(text) <= _LONGEST_NODE else f"{text[: _LONGEST_NODE - 3]}..."
