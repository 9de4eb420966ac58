"""Reductions that cross ranks: reduced leaves that take the shardings of the operands."""

from __future__ import annotations

from collections.abc import Sequence

from meshfuse.expr import const
from meshfuse.facts.digits import Digits, gathered_from, is_whole
from meshfuse.facts.sharding import axis_digits, canonical, mesh_axes_on
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import Expr
from meshfuse.ir.program import Program
from meshfuse.passes.apply_sharding import is_free_leaf, shard_leaf
from meshfuse.passes.sharding_rules import carried_axes


def bind_reduced(program: Program, expr: Expr, out: TensorName, order: Sequence[int]) -> Program:
    """Bind the reduced leaves on which the operands are sharded: that reduction crosses ranks.

    T2 = linear(T0, T1), both split over mesh_x on k  ->  k of T2 is split alike

    Only where no operand has to move for it: each has the mesh axis on this axis, or not at all. If
    `out` has it on a kept axis already, each must have it on this one.
    """
    mesh = program.schedule(out).mesh
    maps = {position: carried_axes(program, expr, position, out) for position in order}
    for axis in program.tensor(out).logical:
        if axis.kind is not AxisKind.reduction or not is_free_leaf(program, out, axis.name):
            continue
        if axis.extent is const(1):
            continue  # One element is not shared.
        offers: list[tuple[TensorName, Digits]] = []
        for position in order:
            source = TensorName(str(expr.ins[position]))
            inverse = {image: name for name, image in maps[position].items()}
            if axis.name in inverse and program.schedule(source).mesh == mesh:
                offers.append((source, axis_digits(program, source)[inverse[axis.name]]))
        digits = next((d for _, d in offers if not is_whole(d)), None)
        if mesh is None or digits is None:
            continue
        unfit = [d.owner for d in digits if d.owner and not _fits(program, out, d.owner, offers)]
        digits = gathered_from(digits, unfit)
        if not is_whole(digits):
            digits = canonical(digits, axis.extent, None)
            program = shard_leaf(program, out, axis.name, digits)
    return program


def _fits(
    program: Program,
    out: TensorName,
    mesh_axis: ParallelType,
    offers: Sequence[tuple[TensorName, Digits]],
) -> bool:
    """Whether a reduced axis of `out` may cross the ranks of `mesh_axis`."""
    if mesh_axis in mesh_axes_on(program, out, AxisKind.reduction):
        return False
    scatters = mesh_axis in mesh_axes_on(program, out, AxisKind.iteration, AxisKind.broadcast)
    if scatters and not _is_innermost(program, out, mesh_axis):
        return False  # Its terms would be strided over the mesh axes below.
    for source, digits in offers:
        here = any(digit.owner == mesh_axis for digit in digits)
        used = mesh_axis in mesh_axes_on(program, source, AxisKind.iteration, AxisKind.broadcast)
        if not here and (used or scatters):
            return False
    return True


def _is_innermost(program: Program, tensor: TensorName, mesh_axis: ParallelType) -> bool:
    """Whether no mesh axis cuts the blocks that `mesh_axis` makes of a tensor axis."""
    digits = axis_digits(program, tensor)
    for axis in program.tensor(tensor).tensor_axes:
        owners = [digit.owner for digit in digits[axis.name] if digit.owner]
        if mesh_axis in owners:
            return owners[-1] == mesh_axis
    return True
