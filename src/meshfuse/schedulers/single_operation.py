"""Segments that no kernel runs: one operation through torch, one communication."""

from __future__ import annotations

from typing import final

from meshfuse.facts.facts import tensor_operands, tensor_outputs
from meshfuse.facts.refusal import Refusal
from meshfuse.facts.views import is_in_place
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import Communication
from meshfuse.ir.ops import Expr, Linear, MatMul
from meshfuse.ir.program import Program
from meshfuse.schedulers.cost import LAUNCH_MICROSECONDS, microseconds_to_move
from meshfuse.schedulers.scheduler import LaunchHints, Scheduler

TORCH_MICROSECONDS = 2 * LAUNCH_MICROSECONDS
"""An operation through torch: dispatch, and an output that is allocated."""


VIEW_MICROSECONDS = 1.0
"""A view through torch: nothing is moved."""


@final
class ExprEvalScheduler(Scheduler):
    """Any one operation of one rank, run by torch, or any number of views, which cost nothing.

    A kernel is cheaper where it can run the operation.
    """

    __slots__ = ()
    name = "expr_eval"

    def can(self, program: Program) -> Refusal | None:
        exprs = program.fusion.exprs
        for expr in exprs:
            if isinstance(expr, Communication):
                return _refuse(self.name, expr, "moves data between ranks")
        if len(exprs) != 1 and not _are_views(program):
            return Refusal(self.name, f"it has {len(exprs)} operations; torch runs one at a time")
        return None

    def estimate(self, program: Program) -> float:
        if _are_views(program):
            return VIEW_MICROSECONDS * len(program.fusion.exprs)
        return TORCH_MICROSECONDS + _microseconds(program)

    def apply(self, program: Program) -> tuple[Program, LaunchHints]:
        return program, LaunchHints()


def _are_views(program: Program) -> bool:
    """Whether every result lies in memory as a view of its operand."""
    return all(is_in_place(program, expr) for expr in program.fusion.exprs)


@final
class CommunicationScheduler(Scheduler):
    """One communication."""

    __slots__ = ()
    name = "communication"

    def can(self, program: Program) -> Refusal | None:
        exprs = program.fusion.exprs
        for expr in exprs:
            if not isinstance(expr, Communication):
                reason = "is a contraction" if isinstance(expr, MatMul | Linear) else "stays local"
                return _refuse(self.name, expr, reason)
        if len(exprs) != 1:
            return Refusal(self.name, f"it has {len(exprs)} communications; they run one at a time")
        return None

    def estimate(self, program: Program) -> float:
        return TORCH_MICROSECONDS + _microseconds(program)

    def apply(self, program: Program) -> tuple[Program, LaunchHints]:
        return program, LaunchHints()


def _refuse(scheduler: str, expr: Expr, reason: str) -> Refusal:
    return Refusal(scheduler, f"{type(expr).__name__} {reason}", TensorName(expr.outs[0]))


def _microseconds(program: Program) -> float:
    moved = (
        tensor
        for expr in program.fusion.exprs
        for tensor in (*tensor_operands(program, expr), *tensor_outputs(program, expr))
    )
    return microseconds_to_move(program, moved)
