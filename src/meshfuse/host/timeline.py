"""What one rank does when: items on lanes, as predicted or as measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeGuard, final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.host.nodes import (
    Communicate,
    Evaluate,
    HostProgram,
    KernelName,
    Launch,
    Node,
    all_nodes,
)
from meshfuse.ir.ops import Expr, Linear, MatMul
from meshfuse.ir.printer import print_expr
from meshfuse.ir.program import Program
from meshfuse.runtime.executors import title_of


class Lane(Enum):
    """What goes on beside what. Of the compute lane each stream has its own; on one of these, and
    on that of communications, one item follows the other."""

    compute = "compute"
    communication = "communication"


class Kind(Enum):
    """Of an item. A rank that waits, or that hands data to a transport, computes nothing."""

    gemm = "gemm"
    kernel = "kernel"
    operation = "operation"
    communication = "communication"
    post = "post"
    wait = "wait"


COMPUTING = (Kind.gemm, Kind.kernel, Kind.operation)
HOLDING_UP = (Kind.post, Kind.wait)
"""What streams do for communications: they are not hidden there."""


@final
@frozen_dataclass
class Label:
    """What is done, and why: for a communication the operation that needs it, else the
    expressions."""

    name: str
    kind: Kind
    cause: str


@final
@frozen_dataclass
class Item:
    """`start` and `seconds` are counted from the first item of the call.

    `bytes`: read and written, of a communication received. `flops`: 0 where they are not known.
    `stream`: the number of the worker stream, None on the caller's; of a communication, of the one
    that posted it.
    """

    label: Label
    lane: Lane
    start: float
    seconds: float
    bytes: int = 0
    flops: int = 0
    stream: int | None = None

    @property
    def end(self) -> float:
        return self.start + self.seconds


Segments = Mapping[KernelName, Program]
"""The programs that kernels are made of, on global shapes."""


def label_of(node: Launch | Evaluate | Communicate, segments: Segments) -> Label:
    """What a node is called: as in profiles."""
    match node:
        case Launch(kernel):
            exprs = segments[kernel].fusion.exprs if kernel in segments else ()
            return Label(kernel, Kind.kernel, _text(exprs))
        case Evaluate(body=body):
            is_gemm = any(isinstance(expr, MatMul | Linear) for expr in body)
            return Label(title_of(body), Kind.gemm if is_gemm else Kind.operation, _text(body))
        case Communicate():
            name = f"{node.collective.value} {node.out}"
            return Label(name, Kind.communication, node.cause)


def wait_for(label: Label) -> Label:
    """The wait for a communication."""
    return Label(f"wait for {label.name}", Kind.wait, label.cause)


def labels_by_name(program: HostProgram, segments: Segments) -> dict[str, Label]:
    """The labels of all that a profile may name."""
    labels = (label_of(node, segments) for node in all_nodes(program.body) if is_named(node))
    return {label.name: label for label in labels}


def is_named(node: Node) -> TypeGuard[Launch | Evaluate | Communicate]:
    return isinstance(node, Launch | Evaluate | Communicate)


def _text(exprs: Sequence[Expr]) -> str:
    """`T3 = linear(T0, T1)`; of several the last, which give the results, and how many more."""
    if not exprs:
        return ""
    others = f" and {len(exprs) - 1} before it" if len(exprs) > 1 else ""
    return f"{print_expr(exprs[-1])}{others}"


Intervals = Sequence[tuple[float, float]]
"""Starts and ends, ascending; between two of them there is a gap."""


def intervals_of(items: Iterable[Item], kinds: Sequence[Kind]) -> Intervals:
    """When at least one item of these kinds is going on, on whatever lanes."""
    spans = sorted((item.start, item.end) for item in items if item.label.kind in kinds)
    found: list[tuple[float, float]] = []
    for start, end in spans:
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def common(some: Intervals, others: Intervals) -> Intervals:
    """When both go on."""
    found: list[tuple[float, float]] = []
    i = j = 0
    while i < len(some) and j < len(others):
        start, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < end:
            found.append((start, end))
        if some[i][1] <= others[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Intervals) -> float:
    """Seconds."""
    return sum(end - start for start, end in intervals)
