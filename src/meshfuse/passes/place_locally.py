"""Programs that one kernel computes on every rank: all that an expression needs must lie there."""

from __future__ import annotations

from meshfuse.base.errors import ScheduleError, UserError
from meshfuse.facts.facts import tensor_outputs
from meshfuse.facts.sharding import describe, sharding_of
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import Expr
from meshfuse.ir.printer import print_expr
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Swizzle1d
from meshfuse.passes.placement import is_local
from meshfuse.passes.propagate_sharding import propagate_sharding


def place_locally(program: Program) -> Program:
    """Place the tensors that their user did not place like what they are made of.

    Raises UserError for an expression that would have to read what other ranks hold, ScheduleError
    for a loop of the host.
    """
    for tensor in program.fusion.tensors:
        _check_host_loops(program, tensor)
    if all(schedule.mesh is None for schedule in program.schedules.values()):
        return program
    program, _ = propagate_sharding(program)
    for expr in program.fusion.exprs:
        _check_local(program, expr)
    return program


def _check_host_loops(program: Program, tensor: TensorName) -> None:
    schedule = program.schedule(tensor)
    loops = [leaf for leaf, bound in schedule.bindings.items() if bound == ParallelType.stream]
    loops += [step.out for step in schedule.steps if isinstance(step, Swizzle1d)]
    for leaf in loops:
        raise ScheduleError(
            "host-loop",
            tensor,
            leaf,
            "a stream or swizzled axis is a loop of the host, and a kernel is inside it",
            "Leave it serial, or bind it to grid, block, vectorize or unroll.",
        )


def _check_local(program: Program, expr: Expr) -> None:
    outs = tensor_outputs(program, expr)
    mesh = program.schedule(outs[0]).mesh if outs else None
    if mesh is None or is_local(program, expr, mesh):
        return
    lying = ", ".join(f"{out} as {describe(sharding_of(program, out))}" for out in outs)
    raise UserError(
        f"{print_expr(expr)}: one kernel cannot compute this on every rank: {lying} needs parts of "
        "the operands that other ranks hold. Place it like its operands before splitting it for "
        "the kernel, or let execute() schedule the program"
    )
