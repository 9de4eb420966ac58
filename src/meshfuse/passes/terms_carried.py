"""Which expressions work on each rank's term of a reduction by itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch

from meshfuse.base.dtypes import is_floating
from meshfuse.facts.axis_map import axis_pairs
from meshfuse.facts.sharding import MOMENTS, axis_digits, owners_of, sharding_of
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.infer import is_tensor
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.ir.ops import (
    Broadcast,
    Cast,
    Expr,
    Permute,
    Pointwise,
    Reduction,
    Set,
    Squeeze,
)
from meshfuse.ir.ops_indexing import Slice
from meshfuse.ir.program import Program
from meshfuse.ir.terms import Terms
from meshfuse.passes.fold_casts import holds


@singledispatch
def term_operands(expr: Expr, program: Program, function: str) -> tuple[tuple[int, ...], ...]:
    """The sets of operands of which terms give terms of the result, reduced by `function`.

    neg: ((0,),)     add: ((0, 1),)     mul of two tensors: ((0,), (1,))     exp: ()

    For each set, the other operands are the same on all ranks that have terms. Equal for integers;
    for floats the order of additions changes, and no type narrows before the reduction.
    """
    return ()


@term_operands.register(Set)
@term_operands.register(Broadcast)
@term_operands.register(Permute)
@term_operands.register(Squeeze)
@term_operands.register(Slice)
def _(
    expr: Set | Broadcast | Permute | Squeeze | Slice, program: Program, function: str
) -> tuple[tuple[int, ...], ...]:
    """Elements stay what they are."""
    return ((0,),)


@term_operands.register
def _(expr: Cast, program: Program, function: str) -> tuple[tuple[int, ...], ...]:
    """To a type that holds all values of the operand's: sums in that type lose less."""
    had, has = program.tensor(expr.src).dtype, program.tensor(expr.out).dtype
    alike = function != "sum" or is_floating(had) is is_floating(has)
    return ((0,),) if holds(had, has) and alike else ()


@term_operands.register
def _(expr: Reduction, program: Program, function: str) -> tuple[tuple[int, ...], ...]:
    """A sum over other axes, of sums."""
    return ((0,),) if expr.function == function else ()


@term_operands.register
def _(expr: Pointwise, program: Program, function: str) -> tuple[tuple[int, ...], ...]:
    if function != "sum" or not _keeps_type(program, expr):
        return ()
    tensors = tuple(k for k, operand in enumerate(expr.args) if is_tensor(program, operand))
    match expr.function:
        case "neg":
            return (tensors,)
        case "add" | "sub":
            return (tensors,) if len(tensors) == 2 else ()
        case "mul":
            return tuple((position,) for position in tensors)
        case _:
            return ()


def _keeps_type(program: Program, expr: Pointwise) -> bool:
    """Whether the result holds what each tensor operand holds, so that nothing narrows."""
    out = program.tensor(TensorName(expr.out)).dtype
    tensors = (TensorName(str(arg)) for arg in expr.args if is_tensor(program, arg))
    return all(
        holds(program.tensor(tensor).dtype, out)
        and is_floating(program.tensor(tensor).dtype) is is_floating(out)
        for tensor in tensors
    )


# What a program says.


def carried_terms(
    program: Program, expr: Expr, out: TensorName, mesh: DeviceMesh
) -> dict[ParallelType, str]:
    """The mesh axes along which the result is partial because operands are, with the reduction.

    Such an axis of the result is none that an operand's axis becomes.
    """
    axes = program.tensor(out).maybe_root
    if all(axis.kind is not AxisKind.partial for axis in axes):
        return {}
    pairs: Mapping[int, tuple[int | None, ...]] = axis_pairs(expr, program)
    reached = {place for places in pairs.values() for place in places}
    waiting = [
        axis
        for place, axis in enumerate(axes)
        if axis.kind is AxisKind.partial and place not in reached
    ]
    digits = axis_digits(program, out)
    functions = sharding_of(program, out).partial
    owners = [owner for axis in waiting for owner in owners_of(digits[axis.name], mesh)]
    return {owner: functions[owner] for owner in owners}


def needed_terms(
    program: Program, expr: Expr, position: int, mesh: DeviceMesh
) -> dict[ParallelType, str]:
    """The mesh axes along which the operand at `position` is to be partial, with the reduction."""
    if isinstance(expr, Terms):
        return dict.fromkeys(sharding_of(program, expr.src).partial, MOMENTS)
    found: dict[ParallelType, str] = {}
    out = TensorName(expr.outs[0])
    for owner, function in carried_terms(program, expr, out, mesh).items():
        if position in _operands_with_terms(program, expr, owner, function):
            found[owner] = function
    return found


def _operands_with_terms(
    program: Program, expr: Expr, owner: ParallelType, function: str
) -> tuple[int, ...]:
    """The set of operands that has terms: the first that has, by what they are, else the first."""
    sets = term_operands(expr, program, function)
    for positions in sets:
        operands = [TensorName(str(expr.ins[position])) for position in positions]
        if all(owner in sharding_of(program, operand).partial for operand in operands):
            return positions
    return sets[0] if sets else ()
