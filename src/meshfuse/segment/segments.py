"""Segments: parts of a program that one executor runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr, Symbol
from meshfuse.facts.refusal import Refusal
from meshfuse.ir.axes import TensorName
from meshfuse.ir.program import Program


@final
@frozen_dataclass
class Segment:
    """A Program of its own, with global shapes and the whole's tensor names, and who takes it.

    `scheduler`: a kernel scheduler ("pointwise", "reduction", "normalization"), "expr_eval" or
    "communication". `refusals` are the answers of the schedulers that did not take it.
    """

    name: str
    program: Program
    scheduler: str
    refusals: tuple[Refusal, ...] = ()


@final
@frozen_dataclass
class Slice:
    """`out` is what `src` has along `axis` from `start` on, as much as `out` is long. With `pieces`
    it is that of each of so many equal blocks, which are an axis of `out` in front of that."""

    out: TensorName
    src: TensorName
    axis: int
    start: IntExpr
    pieces: IntExpr | None = None


@final
@frozen_dataclass
class Loop:
    """What runs in chunks: `body`, `count` times, on tensors whose sizes may depend on `index`.

    `slices` are the chunks of tensors that exist outside. Of those, `made` are made here chunk by
    chunk. Other tensors are added up from zero: `sums` has them by the names of what they are
    before and after an iteration adds to them. `wholes` has those that each iteration makes alike,
    by the name of what it makes.
    """

    index: Symbol
    count: IntExpr
    slices: tuple[Slice, ...]
    made: tuple[TensorName, ...]
    sums: Mapping[TensorName, TensorName] = field(default_factory=dict[TensorName, TensorName])
    wholes: Mapping[TensorName, TensorName] = field(default_factory=dict[TensorName, TensorName])
    body: tuple[Segment | Loop, ...] = ()


@final
@frozen_dataclass
class SegmentedProgram:
    """The whole program, and its segments and loops of such in an order that defines before use.

    With loops, the program has what stands for their tensors in one iteration; what it was without
    is `whole`.
    """

    program: Program
    items: tuple[Segment | Loop, ...]
    before_loops: Program | None = None

    @property
    def whole(self) -> Program:
        """The program as passes left it."""
        return self.before_loops or self.program

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Those in loops, too, in order."""
        return tuple(_segments_in(self.items))


def _segments_in(items: Sequence[Segment | Loop]) -> Iterator[Segment]:
    for item in items:
        if isinstance(item, Loop):
            yield from _segments_in(item.body)
        else:
            yield item
