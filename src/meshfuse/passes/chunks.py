"""Expressions of a host loop rewritten for one iteration: they read and make chunks.

T2 = relu(T1), T1 and T2 [a0{7}, a1{4}], a0 in 3 chunks   ->   T2_j0 = relu(T1_j0), both
                                                               [min(3, 7 - 3*j0), 4]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from meshfuse.expr import Symbol
from meshfuse.facts.facts import output_names, tensor_outputs
from meshfuse.facts.peers import delivered_stream, is_fetched, span_read
from meshfuse.facts.shared_loops import cut_operand, loops_of
from meshfuse.facts.streams import Stream, streams_of
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import AllGather, Communication, Deliver, Fetch, ReduceScatter
from meshfuse.ir.infer import is_tensor
from meshfuse.ir.ops import Expr, Operand, Pointwise
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import Name, map_names, read_names
from meshfuse.passes.chunk_products import product_by_rows
from meshfuse.passes.chunked import Chunked, chunk_made, chunk_read, fresh_chunk, like
from meshfuse.passes.operands import with_operands


def chunk_exprs(
    program: Program,
    exprs: Sequence[Expr],
    index: Symbol,
    kept: Collection[TensorName] = (),
) -> Chunked:
    """`exprs`, which share a loop, for iteration `index`. The expressions of `program` stay.

    `kept` exist outside, besides results and what other expressions read.
    """
    work = Chunked(program, index)
    inside = set(map(id, exprs))
    outside = {*output_names(program), *kept}
    for expr in program.fusion.exprs:
        if id(expr) not in inside:
            outside.update(TensorName(name) for name in read_names(expr))
    for expr in exprs:
        work.reads.append([])
        work.writes.append([])
        by_rows = product_by_rows(work, expr, exprs, outside)
        work.exprs.append(by_rows or tuple(_rewritten(work, expr, outside)))
    return work


def _rewritten(work: Chunked, expr: Expr, outside: set[TensorName]) -> Iterator[Expr]:
    outs = tensor_outputs(work.program, expr)
    out, stream = outs[0], loops_of(work.program, expr)[0]
    operands: list[Operand] = list(expr.ins)
    for position, operand in enumerate(expr.ins):
        if is_tensor(work.program, operand):
            source = TensorName(str(operand))
            axis = cut_operand(work.program, expr, position, out, stream)
            if axis is not None:
                operands[position] = chunk_read(work, source, axis, _read_by(work, expr, stream))
    taking = with_operands(expr, operands)
    owner = stream.chunk_number(work.index)
    match expr:
        case ReduceScatter() if isinstance(delivered_stream(work.program, expr), Stream):
            chunk = like(work, out, fresh_chunk(work, out))
            taking = Deliver(chunk, TensorName(str(operands[0])), expr.mesh_axis, owner)
        case AllGather() if is_fetched(work.program, expr, stream):
            chunk = chunk_made(work, out, stream, is_kept=out in outside)
            taking = Fetch(chunk, expr.src, expr.mesh_axis, owner)
        case _:
            chunk = _result_made(work, out, is_kept=out in outside)
    others = {name: _result_made(work, name, is_kept=name in outside) for name in outs[1:]}
    renamed: dict[Name, Name] = {out: chunk, **others}
    yield map_names(taking, renamed)
    if stream.is_reduced:
        before, after = (
            like(work, out, TensorName(f"{chunk}_{when}")) for when in ("before", "after")
        )
        work.sums[after] = work.sums_so_far[before] = out
        yield Pointwise(after, "add", (before, chunk))


def _result_made(work: Chunked, out: TensorName, *, is_kept: bool) -> TensorName:
    """The tensor for what an iteration makes of `out`. One without the axis it makes as a whole."""
    streams = streams_of(work.program, out)
    if streams:
        return chunk_made(work, out, streams[0], is_kept=is_kept and not streams[0].is_reduced)
    name = like(work, out, fresh_chunk(work, out))
    if is_kept:
        work.wholes[name] = out
    return name


def _read_by(work: Chunked, expr: Expr, stream: Stream) -> Stream:
    """The loop with the chunks that an expression reads of what it reads in chunks."""
    span = span_read(work.program, expr, stream) if isinstance(expr, Communication) else None
    return stream if span is None else replace(stream, span=span)
