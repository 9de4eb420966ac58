"""Normalizations: rows are reduced, then run over again with the result (softmax, layer norm)."""

from __future__ import annotations

from typing import final

from meshfuse.facts.facts import tensor_operands
from meshfuse.facts.refusal import Refusal
from meshfuse.ir.program import Program
from meshfuse.schedulers.cost import (
    LAUNCH_MICROSECONDS,
    inputs_and_outputs,
    microseconds_to_move,
)
from meshfuse.schedulers.iteration_space import reductions_of
from meshfuse.schedulers.rows import apply_rows, normalizes, rows_of
from meshfuse.schedulers.scheduler import LaunchHints, Scheduler

CACHED_PASS = 0.3
"""Time of a further pass over a row, which is in cache, relative to the first."""


@final
class NormalizationScheduler(Scheduler):
    """Several passes over each row."""

    __slots__ = ()
    name = "normalization"

    def can(self, program: Program) -> Refusal | None:
        rows = rows_of(program, self.name)
        if isinstance(rows, Refusal):
            return rows
        if normalizes(program, rows) is None:
            return Refusal(self.name, "nothing runs over the reduced axes after the reduction")
        return None

    def estimate(self, program: Program) -> float:
        tensors = inputs_and_outputs(program)
        outputs = {output.tensor for output in program.fusion.outputs}
        read = microseconds_to_move(program, (t for t in tensors if t not in outputs))
        again = CACHED_PASS * _passes_after_first(program) * read
        return LAUNCH_MICROSECONDS + microseconds_to_move(program, tensors) + again

    def apply(self, program: Program) -> tuple[Program, LaunchHints]:
        return apply_rows(program)


def _passes_after_first(program: Program) -> int:
    """Reductions that follow one another, each of which the next pass waits for."""
    depth: dict[str, int] = {}
    reductions = {expr.outs[0] for expr in reductions_of(program)}
    for expr in program.fusion.exprs:
        behind = max((depth.get(name, 0) for name in tensor_operands(program, expr)), default=0)
        own = int(any(out in reductions for out in expr.outs))
        depth.update({str(out): behind + own for out in expr.outs})
    return max(depth.values(), default=0)
