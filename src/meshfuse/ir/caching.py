"""Copies before and after a tensor: in a kernel, registers between memory and arithmetic."""

from __future__ import annotations

from dataclasses import replace

from meshfuse.base.errors import UserError
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Set
from meshfuse.ir.program import Program
from meshfuse.ir.replay import clone_tensor, without_reductions
from meshfuse.ir.rewrite import copy_tensor, map_names, redirect_uses, with_exprs
from meshfuse.ir.schedule import Allocation, MemoryType


def cache_after(
    program: Program, tensor: TensorName, *, propagate_allocation: bool = True
) -> tuple[Program, TensorName]:
    """Let the readers of `tensor` read a copy of it, which is scheduled alike and kept local.

    T1 = exp(T0)   ->   T2 = set(T0);  T1 = exp(T2)

    Returns the copy. Raises UserError for a tensor that nothing reads.
    """
    readers = [expr for expr in program.fusion.exprs if tensor in expr.ins]
    if not readers:
        raise UserError(f"cache_after({tensor}): nothing reads {tensor}; cache_before copies into")
    old = program.schedule(tensor)
    program, copy = copy_tensor(program, tensor)
    schedule = replace(program.schedule(copy), memory=MemoryType.local)
    if propagate_allocation and old.allocation is not None:
        axes = (program.tensor(name).tensor_axes for name in (tensor, copy))
        renamed = {mine.name: theirs.name for mine, theirs in zip(*axes, strict=True)}
        order = tuple(renamed[axis] for axis in old.allocation.order)
        schedule = replace(schedule, allocation=Allocation(order, old.allocation.contiguity))
    program = program.with_schedule(copy, schedule)
    program = redirect_uses(program, tensor, copy, readers)
    exprs = list(program.fusion.exprs)
    first = next(place for place, expr in enumerate(exprs) if copy in expr.ins)
    return with_exprs(program, [*exprs[:first], Set(copy, tensor), *exprs[first:]]), copy


def cache_before(program: Program, tensor: TensorName) -> tuple[Program, TensorName]:
    """Compute `tensor` in a new local tensor, scheduled alike, of which it becomes a copy.

    T1 = sum(T0, [1])   ->   T2 = sum(T0, [1]);  T1 = set(T2)

    `tensor` keeps its name, its readers and the loops of its tensor axes. Returns the new tensor.
    Raises UserError for an input.
    """
    expr = program.fusion.definition(tensor)
    if expr is None:
        raise UserError(
            f"cache_before({tensor}): {tensor} is an input; cache_after copies out of it"
        )
    program, made, _ = clone_tensor(program, tensor)
    schedule = replace(program.schedule(made), memory=MemoryType.local)
    program = without_reductions(program.with_schedule(made, schedule), tensor)
    exprs = list(program.fusion.exprs)
    place = exprs.index(expr)
    exprs[place : place + 1] = [map_names(expr, {tensor: made}), Set(tensor, made)]
    return with_exprs(program, exprs), made
