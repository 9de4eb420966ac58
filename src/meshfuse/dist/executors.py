"""CommunicationExecutor: runs a segment that is one communication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch

from meshfuse.base.bounded import BoundedTable
from meshfuse.base.errors import InvariantError, UserError
from meshfuse.base.trace import Activity, Trace, Work
from meshfuse.dist.bound_collectives import BoundCollective, SizedCollective
from meshfuse.dist.communicator import Communicator
from meshfuse.facts.refusal import Refusal
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import AllGather, AllReduce, Communication, Exchange, ReduceScatter
from meshfuse.ir.program import Program
from meshfuse.runtime.evaluate_ops import Environment
from meshfuse.runtime.executors import ALONE_IDS, Executor, ExecutorIds, bytes_of

MOST_SIZES = 64
"""Sets of sizes for which an executor keeps what it asks for."""


@final
class CommunicationExecutor(Executor):
    """Runs one collective, into a buffer that exists."""

    __slots__ = ("_collective", "_sized", "work")

    def __init__(self, ids: ExecutorIds = ALONE_IDS) -> None:
        self.ids = ids
        self._collective: BoundCollective | None = None
        self._sized: BoundedTable[tuple[object, ...], SizedCollective] = BoundedTable(MOST_SIZES)
        self.work = Work("communication", "communication", ids.group)

    @staticmethod
    def supports(program: Program) -> Refusal | None:
        """One all-gather, all-reduce, reduce-scatter or exchange, and nothing else.

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
            if not isinstance(expr, AllGather | AllReduce | ReduceScatter | Exchange):
                name = type(expr).__name__
                return Refusal("communication", f"{name} moves nothing", TensorName(expr.outs[0]))
        if len(exprs) != 1:
            return Refusal("communication", f"runs one communication, not {len(exprs)}")
        return None

    def compile(self, collective: BoundCollective, trace: Trace | None = None) -> None:
        """Remember what to ask for: groups of ranks are formed when first used."""
        name = f"{collective.collective} {collective.out.name}"
        self.work = Work(name, "communication", self.ids.group)
        if trace is None:
            self._collective = collective
            return
        with trace.span(Activity.compile, self.work):
            self._collective = collective

    def is_compiled(self) -> bool:
        return self._collective is not None

    def run(self, env: Environment) -> None:
        """Post, and wait; the host program keeps the two apart."""
        bound = self._collective
        if bound is None:
            raise InvariantError("a communication runs before it is compiled")
        src, out = env.tensor(bound.src.name), env.tensor(bound.out.name)
        request = self._for_sizes(bound, env.sizes, out.device).request(src, out)
        if env.trace is None:
            Communicator.instance().run(request)
            return
        with env.trace.span(Activity.run, self.work) as extent:
            Communicator.instance().run(request)
            extent.device = str(request.out.device)
            extent.input_bytes, extent.output_bytes = request.bytes, bytes_of(request.out)

    def _for_sizes(
        self, bound: BoundCollective, sizes: Mapping[str, int], device: torch.device
    ) -> SizedCollective:
        key = (device, *sizes.items())
        sized = self._sized.get(key)
        if sized is None:
            sized = bound.at(sizes, device)
            self._sized.put(key, sized)
        return sized
