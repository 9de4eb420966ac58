"""Segments in a row with the same host loop are put into it, and rewritten for its chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from meshfuse.expr import Symbol, free_symbols
from meshfuse.facts.facts import tensor_outputs
from meshfuse.facts.peers import delivers_inside
from meshfuse.facts.shared_loops import continues_loop, loops_of
from meshfuse.facts.streams import has_streams, loop_index
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import Deliver
from meshfuse.ir.fusion import Output
from meshfuse.ir.ops import Expr
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import extract, with_exprs
from meshfuse.passes.chunk_tensors import without_streams
from meshfuse.passes.chunked import Chunked
from meshfuse.passes.chunks import chunk_exprs
from meshfuse.segment.segment import EXPR_EVAL
from meshfuse.segment.segments import Loop, Segment, SegmentedProgram, Slice


def form_loops(segmented: SegmentedProgram) -> SegmentedProgram:
    """The segments with loops around those that have stream leaves, for one iteration each."""
    if not has_streams(segmented.program):
        return segmented
    work = _Forming(segmented.program, _names_taken(segmented.program))
    items = tuple(_form(work, segmented.segments))
    return SegmentedProgram(work.program, items, segmented.program)


def chunk_program(program: Program) -> Program:
    """A part of a program, of expressions in the same loops, for one iteration of all of them."""
    if not has_streams(program):
        return program
    taken = _names_taken(program)
    while exprs := _tensor_exprs(program):
        if not loops_of(program, exprs[0]):
            break
        index, taken = _fresh_index(taken, program, exprs)
        chunked = chunk_exprs(program, exprs, index)
        whole = _with_results(_in_place(chunked, exprs), chunked)
        program = extract(whole, _taking(program.fusion.exprs, chunked, exprs))
    return without_streams(program)


@final
@dataclass(slots=True, eq=False, repr=False)
class _Forming:
    """The program so far, and the names that sizes have, those of loops among them. `kept`: chunks
    of what exists outside of the loop that makes them, and what they are by other names in it."""

    program: Program
    taken: frozenset[str]
    kept: frozenset[TensorName] = frozenset()


def _names_taken(program: Program) -> frozenset[str]:
    axes = (a for value in program.fusion.tensors.values() for a in value.logical)
    names = {found.name for a in axes for found in free_symbols(a.extent)}
    return frozenset({*names, *program.fusion.scalars})


def _fresh_index(
    taken: frozenset[str], program: Program, exprs: Sequence[Expr]
) -> tuple[Symbol, frozenset[str]]:
    """The index of a loop around `exprs`: j0, j1, .."""
    number = 0
    while f"j{number}" in taken:
        number += 1
    count = loops_of(program, exprs[0])[0].span.count
    return loop_index(f"j{number}", count), taken | {f"j{number}"}


def _tensor_exprs(program: Program) -> list[Expr]:
    """All but arithmetic on scalars."""
    return [expr for expr in program.fusion.exprs if tensor_outputs(program, expr)]


# Loops.


def _form(work: _Forming, segments: Sequence[Segment]) -> Iterator[Segment | Loop]:
    for group in _groups(work.program, segments):
        if loops_of(work.program, _tensor_exprs(group[0].program)[0]):
            yield _loop(work, group)
        else:
            yield from (replace(part, program=without_streams(part.program)) for part in group)


def _groups(program: Program, segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments in a row that share a loop; each by itself that is in none."""
    groups: list[list[Segment]] = []
    for segment in segments:
        if groups and _continues(program, groups[-1], segment):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _continues(program: Program, group: Sequence[Segment], segment: Segment) -> bool:
    """Whether a segment can be in the loop of those before it."""
    before = [expr for part in group for expr in _tensor_exprs(part.program)]
    return continues_loop(program, before, _tensor_exprs(segment.program))


def _loop(work: _Forming, group: Sequence[Segment]) -> Loop:
    exprs = [expr for part in group for expr in _tensor_exprs(part.program)]
    stream = loops_of(work.program, exprs[0])[0]
    index, work.taken = _fresh_index(work.taken, work.program, exprs)
    work.kept |= _summed_inside(work.program, exprs)
    chunked = chunk_exprs(work.program, exprs, index, work.kept)
    work.kept |= {*chunked.kept, *chunked.sums, *chunked.wholes}
    work.program = _in_place(chunked, exprs)
    parts = [taking for part in group for taking in _parts(work.program, part, chunked, exprs)]
    slices = tuple(Slice(name, *found) for name, found in chunked.slices.items())
    sums = {**chunked.sums_so_far, **chunked.sums}
    body = tuple(_form(work, parts))
    made, wholes = tuple(chunked.made), chunked.wholes
    return Loop(index, stream.span.count, slices, made, sums, wholes, body)


def _summed_inside(program: Program, exprs: Sequence[Expr]) -> set[TensorName]:
    """What loops inside add up of what they are delivered. It exists outside of all of them, so
    that their iterations can be in one row."""
    return {TensorName(expr.outs[0]) for expr in exprs if delivers_inside(program, expr)}


def _in_place(chunked: Chunked, exprs: Sequence[Expr]) -> Program:
    """The program with what takes the place of `exprs`, and what brings chunks there and away."""
    steps = zip(chunked.reads, chunked.exprs, chunked.writes, strict=True)
    taking = {
        id(old): (*reads, *new, *writes)
        for old, (reads, new, writes) in zip(exprs, steps, strict=True)
    }
    program = chunked.program
    found = [new for old in program.fusion.exprs for new in taking.get(id(old), (old,))]
    return with_exprs(program, found)


def _parts(
    program: Program, part: Segment, chunked: Chunked, exprs: Sequence[Expr]
) -> Iterator[Segment]:
    """What takes the place of a segment. What is delivered is added by another one, and pieces of
    chunks are copied by one in front and one behind."""
    olds = part.program.fusion.exprs
    reads, writes = (
        [new for old, moved in zip(exprs, moves, strict=True) if old in olds for new in moved]
        for moves in (chunked.reads, chunked.writes)
    )
    program = _with_results(program, chunked)
    if reads:
        yield Segment(f"{part.name}_read", extract(program, reads), EXPR_EVAL)
    found = _taking(olds, chunked, exprs)
    if isinstance(found[0], Deliver) and len(found) > 1:
        yield replace(part, program=extract(program, found[:1]))
        yield Segment(f"{part.name}_sum", extract(program, found[1:]), EXPR_EVAL)
    else:
        yield replace(part, program=extract(program, found))
    if writes:
        yield Segment(f"{part.name}_write", extract(program, writes), EXPR_EVAL)


def _with_results(program: Program, chunked: Chunked) -> Program:
    """With results of the loop's expressions: besides chunks that others in the loop read, those of
    what exists outside."""
    results = tuple(Output(n) for n in (*chunked.kept, *chunked.sums, *chunked.wholes))
    fusion = replace(program.fusion, outputs=(*program.fusion.outputs, *results))
    return replace(program, fusion=fusion)


def _taking(part: Sequence[Expr], chunked: Chunked, exprs: Sequence[Expr]) -> list[Expr]:
    """What takes the place of a part of a loop's expressions."""
    taking = {id(old): new for old, new in zip(exprs, chunked.exprs, strict=True)}
    return [new for old in part for new in taking.get(id(old), (old,))]
