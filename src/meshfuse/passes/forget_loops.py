"""Loop nests that are nothing but an order of iterations go: kernels are scheduled automatically.

T1: a0 split into a2, a3, neither of them bound   ->   T1: a0
"""

from __future__ import annotations

from dataclasses import replace

from meshfuse.base.errors import UserError
from meshfuse.base.trace import Note
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.program import Program

STAGE = "forget_loops"


def forget_loops(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Make the loop nests of tensors plain on which neither a mesh axis nor the stream is bound.

    Raises UserError for a leaf that is bound to a part of a kernel: whoever wrote that expects the
    kernel that it describes.
    """
    notes: list[Note] = []
    for tensor in program.fusion.tensors:
        if _stays(program, tensor):
            continue
        logical = tuple(axis.name for axis in program.tensor(tensor).logical)
        schedule = program.schedule(tensor)
        if schedule.leaves == logical and not schedule.inline_depth:
            continue
        program = with_plain_loops(program, tensor)
        reason = f"its loops [{', '.join(schedule.leaves)}] bind nothing; kernels get their own"
        notes.append(Note(STAGE, tensor, "forgotten", reason))
    return program, tuple(notes)


def with_plain_loops(program: Program, tensor: TensorName) -> Program:
    """The tensor with its logical axes as loops, none of which is bound."""
    logical = tuple(axis.name for axis in program.tensor(tensor).logical)
    schedule = program.schedule(tensor)
    plain = replace(schedule, steps=(), leaves=logical, bindings={}, inline_depth=0)
    return program.with_schedule(tensor, plain)


def _stays(program: Program, tensor: TensorName) -> bool:
    """Whether the loops say what lies where."""
    placed = False
    for leaf, bound in program.schedule(tensor).bindings.items():
        if bound.is_mesh or bound == ParallelType.stream:
            placed = True
        elif bound != ParallelType.serial:
            axis = program.all_axes(tensor)[leaf]
            raise UserError(
                f"execute: loop axis {axis} of {tensor} is bound to {bound}, but execute schedules "
                "kernels itself; manual_execute runs the program as it is scheduled"
            )
    return placed
