"""CommunicationExecutor: one collective on the buffers of one rank."""

from __future__ import annotations

from typing import final

from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.communicator import Communicator
from meshfuse.facts.refusal import Refusal
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import Communication
from meshfuse.ir.program import Program
from meshfuse.runtime.allocate import as_dense
from meshfuse.runtime.evaluate_ops import Environment
from meshfuse.runtime.executors import Executor


@final
class CommunicationExecutor(Executor):
    """Posts one collective and waits for it.

    The interpreter of host programs takes only the request from it, and waits later. `order` is the
    memory order of both buffers; without a communicator there is no `run`.
    """

    __slots__ = (
        "_cause",
        "_collective",
        "_communicator",
        "_function",
        "_number",
        "_order",
        "_out",
        "_src",
        "_team",
    )

    def __init__(
        self,
        *,
        number: int,
        collective: str,
        team: tuple[int, ...],
        src: TensorName,
        out: TensorName,
        order: tuple[int, ...],
        function: str | None,
        cause: str,
        communicator: Communicator | None = None,
    ) -> None:
        self._number = number
        self._collective = collective
        self._team = team
        self._src = src
        self._out = out
        self._order = order
        self._function = function
        self._cause = cause
        self._communicator = communicator

    @staticmethod
    def supports(program: Program) -> Refusal | None:
        """All of the program must be communication."""
        for expr in program.fusion.exprs:
            if not isinstance(expr, Communication):
                reason = f"runs communications only, no {type(expr).__name__}"
                return Refusal("communication", reason, TensorName(expr.outs[0]))
        return None

    def compile(self) -> None:
        """Nothing to do."""

    def is_compiled(self) -> bool:
        return True

    def request(self, env: Environment) -> CollectiveRequest:
        """What to post. An input or a view may have gaps: then a dense copy is sent."""
        return CollectiveRequest(
            self._number,
            self._collective,
            self._team,
            as_dense(env.tensor(self._src), self._order),
            env.tensor(self._out),
            self._function,
            self._cause,
        )

    def run(self, env: Environment) -> None:
        if self._communicator is None:
            raise RuntimeError("CommunicationExecutor.run without a communicator")
        self._communicator.run(self.request(env))
