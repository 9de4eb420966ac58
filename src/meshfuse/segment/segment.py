"""Cut a program into segments: communications and contractions alone, the rest in groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from meshfuse.expr import IntExpr, free_symbols
from meshfuse.facts.facts import facts_of
from meshfuse.facts.refusal import Refusal
from meshfuse.ir.comm import Communication
from meshfuse.ir.ops import Expr
from meshfuse.ir.ops_random import RandomSource
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import NameIndex, extract, index_names, read_names
from meshfuse.segment.boundaries import (
    keeping_loops,
    loops_allow,
    merge_edges,
    predecessors_of,
    standing_alone,
)
from meshfuse.segment.merge import Edge, in_order, merge_greedily, single_groups
from meshfuse.segment.segments import Segment, SegmentedProgram

Answer = str | Refusal | tuple[Refusal, ...]
"""The name of the scheduler that takes a program, or why none does."""

COMMUNICATION = "communication"
EXPR_EVAL = "expr_eval"


def segment(program: Program, accepts: Callable[[Program], Answer]) -> SegmentedProgram:
    """Segments of `program` that define before use, each taken by one executor.

    Communications, contractions and views of inputs stand alone. The others merge as far as no
    cycle arises and all are on one mesh and in the same host loops. `accepts` is asked once for
    each such region, and if it refuses, for parts of it, merged by bytes saved. What it refuses
    alone goes to "expr_eval", with the reasons. Arithmetic on scalars is repeated in each segment
    that reads it.
    """
    alone = standing_alone(program)
    asking = _Asking(program, accepts, _scalar_definitions(program), alone, index_names(program))
    predecessors = predecessors_of(program)
    edges = merge_edges(program, facts_of(program), alone)
    regions = single_groups(predecessors)
    merge_greedily(regions, edges, loops_allow(program))
    partition: list[tuple[int, ...]] = []
    for region in regions.members.values():
        if len(region) == 1 or isinstance(asking.answer(region), str):
            partition.append(region)
        else:
            partition += _accepted_parts(region, predecessors, edges, asking)
    ordered = in_order(partition, predecessors, keeping_loops(program))
    segments = tuple(_make_segment(f"S{k}", members, asking) for k, members in enumerate(ordered))
    return SegmentedProgram(program, segments)


@final
@dataclass(slots=True, eq=False, repr=False)
class _Asking:
    """The program, what stands `alone`, and what `accepts` said about parts, each asked once."""

    program: Program
    accepts: Callable[[Program], Answer]
    scalars: Mapping[str, int]
    alone: frozenset[int]
    names: NameIndex
    answers: dict[tuple[int, ...], Answer] = field(default_factory=dict[tuple[int, ...], Answer])

    def answer(self, members: tuple[int, ...]) -> Answer:
        if members not in self.answers:
            self.answers[members] = self.accepts(self.part(members))
        return self.answers[members]

    def part(self, members: tuple[int, ...]) -> Program:
        """The Program of some expressions, with the scalar arithmetic that they read."""
        exprs = self.program.fusion.exprs
        needed = dict.fromkeys(members)
        pending = list(members)
        while pending:
            for name in _scalars_read(exprs[pending.pop()]):
                position = self.scalars.get(name)
                if position is not None and position not in needed:
                    needed[position] = None
                    pending.append(position)
        return extract(self.program, [exprs[position] for position in sorted(needed)], self.names)


def _accepted_parts(
    region: tuple[int, ...],
    predecessors: Mapping[int, Sequence[int]],
    edges: Sequence[Edge],
    asking: _Asking,
) -> list[tuple[int, ...]]:
    """A refused region in parts that are accepted, or single expressions.

    No cycle can lead out of the region and back, or the region would have been one.
    """
    inside = set(region)
    parts = single_groups({p: [q for q in predecessors[p] if q in inside] for p in region})
    joined = [edge for edge in edges if edge.first in inside and edge.second in inside]
    merge_greedily(parts, joined, lambda union: isinstance(asking.answer(union), str))
    return list(parts.members.values())


def _make_segment(name: str, members: tuple[int, ...], asking: _Asking) -> Segment:
    expr = asking.program.fusion.exprs[members[0]]
    if isinstance(expr, Communication):
        return Segment(name, asking.part(members), COMMUNICATION)
    if members[0] in asking.alone:
        return Segment(name, asking.part(members), EXPR_EVAL)
    match asking.answer(members):
        case str() as scheduler:
            return Segment(name, asking.part(members), scheduler)
        case Refusal() as refusal:
            return Segment(name, asking.part(members), EXPR_EVAL, (refusal,))
        case refusals:
            return Segment(name, asking.part(members), EXPR_EVAL, refusals)


def _scalar_definitions(program: Program) -> dict[str, int]:
    """For each computed scalar, the position of its expression.

    Not of random numbers, which a call draws once: segments read them.
    """
    return {
        name: position
        for position, expr in enumerate(program.fusion.exprs)
        for name in expr.outs
        if name in program.fusion.scalars and not isinstance(expr, RandomSource)
    }


def _scalars_read(expr: Expr) -> tuple[str, ...]:
    """The names that an expression reads, by themselves or as symbols of an integer operand."""
    integers = (operand for operand in expr.ins if isinstance(operand, IntExpr))
    symbols = (found.name for operand in integers for found in free_symbols(operand))
    return (*read_names(expr), *symbols)
