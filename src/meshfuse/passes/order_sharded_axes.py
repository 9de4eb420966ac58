"""Give straight communications the memory they want: contiguous, the axis that moves slowest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import final

from meshfuse.base.trace import Note
from meshfuse.expr import const
from meshfuse.facts.digits import is_one_block
from meshfuse.facts.facts import output_names
from meshfuse.facts.layout import (
    Layout,
    allocation_of,
    contiguous_in,
    is_contiguous,
    layout_of,
    local_bytes,
    without_single,
)
from meshfuse.facts.moved_parts import packing_reason, slices_in_place
from meshfuse.facts.redistribute import COMMUNICATION_NAMES
from meshfuse.facts.sharding import local_extents, sharding_of
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import (
    AllGather,
    AllReduce,
    Communication,
    Exchange,
    LocalSlice,
    ReduceScatter,
)
from meshfuse.ir.ops import Expr, Set
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import with_exprs
from meshfuse.ir.transforms import clear_reductions
from meshfuse.passes.apply_sharding import new_sharded_tensor

STAGE = "order_sharded_axes"

Order = tuple[int, ...]
"""Tensor axes by number, slowest first."""


def order_sharded_axes(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Lay communication buffers out so that the block of each rank is one piece of memory.

    T1 = all_gather(T0, mesh_x, 1), both row-major [m, n], T1 an output
    ->  T2 = set(T0), n slowest;  T3 = all_gather(T2, mesh_x, 1), n slowest;  T1 = set(T3)

    An inner tensor takes the order of the communication that makes it. Parts that are no such piece
    whatever the order are packed from any memory to any. A local slice is a view where it can be:
    it has the strides of what it slices, and a program output gets a copy of it.
    """
    work = _Rewriting(program)
    for expr in program.fusion.exprs:
        match expr:
            case LocalSlice() if slices_in_place(program, expr):
                _lay_out_slice(work, expr)
            case AllGather() | AllReduce() | ReduceScatter() | Exchange():
                _lay_out_collective(work, expr)
            case _:
                work.exprs.append(expr)
    return with_exprs(work.program, work.exprs), tuple(work.notes)


@final
@dataclass(slots=True, eq=False, repr=False)
class _Rewriting:
    """The program with the tensors made so far, and the expressions that replace those seen."""

    program: Program
    exprs: list[Expr] = field(default_factory=list[Expr])
    notes: list[Note] = field(default_factory=list[Note])


def _lay_out_collective(
    work: _Rewriting, expr: AllGather | AllReduce | ReduceScatter | Exchange
) -> None:
    """Straight ones want contiguous buffers, and want the axis they gather or scatter slowest."""
    reason = packing_reason(work.program, expr)
    if reason is not None or isinstance(expr, Exchange):
        larger = expr.src if isinstance(expr, ReduceScatter) else expr.out
        size = str(local_bytes(work.program, larger))
        work.notes.append(Note(STAGE, expr.out, "packed", f"{_kind(expr)}: {reason}", size))
        work.exprs.append(expr)
        return
    order = _wanted_order(work.program, expr)
    if not _lies_in(work.program, expr.src, order):
        expr = replace(expr, src=_copy_source(work, expr, order))
    if _lies_in(work.program, expr.out, order):
        work.exprs.append(expr)
    elif _is_free(work.program, expr.out):
        work.program = _lay_out(work.program, expr.out, order)
        work.exprs.append(expr)
    else:
        work.program, made = _twin(work.program, expr.out)
        work.program = _lay_out(work.program, made, order)
        work.exprs.append(replace(expr, out=made))
        _copy_result(work, expr.out, made, f"{_kind(expr)} writes another memory order")


def _wanted_order(program: Program, expr: AllGather | AllReduce | ReduceScatter) -> Order:
    """The order of the source, the axis moved first unless it is the first of local size > 1."""
    order = layout_of(program, expr.src).order
    if isinstance(expr, AllReduce):
        return order
    sizes = local_extents(program, expr.out if isinstance(expr, AllGather) else expr.src)
    slower = order[: order.index(expr.axis)]
    if all(sizes[place] is const(1) for place in slower):
        return order
    return (expr.axis, *(place for place in order if place != expr.axis))


def _lay_out_slice(work: _Rewriting, expr: LocalSlice) -> None:
    """The result has its source's strides: the next slower axis steps over others' blocks."""
    view = _view_layout(work.program, expr)
    out = expr.out
    if not _is_free(work.program, out):
        work.program, out = _twin(work.program, out)
    if view != layout_of(work.program, out):
        work.program = _allocate(work.program, out, view)
    work.exprs.append(replace(expr, out=out))
    if out != expr.out:
        _copy_result(work, expr.out, out, "a local slice is a view, and this is an output")


def _view_layout(program: Program, expr: LocalSlice) -> Layout:
    layout, sizes = layout_of(program, expr.src), local_extents(program, expr.src)
    flags, place = list(layout.contiguity), layout.order.index(expr.axis)
    digits = sharding_of(program, expr.out).axes[expr.axis]
    if not is_one_block(digits, expr.mesh_axis) and flags[place] is not None:
        flags[place] = False  # the stride steps over what others hold
    for position in reversed(range(place)):
        if flags[position] is not None and sizes[layout.order[position]] is not const(1):
            flags[position] = False
            break
    return Layout(layout.order, tuple(flags))


# Copies.


def _copy_source(work: _Rewriting, expr: Communication, order: Order) -> TensorName:
    work.program, copy = _twin(work.program, expr.src)
    work.program = _lay_out(work.program, copy, order)
    work.exprs.append(Set(copy, expr.src))
    reason = (
        f"{_kind(expr)} {expr.out} reads whole blocks, and {expr.src} has gaps or another order"
    )
    work.notes.append(Note(STAGE, copy, "copy", reason, str(local_bytes(work.program, copy))))
    return copy


def _copy_result(work: _Rewriting, out: TensorName, made: TensorName, reason: str) -> None:
    """Define `out` as a copy of `made`. A copy reduces nothing."""
    work.program = clear_reductions(work.program, out)
    work.exprs.append(Set(out, made))
    work.notes.append(Note(STAGE, out, "copy", reason, str(local_bytes(work.program, out))))


def _twin(program: Program, tensor: TensorName) -> tuple[Program, TensorName]:
    """A tensor placed like `tensor`, tensor axes only."""
    return new_sharded_tensor(program, tensor, sharding_of(program, tensor))


def _lay_out(program: Program, tensor: TensorName, order: Order) -> Program:
    return _allocate(program, tensor, contiguous_in(program, tensor, order))


def _allocate(program: Program, tensor: TensorName, layout: Layout) -> Program:
    allocation = allocation_of(program, tensor, layout)
    return program.with_schedule(tensor, replace(program.schedule(tensor), allocation=allocation))


# Questions.


def _lies_in(program: Program, tensor: TensorName, order: Order) -> bool:
    """Whether the memory of `tensor` is contiguous and in `order`, axes of local size 1 aside."""
    have = layout_of(program, tensor).order
    same = without_single(program, tensor, have) == without_single(program, tensor, order)
    return same and is_contiguous(program, tensor)


def _is_free(program: Program, tensor: TensorName) -> bool:
    """Whether nobody asked for a layout; outputs are row-major unless the user said otherwise."""
    return program.schedule(tensor).allocation is None and tensor not in output_names(program)


def _kind(expr: Communication) -> str:
    return COMMUNICATION_NAMES[type(expr)]
