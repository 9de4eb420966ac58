"""CommunicationExecutor: runs a segment that is one communication."""

from __future__ import annotations

from typing import final

from meshfuse.base.errors import UserError
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.communicator import Communicator
from meshfuse.facts.refusal import Refusal
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import AllGather, AllReduce, Communication, ReduceScatter
from meshfuse.ir.program import Program
from meshfuse.runtime.allocate import as_dense
from meshfuse.runtime.evaluate_ops import Environment
from meshfuse.runtime.executors import Executor


@final
class CommunicationExecutor(Executor):
    """Runs one collective over the ranks of `team`, from a tensor into an existing one.

    Both lie in memory in `order` (tensor axes, slowest first); the axis that is gathered or
    scattered is the slowest, so that each rank's block is one piece of memory.
    """

    __slots__ = ("_cause", "_collective", "_function", "_number", "_order", "_out", "_src", "_team")

    def __init__(
        self,
        number: int,
        collective: str,
        team: tuple[int, ...],
        src: TensorName,
        out: TensorName,
        order: tuple[int, ...],
        function: str | None,
        cause: str,
    ) -> None:
        self._number = number
        self._collective = collective
        self._team = team
        self._src = src
        self._out = out
        self._order = order
        self._function = function
        self._cause = cause

    @staticmethod
    def supports(program: Program) -> Refusal | None:
        """One all-gather, all-reduce or reduce-scatter, and nothing else.

        Raises UserError for a program in which communications and other operations are mixed: no
        executor has both, it must be cut into segments first.
        """
        exprs = program.fusion.exprs
        communications = [expr for expr in exprs if isinstance(expr, Communication)]
        if communications and len(communications) < len(exprs):
            raise UserError(
                f"{communications[0].out} is made by a communication among other operations: "
                "segment the program before choosing an executor"
            )
        for expr in exprs:
            if not isinstance(expr, AllGather | AllReduce | ReduceScatter):
                name = type(expr).__name__
                return Refusal("communication", f"{name} moves nothing", TensorName(expr.outs[0]))
        if len(exprs) != 1:
            return Refusal("communication", f"runs one communication, not {len(exprs)}")
        return None

    def compile(self) -> None:
        """Nothing to do: groups are formed when first used."""

    def is_compiled(self) -> bool:
        return True

    def request(self, env: Environment) -> CollectiveRequest:
        """The collective, ready to post. A source that lies otherwise in memory is copied."""
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
        """Post, and wait. The host program keeps the two apart, and uses `request`."""
        Communicator.instance().run(self.request(env))
