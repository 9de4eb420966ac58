"""Reductions: rows go in, one value a row comes out, perhaps beside what is computed on the way."""

from __future__ import annotations

from typing import final

from meshfuse.facts.refusal import Refusal
from meshfuse.ir.program import Program
from meshfuse.schedulers.cost import (
    LAUNCH_MICROSECONDS,
    inputs_and_outputs,
    microseconds_to_move,
)
from meshfuse.schedulers.rows import apply_rows, normalizes, rows_of
from meshfuse.schedulers.scheduler import LaunchHints, Scheduler


@final
class ReductionScheduler(Scheduler):
    """One pass over each row: nothing runs over the reduced axes again."""

    __slots__ = ()
    name = "reduction"

    def can(self, program: Program) -> Refusal | None:
        rows = rows_of(program, self.name)
        if isinstance(rows, Refusal):
            return rows
        again = normalizes(program, rows)
        if again is not None:
            return Refusal(self.name, "it runs over the reduced axes again", again)
        return None

    def estimate(self, program: Program) -> float:
        return LAUNCH_MICROSECONDS + microseconds_to_move(program, inputs_and_outputs(program))

    def apply(self, program: Program) -> tuple[Program, LaunchHints]:
        return apply_rows(program)
