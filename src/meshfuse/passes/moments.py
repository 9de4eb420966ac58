"""Statistics over an axis that ranks share: the moments of each rank's part, combined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshfuse.base.errors import InvariantError
from meshfuse.expr import const
from meshfuse.facts.sharding import Digit, Sharding, sharding_of
from meshfuse.ir.axes import AxisKind, IterDomain, TensorName
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.ops import Welford
from meshfuse.ir.program import Program
from meshfuse.ir.replay import without_reductions
from meshfuse.ir.rewrite import add_tensor, fresh_axes
from meshfuse.ir.terms import Terms
from meshfuse.passes.apply_sharding import place_tensor


def combine_moments(
    program: Program, expr: Welford, parts: Sequence[TensorName]
) -> tuple[Program, tuple[Terms, ...], Welford]:
    """What makes the outputs of `expr` of the moments that each rank has of its part.

    T1, T2, T3 = welford(T0, [1]), axis 1 of T0 split over mesh_x; parts T4, T5, T6
    ->  T7 = terms(T4, 2) [m, mesh_x{2}];  ...;  T1, T2, T3 = welford(T7, [1], T8, T9)

    The outputs keep their tensor axes, with schedule, and reduce the terms alone. Parts may be of
    different sizes, or empty: then their count is 0.
    """
    stacked: list[TensorName] = []
    terms: list[Terms] = []
    for part in parts:
        program, made = _side_by_side(program, part)
        stacked.append(made.out)
        terms.append(made)
    for out in expr.outs:
        program = _reducing_terms(program, out, terms[0].count)
    axis = program.tensor(parts[0]).ndim
    mean, m2, count = stacked
    return program, tuple(terms), replace(expr, src=mean, axes=(axis,), src_m2=m2, src_count=count)


def _side_by_side(program: Program, part: TensorName) -> tuple[Program, Terms]:
    lying = sharding_of(program, part)
    if lying.mesh is None:
        raise InvariantError(f"{part} is partial without a mesh")
    sizes = {owner: lying.mesh.axis_size(owner) for owner in lying.partial}
    count = math.prod(sizes.values())
    digits = tuple(Digit(const(size), owner) for owner, size in sizes.items())
    definition = program.tensor(part)
    kept = [(axis.kind, axis.extent) for axis in definition.tensor_axes]
    program, axes = fresh_axes(program, [*kept, (AxisKind.iteration, const(count))])
    sharding = Sharding(lying.mesh, (*lying.axes, digits))
    program, out = place_tensor(program, TensorDef(definition.dtype, axes), sharding, {})
    return program, Terms(out, part, count)


def _reducing_terms(program: Program, out: TensorName, count: int) -> Program:
    """`out` without the axes that it reduced, and with one of `count` terms, which it reduces."""
    program = without_reductions(program, out)
    program, [(axis)] = fresh_axes(program, [(AxisKind.reduction, const(count))])
    definition, schedule = program.tensor(out), program.schedule(out)
    logical: tuple[IterDomain, ...] = (*definition.logical, axis)
    return add_tensor(
        program,
        out,
        replace(definition, logical=logical),
        replace(schedule, leaves=(*schedule.leaves, axis.name)),
    )
