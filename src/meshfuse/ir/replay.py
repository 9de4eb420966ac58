"""Copies of a schedule: a tensor's clone, a tensor scheduled like another, one without reductions.

The tensors have like logical axes and need not be related otherwise; what producers and consumers
take over from one another is found by facts/axis_map.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshfuse.base.errors import UserError
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, TensorName
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import add_tensor, fresh_axes, fresh_tensor_name, replay_steps
from meshfuse.ir.schedule import Allocation, Schedule, Step, step_sources


def clone_tensor(
    program: Program, name: TensorName
) -> tuple[Program, TensorName, dict[AxisName, AxisName]]:
    """A tensor under a fresh name that is scheduled, laid out and kept in memory as `name` is.

    Nothing defines it yet. Returns the old axes' new names, too.
    """
    definition, schedule = program.tensor(name), program.schedule(name)
    program, out = fresh_tensor_name(program)
    renamed: dict[AxisName, AxisName] = {}
    program, root = _renewed(program, definition.root, renamed)
    program, root_steps = replay_steps(program, definition.root_steps, renamed)
    program, logical = _renewed(program, definition.logical, renamed)
    program, steps = replay_steps(program, schedule.steps, renamed)
    cloned = replace(definition, root=root, root_steps=root_steps, logical=logical)
    copied = _renamed_schedule(schedule, schedule.leaves, steps, renamed)
    return add_tensor(program, out, cloned, copied), out, renamed


def _renewed(
    program: Program, axes: Sequence[IterDomain], renamed: dict[AxisName, AxisName]
) -> tuple[Program, tuple[IterDomain, ...]]:
    """The axes under fresh names, or those that `renamed` has for them already."""
    missing = [axis for axis in axes if axis.name not in renamed]
    program, fresh = fresh_axes(program, [(axis.kind, axis.extent) for axis in missing])
    renamed.update({old.name: new.name for old, new in zip(missing, fresh, strict=True)})
    return program, tuple(replace(axis, name=renamed[axis.name]) for axis in axes)


def _renamed_schedule(
    schedule: Schedule,
    leaves: Sequence[AxisName],
    steps: tuple[Step, ...],
    renamed: Mapping[AxisName, AxisName],
) -> Schedule:
    """`schedule` on other axes, with those of its leaves that have a new name."""
    return replace(
        schedule,
        leaves=tuple(renamed[leaf] for leaf in leaves),
        steps=steps,
        bindings={
            renamed[leaf]: bound for leaf, bound in schedule.bindings.items() if leaf in renamed
        },
        allocation=_renamed_allocation(schedule.allocation, renamed),
    )


def _renamed_allocation(
    allocation: Allocation | None, renamed: Mapping[AxisName, AxisName]
) -> Allocation | None:
    if allocation is None:
        return None
    return replace(allocation, order=tuple(renamed[axis] for axis in allocation.order))


# One tensor like another.


def self_replay(program: Program, source: TensorName, target: TensorName) -> Program:
    """Schedule `target` as `source` is: mesh, loops, bindings, and layout.

    Their logical axes pair up by position; where one tensor has reduced axes that the other lacks,
    they are left out, with the loops that are theirs alone. Memory type and inlining stay. Raises
    UserError if axes that pair up differ in kind, or if `target` has a schedule already that
    `source`'s does not extend.
    """
    call = f"self_replay({source}, {target})"
    if scheduled_alike(program, source, target):
        return program
    renamed = _pair_axes(program, source, target, call)
    _check_free(program, source, target, call)
    schedule, present = program.schedule(source), program.schedule(target)
    program, steps = replay_steps(program, schedule.steps, renamed)
    kept = [leaf for leaf in schedule.leaves if leaf in renamed]
    replayed = _renamed_schedule(schedule, kept, steps, renamed)
    own = set(_names(program.tensor(target).logical)) - set(renamed.values())
    replayed = replace(
        replayed,
        leaves=(*replayed.leaves, *(leaf for leaf in present.leaves if leaf in own)),
        mesh=schedule.mesh or present.mesh,
        allocation=replayed.allocation or present.allocation,
        memory=present.memory,
        inline_depth=present.inline_depth,
        stages=present.stages,
    )
    return program.with_schedule(target, replayed)


def scheduled_alike(program: Program, left: TensorName, right: TensorName) -> bool:
    """Whether two tensors have one schedule, short of axis names, memory type and inlining."""
    ours, theirs = (_numbered(program, tensor) for tensor in (left, right))
    return ours == theirs


def _numbered(program: Program, tensor: TensorName) -> Schedule:
    """A tensor's schedule with its axes numbered by place of birth."""
    schedule, logical = program.schedule(tensor), program.tensor(tensor).logical
    renamed = {axis.name: AxisName(f"a{place}") for place, axis in enumerate(logical)}
    counting = Program(serials={"a": len(logical)})
    _, steps = replay_steps(counting, schedule.steps, renamed)
    numbered = _renamed_schedule(schedule, schedule.leaves, steps, renamed)
    return Schedule(
        numbered.leaves, numbered.steps, numbered.bindings, numbered.mesh, numbered.allocation
    )


