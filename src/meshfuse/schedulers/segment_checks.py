"""Questions that every kernel scheduler asks of a segment first."""

from __future__ import annotations

from meshfuse.expr import IntExpr
from meshfuse.facts.refusal import Refusal
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.comm import Communication
from meshfuse.ir.ops import (
    Broadcast,
    Cast,
    Expand,
    Expr,
    Linear,
    MatMul,
    Permute,
    Pointwise,
    Reduction,
    Reshape,
    Set,
    Squeeze,
    Welford,
)
from meshfuse.ir.program import Program
from meshfuse.ir.terms import Terms
from meshfuse.schedulers.iteration_space import IterationSpace, SpaceAxis, reductions_of

KERNEL_OPERATIONS: tuple[type[Expr], ...] = (
    Pointwise,
    Cast,
    Set,
    Broadcast,
    Expand,
    Permute,
    Squeeze,
    Reshape,
    Reduction,
    Welford,
    Terms,
)
"""What can stand inside a kernel."""


def refuse_operations(program: Program, scheduler: str) -> Refusal | None:
    """No operation that has no form inside a kernel, and something to write that no input is."""
    for expr in program.fusion.exprs:
        if not isinstance(expr, KERNEL_OPERATIONS):
            return Refusal(scheduler, _why_no_kernel(expr), TensorName(expr.outs[0]))
    if not program.fusion.outputs:
        return Refusal(scheduler, "it writes no tensor")
    for output in program.fusion.outputs:
        if output.tensor in program.fusion.inputs:
            return Refusal(scheduler, "an output that is an input needs no kernel", output.tensor)
    return None


def refuse_sizes(space: IterationSpace, scheduler: str) -> Refusal | None:
    """No outputs or reductions that run together, but whose sizes are found equal only when run.

    They have loop nests of their own, which must agree when the kernel is compiled.
    """
    program = space.program
    found: dict[SpaceAxis, IntExpr] = {}
    outputs = [output.tensor for output in program.fusion.outputs]
    for tensor in (*outputs, *(expr.outs[0] for expr in reductions_of(program))):
        definition = program.tensor(tensor)
        for axis in (*definition.root, *definition.logical):
            if axis.kind is AxisKind.broadcast:
                continue
            extent = found.setdefault(space.axis_of[axis.name], axis.extent)
            if extent is not axis.extent:
                reason = f"it runs over {axis.extent} where others run over {extent}"
                return Refusal(scheduler, reason, tensor)
    return None


def _why_no_kernel(expr: Expr) -> str:
    name = type(expr).__name__
    if isinstance(expr, MatMul | Linear):
        return f"{name} is a contraction; those run through torch"
    if isinstance(expr, Communication):
        return f"{name} moves data between ranks; no kernel does that"
    return f"{name} has no form inside a kernel yet"


def describe_axes(space: IterationSpace, axes: frozenset[SpaceAxis]) -> str:
    """The sizes of some axes of the space, in the space's order."""
    return f"[{', '.join(str(extent) for axis, extent in space.extents.items() if axis in axes)}]"
