"""Carry the schedule of one tensor to others: splits and merges, bindings, inlining.

Axes correspond where an expression maps one to the other (iteration_space.py), through any number
of expressions and both ways; loops correspond where they derive alike from corresponding axes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from meshfuse.base.errors import UserError
from meshfuse.facts.facts import Facts, facts_of, tensor_operands, tensor_outputs
from meshfuse.ir.axes import AxisKind, AxisName, TensorName
from meshfuse.ir.loop_nests import set_inline_depth
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import rename_axes
from meshfuse.ir.schedule import Step, step_results, steps_above
from meshfuse.schedulers.iteration_space import IterationSpace, SpaceAxis, iteration_space
from meshfuse.schedulers.loop_plan import AxisNamer, Follower, LoopPlan, follower

_LANES = (
    ParallelType.block_x,
    ParallelType.block_y,
    ParallelType.block_z,
    ParallelType.vectorize,
    ParallelType.unroll,
)
"""Iterations that one program does at once."""


# Splits and merges.


def transform_like(
    program: Program,
    reference: TensorName,
    targets: Sequence[TensorName] = (),
    position: int | None = None,
) -> Program:
    """Split, merge and order the loops of `targets` (by default all tensors) like `reference`'s.

    With `position`, only as far as the first loops need it. What a tensor has split or merged
    otherwise, bound or inlined stays as it is (law 4). Loops that `reference` has not stand behind
    its own, but outside its lanes.
    """
    space = iteration_space(program)
    plan, shared = _plan_of(program, space, reference, position)
    for target in targets or program.fusion.tensors:
        if target != reference:
            namer = AxisNamer(program.serials.get("a", 0))
            followed = _follow(program, space, target, plan, shared, namer)
            program = program.with_schedule(target, followed.schedule)
            serials = {**program.serials, "a": namer.following}
            program = replace(program, serials=serials)
    return program


def bounded_transform_backward(
    program: Program,
    reference: TensorName,
    position: int,
    bounds: Sequence[TensorName],
    *,
    parallel_types: bool = False,
) -> Program:
    """Schedule what `reference` is computed from, back to the tensors `bounds`, like `reference`.

    With `parallel_types` the first `position` loops are bound alike, too. Raises UserError for a
    bound that `reference` is not computed from.
    """
    targets = _between(program, reference, bounds)
    depth = _position(program, reference, position, "bounded_transform_backward")
    program = transform_like(program, reference, targets, depth)
    return parallelize_like(program, reference, depth, targets) if parallel_types else program


def _between(
    program: Program, reference: TensorName, bounds: Sequence[TensorName]
) -> list[TensorName]:
    """The tensors on the ways from `bounds` to `reference`, without it."""
    on_way: dict[TensorName, None] = dict.fromkeys(bounds)
    for expr in program.fusion.exprs:
        if any(operand in on_way for operand in tensor_operands(program, expr)):
            on_way.update(dict.fromkeys(tensor_outputs(program, expr)))
    behind = {reference}
    for expr in reversed(program.fusion.exprs):
        if behind.intersection(tensor_outputs(program, expr)):
            behind.update(tensor_operands(program, expr))
    for bound in bounds:
        if bound not in behind or bound == reference:
            raise UserError(
                f"bounded_transform_backward({reference}, to={', '.join(bounds)}): {reference} is "
                f"not computed from {bound}"
            )
    return [tensor for tensor in on_way if tensor in behind and tensor != reference]


# Bindings.


def parallelize_like(
    program: Program,
    reference: TensorName,
    position: int = -1,
    targets: Sequence[TensorName] = (),
    types: Collection[ParallelType] = (),
) -> Program:
    """Bind the loops of `targets` as the first `position` loops of `reference` are bound.

    -1 is all of them. By default the targets are all tensors but inputs, and all types count. What
    is bound already stays.
    """
    depth = _position(program, reference, position, "parallelize_like")
    space, schedule = iteration_space(program), program.schedule(reference)
    plan, shared = _plan_of(program, space, reference)
    bindings = {
        leaf: schedule.binding(leaf)
        for leaf in schedule.leaves[:depth]
        if leaf in schedule.bindings and (not types or schedule.binding(leaf) in types)
    }
    inputs = program.fusion.inputs
    for target in targets or [t for t in program.fusion.tensors if t not in inputs]:
        if target != reference:
            followed = _follow(program, space, target, plan, shared)
            program = _bind(program, target, followed.found, bindings)
    return program


def _bind(
    program: Program,
    target: TensorName,
    found: Mapping[AxisName, AxisName],
    bindings: Mapping[AxisName, ParallelType],
) -> Program:
    schedule, axes = program.schedule(target), program.all_axes(target)
    bound = dict(schedule.bindings)
    for leaf, parallel_type in bindings.items():
        own = found.get(leaf)
        if own is None or own not in schedule.leaves or own in bound:
            continue
        once = parallel_type.is_mesh or parallel_type == ParallelType.stream
        kept = axes[own].kind.is_tensor_axis
        alike = [other for other in bound if axes[other].kind.is_tensor_axis == kept]
        if not once or all(bound[other] != parallel_type for other in alike):
            bound[own] = parallel_type
    return program.with_schedule(target, replace(schedule, bindings=bound))


# Inlining.


def inline_most(program: Program, targets: Sequence[TensorName] = ()) -> Program:
    """Let each of `targets` (by default all but inputs) share as many loops as its readers allow.

    A loop is shared where all readers have it at the same place, it is not reduced in the tensor,
    and its iterations are no lanes.
    """
    space = iteration_space(program)
    for target in _inlinable(program, targets):
        depth = _deepest(program, space, facts_of(program), target)
        program = set_inline_depth(program, target, depth)
    return program


def inline_at(
    program: Program,
    reference: TensorName,
    position: int = -1,
    targets: Sequence[TensorName] = (),
    *,
    best_effort: bool = False,
) -> Program:
    """Share those loops of `targets` that are among the first `position` ones of `reference`.

    Raises UserError for a loop that cannot be shared; with `best_effort` the loops outside it are.
    """
    wanted = _position(program, reference, position, "inline_at")
    space, facts = iteration_space(program), facts_of(program)
    plan, shared = _plan_of(program, space, reference)
    shown = program.schedule(reference).leaves[:wanted]
    for target in _inlinable(program, targets):
        found = _follow(program, space, target, plan, shared).found
        theirs = {found.get(leaf) for leaf in shown}
        leaves = program.schedule(target).leaves
        depth = next((k for k, leaf in enumerate(leaves) if leaf not in theirs), len(leaves))
        deepest = _deepest(program, space, facts, target)
        if depth > deepest and not best_effort and target in facts.uses:
            raise UserError(
                f"inline_at({reference}, pos={position}): {target} cannot share loop "
                f"{program.leaf_domains(target)[deepest]} with its readers; schedule them alike, "
                "or pass best_effort=True"
            )
        program = set_inline_depth(program, target, min(depth, deepest))
    return program


def _inlinable(program: Program, targets: Sequence[TensorName]) -> list[TensorName]:
    return [t for t in targets or program.fusion.tensors if t not in program.fusion.inputs]


def _deepest(program: Program, space: IterationSpace, facts: Facts, target: TensorName) -> int:
    """The number of outer loops that a tensor can share with all its readers."""
    schedule, axes = program.schedule(target), program.all_axes(target)
    plan, shared = _plan_of(program, space, target)
    depth = len(schedule.leaves) if facts.uses.get(target) else 0
    for place, leaf in enumerate(schedule.leaves[:depth]):
        if not axes[leaf].kind.is_tensor_axis or schedule.binding(leaf) in _LANES:
            depth = place
            break
    readers = (out for e in facts.uses.get(target, ()) for out in tensor_outputs(program, e))
    for reader in dict.fromkeys(readers):
        found = _follow(program, space, reader, plan, shared).found
        theirs = program.schedule(reader).leaves
        pairs = zip(schedule.leaves[:depth], theirs, strict=False)
        alike = [found.get(mine) == other for mine, other in pairs]
        depth = next((k for k, same in enumerate(alike) if not same), len(alike))
    return depth


# Plans of a tensor's own loops.


def _plan_of(
    program: Program,
    space: IterationSpace,
    reference: TensorName,
    position: int | None = None,
) -> tuple[LoopPlan, Mapping[SpaceAxis, AxisName]]:
    """The loops of a tensor as a plan in its own axis names, and what those are in the space."""
    definition, schedule = program.tensor(reference), program.schedule(reference)
    shared = _space_axes(program, space, reference)
    behind = _steps_behind(program, space, shared)
    steps = (*behind, *definition.root_steps, *schedule.steps)
    leaves = schedule.leaves
    if position is not None:
        leaves = leaves[:position]
        steps = steps_above(steps, leaves)
    outer = next((k for k, leaf in enumerate(leaves) if schedule.binding(leaf) in _LANES), None)
    plan = LoopPlan(steps, leaves, outer=len(leaves) if outer is None else outer)
    for tensor, other in program.fusion.tensors.items():
        if other.root_steps:  # what cuts its root axes may have made axes that others have
            for planned, own in _follow(program, space, tensor, plan, shared).found.items():
                if own in space.axis_of:
                    shared.setdefault(space.axis_of[own], planned)
    return plan, shared


def _steps_behind(
    program: Program, space: IterationSpace, shared: dict[SpaceAxis, AxisName]
) -> tuple[Step, ...]:
    """How axes of the plan derive from axes of earlier tensors: by reshapes in between.

    T1 [m] = reshape(T0 [i, j]), m split by the plan  ->  i and j merge into m, for those before T1.
    The root axes of such tensors join `shared`.
    """
    steps: tuple[Step, ...] = ()
    outs = [out for expr in program.fusion.exprs for out in tensor_outputs(program, expr)]
    for out in reversed(outs):
        definition = program.tensor(out)
        made = {result for step in definition.root_steps for result in step_results(step)}
        logical = {
            axis.name: shared[space.axis_of[axis.name]]
            for axis in definition.logical
            if space.axis_of.get(axis.name) in shared
        }
        roots = [a.name for a in definition.root if a.name in space.axis_of]
        if not made.intersection(logical) or any(
            space.axis_of[root] in shared and root not in logical for root in roots
        ):
            continue
        steps = (*(rename_axes(step, logical) for step in definition.root_steps), *steps)
        for root in roots:
            shared.setdefault(space.axis_of[root], root)
    return steps


def _space_axes(
    program: Program, space: IterationSpace, tensor: TensorName
) -> dict[SpaceAxis, AxisName]:
    """The root and logical axes of a tensor by axis of the space.

    A broadcast axis stands for the axis that it stretches to, if no other does.
    """
    definition = program.tensor(tensor)
    axes = [axis for axis in (*definition.root, *definition.logical) if axis.name in space.axis_of]
    axes.sort(key=lambda axis: axis.kind is AxisKind.broadcast)
    found: dict[SpaceAxis, AxisName] = {}
    for axis in axes:
        found.setdefault(space.axis_of[axis.name], axis.name)
    return found


def _follow(
    program: Program,
    space: IterationSpace,
    target: TensorName,
    plan: LoopPlan,
    shared: Mapping[SpaceAxis, AxisName],
    namer: AxisNamer | None = None,
) -> Follower:
    """`target` on its way through a plan that calls the axes of the space as `shared` says."""
    theirs = _space_axes(program, space, target)
    own = {shared[axis]: mine for axis, mine in theirs.items() if axis in shared}
    axes = program.all_axes(target)
    return follower(
        program.schedule(target),
        own,
        plan,
        reduced={name for name, axis in axes.items() if axis.kind is AxisKind.reduction},
        root_steps=program.tensor(target).root_steps,
        namer=namer,
    )


def _position(program: Program, reference: TensorName, position: int, call: str) -> int:
    """A number of outer loops; negative ones count from behind the last: -1 is all of them."""
    rank = len(program.schedule(reference).leaves)
    if not -rank - 1 <= position <= rank:
        raise UserError(
            f"{call}({reference}, pos={position}): must lie in [{-rank - 1}, {rank}]; {reference} "
            f"has {rank} loops"
        )
    return position + rank + 1 if position < 0 else position