def _pair_axes(
    program: Program, source: TensorName, target: TensorName, call: str
) -> dict[AxisName, AxisName]:
    """Logical axes of `source` -> those of `target`."""
    left, right = program.tensor(source).logical, program.tensor(target).logical
    if len(left) != len(right):
        left, right = program.tensor(source).tensor_axes, program.tensor(target).tensor_axes
    if len(left) != len(right):
        raise UserError(
            f"{call}: {source} has {len(left)} axes, {target} has {len(right)}; they must be alike"
        )
    for ours, theirs in zip(left, right, strict=True):
        if ours.kind is not theirs.kind:
            raise UserError(
                f"{call}: {ours} is {ours.kind.name}, {theirs} is {theirs.kind.name}; axes pair up "
                "by position and must be of one kind"
            )
    return dict(zip(_names(left), _names(right), strict=True))


def _names(axes: Sequence[IterDomain]) -> list[AxisName]:
    return [axis.name for axis in axes]


def _check_free(program: Program, source: TensorName, target: TensorName, call: str) -> None:
    """Law 4: what an earlier stage has decided about `target` stays."""
    schedule, wanted = program.schedule(target), program.schedule(source)
    if schedule.steps or schedule.bindings:
        raise UserError(
            f"{call}: {target} is scheduled already ({len(schedule.steps)} splits and merges, "
            f"{len(schedule.bindings)} bound axes); replay before scheduling it"
        )
    if schedule.mesh is not None and wanted.mesh not in (None, schedule.mesh):
        raise UserError(f"{call}: {target} lies on {schedule.mesh}, {source} on {wanted.mesh}")


# One tensor without its reduced axes.


def clear_reductions(program: Program, tensor: TensorName) -> Program:
    """Drop the reduced and partial axes, with the loops, steps and bindings that are theirs alone.

    For a tensor that is to be defined by another expression. Mesh, sharding and layout of the other
    axes stay; a layout that says no more than having none does is dropped. Raises UserError if the
    tensor has root axes, which may mix reduced axes with others.
    """
    definition = program.tensor(tensor)
    if definition.root:
        raise UserError(f"clear_reductions({tensor}): the tensor has root axes {definition.root}")
    return without_reductions(program, tensor)


def without_reductions(program: Program, tensor: TensorName) -> Program:
    """As `clear_reductions`; root axes, which say how the tensor was defined, are forgotten."""
    definition, schedule = program.tensor(tensor), program.schedule(tensor)
    axes = program.all_axes(tensor)

    def stays(axis: AxisName) -> bool:
        return axes[axis].kind.is_tensor_axis

    leaves = tuple(leaf for leaf in schedule.leaves if stays(leaf))
    schedule = replace(
        schedule,
        leaves=leaves,
        steps=tuple(step for step in schedule.steps if all(map(stays, step_sources(step)))),
        bindings={leaf: bound for leaf, bound in schedule.bindings.items() if stays(leaf)},
        inline_depth=min(schedule.inline_depth, len(leaves)),
        allocation=None if _says_nothing(definition, schedule.allocation) else schedule.allocation,
    )
    definition = replace(definition, logical=definition.tensor_axes, root=(), root_steps=())
    return add_tensor(program, tensor, definition, schedule)


def _says_nothing(definition: TensorDef, allocation: Allocation | None) -> bool:
    """Whether an allocation is row-major and contiguous, as a tensor is that has none."""
    if allocation is None:
        return True
    kinds = {axis.name: axis.kind for axis in definition.tensor_axes}
    pairs = zip(allocation.order, allocation.contiguity, strict=True)
    return list(allocation.order) == list(kinds) and all(
        flag is True or (flag is None and kinds[axis] is AxisKind.broadcast) for axis, flag in pairs
    )
