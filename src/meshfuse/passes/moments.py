"""Statistics over an axis that ranks share: the moments of each rank's part, combined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshfuse.base.errors import InvariantError
from meshfuse.expr import const
from meshfuse.facts.holdings import is_even
from meshfuse.facts.sharding import Digit, Sharding, axis_digits, sharding_of
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.ops import Welford
from meshfuse.ir.program import Program
from meshfuse.ir.replay import without_reductions
from meshfuse.ir.rewrite import add_tensor, fresh_axes
from meshfuse.ir.terms import Terms
from meshfuse.passes.apply_sharding import place_tensor


def combine_parts(
    program: Program, expr: Welford, parts: Sequence[TensorName]
) -> tuple[Program, tuple[Terms, ...], Welford]:
    """What makes the outputs of `expr` of the moments that each rank has of its part.

    T1, T2, T3 = welford(T0, [1]), axis 1 of T0 split over mesh_x; parts T4, T5, T6
    ->  T7 = terms(T4, 2) [m, mesh_x{2}];  ...;  T1, T2, T3 = welford(T7, [1], T8, T9)

    The outputs keep their tensor axes, with schedule, and reduce the terms alone. Parts may be of
    different sizes, or empty: then their count is 0. Where they are known to be even all ranks
    count alike, and T9 is whole as it is made: only means and m2 are to be gathered.
    """
    mean, m2, count = parts
    program, means = _side_by_side(program, mean)
    program, m2s = _side_by_side(program, m2)
    program, counts = _side_by_side(program, count, are_equal=_are_even(program, count))
    for out in expr.outs:
        program = _reducing_terms(program, out, means.count)
    axes = (program.tensor(mean).ndim,)
    combining = replace(expr, src=means.out, axes=axes, src_m2=m2s.out, src_count=counts.out)
    return program, (means, m2s, counts), combining


def _are_even(program: Program, part: TensorName) -> bool:
    """Whether ranks are known to hold equally many of the elements that `part` reduces."""
    digits = axis_digits(program, part)
    return all(
        axis.kind.is_tensor_axis or is_even(digits[axis.name], axis.extent)
        for axis in program.tensor(part).maybe_root
    )


def _side_by_side(
    program: Program, part: TensorName, are_equal: bool = False
) -> tuple[Program, Terms]:
    """The terms of all ranks; those that are equal are on each."""
    lying = sharding_of(program, part)
    if lying.mesh is None:
        raise InvariantError(f"{part} is partial without a mesh")
    sizes = {owner: lying.mesh.axis_size(owner) for owner in lying.partial}
    count = math.prod(sizes.values())
    digits = tuple(Digit(const(size), owner) for owner, size in sizes.items())
    if are_equal:
        digits = (Digit(const(count)),)
    definition = program.tensor(part)
    kept = [(axis.kind, axis.extent) for axis in definition.tensor_axes]
    program, axes = fresh_axes(program, [*kept, (AxisKind.iteration, const(count))])
    sharding = Sharding(lying.mesh, (*lying.axes, digits))
    program, out = place_tensor(program, TensorDef(definition.dtype, axes), sharding, {})
    return program, Terms(out, part, count)


def _reducing_terms(program: Program, out: TensorName, count: int) -> Program:
    """`out` without the axes that it reduced, and with one of `count` terms, which it reduces."""
    program = without_reductions(program, out)
    program, (axis,) = fresh_axes(program, [(AxisKind.reduction, const(count))])
    definition, schedule = program.tensor(out), program.schedule(out)
    return add_tensor(
        program,
        out,
        replace(definition, logical=(*definition.logical, axis)),
        replace(schedule, leaves=(*schedule.leaves, axis.name)),
    )
