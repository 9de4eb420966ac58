"""The one table from scheduler kind to executor."""

from __future__ import annotations

from meshfuse.base.errors import InvariantError
from meshfuse.dist.executors import CommunicationExecutor
from meshfuse.runtime.executors import Executor, ExprEvalExecutor, KernelExecutor

EXECUTORS: dict[str, type[Executor]] = {
    "pointwise": KernelExecutor,
    "reduction": KernelExecutor,
    "normalization": KernelExecutor,
    "expr_eval": ExprEvalExecutor,
    "communication": CommunicationExecutor,
}


def executor_class(scheduler: str) -> type[Executor]:
    """The executor of the segments that a scheduler took."""
    try:
        return EXECUTORS[scheduler]
    except KeyError:
        raise InvariantError(
            f"no executor for scheduler {scheduler!r}; there are {', '.join(EXECUTORS)}"
        ) from None
