"""Sums over ranks that are to be added in the order of the team wait until all terms are there.

T1 in chunks, T2 = reduce_scatter(T1), which would add them as they are delivered
->  T1 as a whole: the reduce-scatter adds
"""

from __future__ import annotations

from meshfuse.base.dtypes import ITEM_BYTES, DataType, is_floating
from meshfuse.base.trace import Note
from meshfuse.facts.peers import delivered_stream, delivers
from meshfuse.facts.streams import Stream, stream_leaves
from meshfuse.ir.comm import ReduceScatter
from meshfuse.ir.program import Program
from meshfuse.passes.propagate_streams import unbind_stream

STAGE = "team_order"


def add_floats_in_team_order(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Deliver no terms of floating type one by one."""
    return _deliver_nothing(program, most_bytes=8)


def add_half_floats_in_team_order(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Deliver no terms of a 16-bit type one by one: their sum is rounded once."""
    return _deliver_nothing(program, most_bytes=2)


def _deliver_nothing(program: Program, most_bytes: int) -> tuple[Program, tuple[Note, ...]]:
    notes: list[Note] = []
    for expr in program.fusion.exprs:
        if not isinstance(expr, ReduceScatter):
            continue
        dtype = program.tensor(expr.src).dtype
        if delivers(program, expr) and _is_meant(dtype, most_bytes):
            is_in_pieces = isinstance(delivered_stream(program, expr), Stream)
            for tensor in (expr.src, expr.out) if is_in_pieces else (expr.src,):
                for leaf in stream_leaves(program, tensor):
                    program = unbind_stream(program, tensor, leaf)
            reason = "it is made as a whole: its terms are to be added in the order of the team"
            notes.append(Note(STAGE, expr.src, "not_streamed", reason))
    return program, tuple(notes)


def _is_meant(dtype: DataType, most_bytes: int) -> bool:
    return is_floating(dtype) and ITEM_BYTES[dtype] <= most_bytes
