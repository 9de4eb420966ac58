"""Let outputs that are other views of inputs share their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshfuse.base.trace import Note
from meshfuse.facts.layout import allocation_of, layout_of, local_bytes
from meshfuse.facts.views import View, chains_from_inputs, is_in_place, view_layout
from meshfuse.ir.ops import Reshape
from meshfuse.ir.program import Program

STAGE = "mark_aliases"


def mark_aliases(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Give what is made of an input by views alone, and returned, the memory layout of a view.

    T1 = permute(T0, [1, 0]), T0 row-major, T1 an output  ->  T1 has its axis 1 slowest

    Later stages make a view of what lies as one. What cannot is a copy, with a note.
    """
    notes: list[Note] = []
    for output, chain in chains_from_inputs(program).items():
        marked = _marked(program, chain)
        if isinstance(marked, Program):
            program = marked
        else:
            size = str(local_bytes(program, output))
            notes.append(Note(STAGE, output, "copy", f"no view of {chain[0].src}: {marked}", size))
    return program, tuple(notes)


def _marked(program: Program, chain: Sequence[View]) -> Program | str:
    """The program with the layouts of views along `chain`, or why there are none."""
    updated = {output.alias for output in program.fusion.outputs}
    if chain[0].src in updated:
        return f"{chain[0].src} is updated in place"
    for expr in chain:
        layout = view_layout(program, expr)
        if layout is None and isinstance(expr, Reshape):
            return f"axes that {expr.out} merges are not known to be contiguous"
        if layout is None:
            return f"{expr.out} drops an axis of unknown size"
        schedule = program.schedule(expr.out)
        if schedule.allocation is None and layout != layout_of(program, expr.out):
            allocation = allocation_of(program, expr.out, layout)
            program = program.with_schedule(expr.out, replace(schedule, allocation=allocation))
        if not is_in_place(program, expr):
            return f"{expr.out} has a memory layout of its own"
    return program
