"""rfactor: take a reduction apart, so that its parts can be spread in different ways.

    T1 [i, r{12}] = sum(T0, [1]), its reduced axis split into r{3} and r{4}
    rfactor(T1, [2])  ->  T2 [i, i{3}, r{4}] = sum(T0, [1]);  T1 [i, r{3}] = sum(T2, [1])

The consumer keeps its name, its kept axes and the loops of what it still reduces (law 4). The
producer speaks of the operand by root axes, from which the steps that cut the reduced axis lead to
its logical ones. Named after Suriana, Adams and Kamil, Parallel associative reductions in Halide
(2017).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from meshfuse.base.errors import UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.orders import wrap_dims
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, TensorName
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import Expr, Linear, MatMul, Reduction, Welford
from meshfuse.ir.program import Program
from meshfuse.ir.replay import clone_tensor, self_replay
from meshfuse.ir.rewrite import Name, add_tensor, map_names, replace_expr
from meshfuse.ir.schedule import (
    Allocation,
    Schedule,
    Step,
    Swizzle1d,
    step_results,
    step_sources,
    steps_above,
)

Reducing = Reduction | Welford | MatMul | Linear


def rfactor(
    program: Program, tensor: TensorName, axes: Sequence[int]
) -> tuple[Program, tuple[TensorName, ...]]:
    """Reduce loop axes `axes` of `tensor` in new tensors, and the other reduced axes in `tensor`.

    Returns the new tensors, one per output of the defining expression and in their order: outputs
    that are defined together are scheduled as `tensor` is and taken apart together. Both sides keep
    mesh and bindings; where a mesh axis is bound to a kept and to a reduced axis (reduce-scatter),
    the new tensor has it on the axis that was reduced alone.

    Raises UserError for axes that are not reduced, for taking all of them, for a tensor that is no
    reduction or contraction, is taken apart already, or is inlined, and for outputs defined
    together of which another one is scheduled otherwise.
    """
    call = f"rfactor({tensor}, {list(axes)})"
    expr = _reducing_expr(program, tensor, call)
    outs = tuple(TensorName(out) for out in expr.outs)
    _cut_of(program, tensor, axes, call)
    for out in outs:
        program = self_replay(program, tensor, out)
    producers: list[TensorName] = []
    for out in outs:
        program, producer = _take_apart(program, out, _cut_of(program, out, axes, call))
        producers.append(producer)
    renamed: dict[Name, Name] = dict(zip(outs, producers, strict=True))
    parts = map_names(expr, renamed)
    whole = _combining(program, expr, producers, outs)
    return replace_expr(program, expr, [parts, whole]), tuple(producers)


def _reducing_expr(program: Program, tensor: TensorName, call: str) -> Reducing:
    expr = program.fusion.definition(tensor)
    if not isinstance(expr, Reducing):
        how = "an input" if expr is None else f"defined by {type(expr).__name__}"
        raise UserError(
            f"{call}: {tensor} is {how}; reductions, welford, matmul and linear can be taken apart"
        )
    if isinstance(expr, Linear) and expr.bias is not None:
        raise UserError(
            f"{call}: {tensor} has a bias, which is to be added once, after the sum; write "
            "add(linear(x, weight), bias) and take the linear apart"
        )
    if program.tensor(tensor).root:
        raise UserError(
            f"{call}: {tensor} is the inner part of a reduction that was taken apart already"
        )
    if program.schedule(tensor).inline_depth:
        raise UserError(f"{call}: {tensor} is inlined; rfactor before inlining")
    return expr


def is_part(program: Program, expr: Expr) -> bool:
    """Whether `expr` reduces some of the axes that its root names as reduced, on one device."""
    if not isinstance(expr, Reducing):
        return False
    definition = program.tensor(TensorName(expr.outs[0]))
    kinds = [axis.kind for axis in definition.logical]
    return bool(definition.root) and AxisKind.partial not in kinds


@final
@frozen_dataclass
class _Cut:
    """What of a tensor's schedule goes to the producer's side.

    `taken`: the leaves that the producer reduces. `steps`: how they derive, which becomes part of
    the producer's definition. `rest`: the other steps. `frontier`: the logical axes after `steps`.
    """

    taken: tuple[AxisName, ...]
    steps: tuple[Step, ...]
    rest: tuple[Step, ...]
    frontier: tuple[AxisName, ...]


def _cut_of(program: Program, tensor: TensorName, axes: Sequence[int], call: str) -> _Cut:
    domains, schedule = program.leaf_domains(tensor), program.schedule(tensor)
    dims = wrap_dims(axes, len(domains), call)
    reduced = [axis for axis in domains if axis.kind is AxisKind.reduction]
    taken = tuple(domains[dim].name for dim in dims)
    for dim in dims:
        if domains[dim] not in reduced:
            named = ", ".join(map(str, reduced))
            raise UserError(f"{call}: axis {domains[dim]} is not reduced; [{named}] are")
    if not taken or len(taken) == len(reduced):
        raise UserError(
            f"{call}: takes {len(taken)} of the {len(reduced)} reduced axes of {tensor}; at least "
            "one must be taken and at least one must stay, so split the axis first"
        )
    steps = steps_above(schedule.steps, taken)
    if any(isinstance(step, Swizzle1d) for step in steps):
        raise UserError(f"{call}: an axis above is swizzled; rfactor first")
    return _Cut(
        taken,
        steps,
        tuple(step for step in schedule.steps if step not in steps),
        _frontier([axis.name for axis in program.tensor(tensor).logical], steps),
    )


def _frontier(axes: Sequence[AxisName], steps: Sequence[Step]) -> tuple[AxisName, ...]:
    """The axes after `steps`, each in the place of the first one that it was made of."""
    frontier = list(axes)
    for step in steps:
        first, *others = step_sources(step)
        place = frontier.index(first)
        frontier[place : place + 1] = step_results(step)
        for other in others:
            frontier.remove(other)
    return tuple(frontier)


def _take_apart(program: Program, tensor: TensorName, cut: _Cut) -> tuple[Program, TensorName]:
    """Make the producer, and leave to `tensor` what it still reduces."""
    axes, schedule = program.all_axes(tensor), program.schedule(tensor)
    program, producer, renamed = clone_tensor(program, tensor)
    turned = [
        axis
        for axis in cut.frontier
        if axes[axis].kind is AxisKind.reduction and axis not in cut.taken
    ]
    program = _define_producer(program, producer, cut, turned, axes, renamed)
    definition = replace(
        program.tensor(tensor),
        logical=tuple(axes[axis] for axis in cut.frontier if axis not in cut.taken),
    )
    remaining = replace(
        schedule,
        steps=cut.rest,
        leaves=tuple(leaf for leaf in schedule.leaves if leaf not in cut.taken),
        bindings={leaf: b for leaf, b in schedule.bindings.items() if leaf not in cut.taken},
    )
    return add_tensor(program, tensor, definition, remaining), producer


def _define_producer(
    program: Program,
    producer: TensorName,
    cut: _Cut,
    turned: Sequence[AxisName],
    axes: Mapping[AxisName, IterDomain],
    renamed: Mapping[AxisName, AxisName],
) -> Program:
    """Turn a clone into the producer: `turned` axes are reduced no more."""
    clone, schedule = program.tensor(producer), program.schedule(producer)
    cut_results = {renamed[made] for step in cut.steps for made in step_results(step)}
    steps = tuple(step for step in schedule.steps if step_results(step)[0] in cut_results)
    logical = tuple(
        replace(axes[axis], name=renamed[axis], kind=AxisKind.iteration)
        if axis in turned
        else replace(axes[axis], name=renamed[axis])
        for axis in cut.frontier
    )
    new = [renamed[axis] for axis in turned]
    definition = replace(clone, root=clone.logical, root_steps=steps, logical=logical)
    scheduled = Schedule(
        schedule.leaves,
        tuple(step for step in schedule.steps if step not in steps),
        _bindings_without_doubles(program, producer, new),
        schedule.mesh,
        _extended_allocation(definition, schedule.allocation, new),
    )
    return add_tensor(program, producer, definition, scheduled)


def _bindings_without_doubles(
    program: Program, producer: TensorName, turned: Sequence[AxisName]
) -> dict[AxisName, ParallelType]:
    """The clone's bindings, less those of kept axes to a mesh axis that a `turned` axis has.

    Ranks that each reduce a part hold all of the result: its kept axes are whole along that axis.
    """
    schedule, axes = program.schedule(producer), program.all_axes(producer)
    over_turned = {
        bound
        for leaf, bound in schedule.bindings.items()
        if bound.is_mesh and _derives_from(schedule, leaf, turned)
    }
    return {
        leaf: bound
        for leaf, bound in schedule.bindings.items()
        if bound not in over_turned or not axes[leaf].kind.is_tensor_axis
    }


def _derives_from(schedule: Schedule, leaf: AxisName, axes: Sequence[AxisName]) -> bool:
    above = steps_above(schedule.steps, [leaf])
    return leaf in axes or any(axis in step_sources(step) for step in above for axis in axes)


def _extended_allocation(
    definition: TensorDef, allocation: Allocation | None, turned: Sequence[AxisName]
) -> Allocation | None:
    """The clone's memory order without gaps, with the `turned` axes innermost."""
    if allocation is None:
        return None
    kinds = {axis.name: axis.kind for axis in definition.tensor_axes}
    order = (*allocation.order, *turned)
    flags = (None if kinds[axis] is AxisKind.broadcast else True for axis in order)
    return Allocation(order, tuple(flags))


def _combining(
    program: Program, expr: Reducing, producers: Sequence[TensorName], outs: Sequence[TensorName]
) -> Expr:
    """What brings the producers' parts together in the tensors that keep the old names."""
    axes = tuple(
        place
        for place, axis in enumerate(program.tensor(outs[0]).logical)
        if axis.kind is AxisKind.reduction
    )
    match expr:
        case Welford():
            mean, m2, count = outs
            return Welford(mean, m2, count, producers[0], axes, producers[1], producers[2])
        case Reduction():
            return Reduction(outs[0], expr.function, producers[0], axes)
        case MatMul() | Linear():
            return Reduction(outs[0], "sum", producers[0], axes)
