"""Products of rows that a host loop has in pieces: one product for each piece, by one call.

T2 = matmul(T1, ..), rows of T1 exist outside   ->   T2_j0_close = matmul(T1_j0_apart, ..),
                                                     T2_j0 = reshape(T2_j0_close)

T2 = matmul(T1, ..), rows of T2 exist outside   ->   T1_j0_close = reshape(T1_j0),
                                                     T2_j0_apart = matmul(T1_j0_close, ..)

No piece is copied: torch multiplies a batch of rows, and writes one, wherever its pieces lie.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meshfuse.expr import const
from meshfuse.facts.shared_loops import cut_operand, loops_of
from meshfuse.facts.streams import Stream
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.ops import Expr, Linear, MatMul
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import map_names, read_names
from meshfuse.passes.chunk_tensors import close_name
from meshfuse.passes.chunked import (
    Chunked,
    chunk_of_pieces,
    cut_of,
    fresh_chunk,
    pieces_apart,
    pieces_close,
    pieces_of_chunk,
    place_of,
    write_apart,
)
from meshfuse.passes.operands import with_operands


def product_by_rows(
    work: Chunked, expr: Expr, exprs: Sequence[Expr], outside: Collection[TensorName]
) -> tuple[Expr, ...]:
    """What takes the place of a product whose rows are in pieces before or behind it, in a tensor
    that exists outside; nothing of another expression."""
    if not isinstance(expr, MatMul | Linear) or not _is_of_rows(work.program, expr):
        return ()
    (stream,), out = loops_of(work.program, expr), TensorName(expr.out)
    (src, *others), axis = expr.ins, cut_operand(work.program, expr, 0, out, stream)
    src = TensorName(str(src))
    is_read = any(out in read_names(other) for other in exprs)
    comes_apart, goes_apart = (src, axis) not in work.names, out in outside and not is_read
    if axis is None or not (comes_apart or goes_apart):
        return ()
    if len(others) > 1 and not goes_apart:
        return ()  # of rows that lie apart torch rounds the product before it adds a bias
    if cut_of(work.program, out, stream.axis, stream).pieces is const(1):
        return ()
    name = fresh_chunk(work, out)
    rows, before = _rows(work, src, axis, stream)
    if goes_apart:
        made, after = pieces_apart(work, out, name, stream.axis, stream), ()
        work.made.append(out)
    else:
        made = pieces_close(work, out, name, stream.axis, stream)
        after = (chunk_of_pieces(work, out, name, stream.axis, stream),)
        if out in outside:
            write_apart(work, out, name, stream)
    taking = with_operands(expr, (rows, *others))
    return (*before, map_names(taking, {out: made}), *after)


def _is_of_rows(program: Program, expr: MatMul | Linear) -> bool:
    """Whether it is a product of rows by a matrix that is in one loop and makes a chunk there."""
    streams, columns = loops_of(program, expr), TensorName(str(expr.ins[1]))
    return len(streams) == 1 and not streams[0].is_reduced and program.tensor(columns).ndim == 2


def _rows(
    work: Chunked, src: TensorName, axis: AxisName, stream: Stream
) -> tuple[TensorName, tuple[Expr, ...]]:
    """The pieces of a chunk of rows: where they lie outside, or as views of what the loop made."""
    chunk, place = work.names.get((src, axis)), place_of(work.program, src, axis)
    if chunk is None:
        return pieces_apart(work, src, fresh_chunk(work, src, place), axis, stream), ()
    close = close_name(chunk)
    if close in work.program.fusion.tensors:
        return close, ()
    close = pieces_close(work, src, chunk, axis, stream)
    return close, (pieces_of_chunk(work, chunk, close, place),)
