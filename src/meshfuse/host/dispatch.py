"""The one table from scheduler kind to executor, and the choice by capability.

A program is bound to its executors once, when it is loaded: no call looks anything up here.
"""

from __future__ import annotations

from meshfuse.base.errors import InvariantError, UserError
from meshfuse.dist.executors import CommunicationExecutor
from meshfuse.ir.program import Program
from meshfuse.runtime.executors import Executor, ExprEvalExecutor, KernelExecutor

EXECUTORS: dict[str, type[Executor]] = {
    "pointwise": KernelExecutor,
    "reduction": KernelExecutor,
    "normalization": KernelExecutor,
    "user": KernelExecutor,
    "expr_eval": ExprEvalExecutor,
    "communication": CommunicationExecutor,
}

BY_CAPABILITY: tuple[type[Executor], ...] = (
    CommunicationExecutor,
    KernelExecutor,
    ExprEvalExecutor,
)
"""Who is asked in turn about a program that no scheduler took."""


def executor_class(scheduler: str) -> type[Executor]:
    """The executor of the segments that a scheduler took."""
    try:
        return EXECUTORS[scheduler]
    except KeyError:
        raise InvariantError(
            f"no executor for scheduler {scheduler!r}; there are {', '.join(EXECUTORS)}"
        ) from None


def choose_executor(program: Program) -> type[Executor]:
    """The first executor that supports a program, which is one segment.

    Raises UserError with all refusals where there is none, and for a program that mixes
    communications with other operations.
    """
    refusals: list[str] = []
    for executor in BY_CAPABILITY:
        refusal = executor.supports(program)
        if refusal is None:
            return executor
        refusals.append(str(refusal))
    raise UserError(f"no executor runs this program as one segment: {'; '.join(refusals)}")
