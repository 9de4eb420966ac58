"""Verbs on loop nests: split, merge, swizzle and reorder the loops of a tensor.

Each maps a Program to a Program and only extends the schedule (law 4): a bound leaf is neither
transformed nor bound to something else. Loop axes are counted with reduced ones among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.base.orders import wrap_dim
from meshfuse.expr import const
from meshfuse.ir.axes import AxisKind, AxisName, TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.program import Program, fresh_name
from meshfuse.ir.schedule import Merge, Split, Step, Swizzle1d

_INT64_LIMIT = 1 << 63


def split(
    program: Program, tensor: TensorName, axis: int, factor: int, inner_split: bool = True
) -> Program:
    """Replace loop axis `axis` by (outer, inner).

    With `inner_split` the inner axis has extent `factor`, else the outer one; the other has
    ceil(n / factor). Raises UserError for an axis out of range or bound, and a factor below 1.
    """
    call = f"split({tensor}, axis={axis}, factor={factor}, inner_split={inner_split})"
    if not isinstance(factor, int) or isinstance(factor, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  # users' values
        raise UserTypeError(f"{call}: factor must be an int, got {type(factor).__name__}")
    if not isinstance(inner_split, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  # users' values
        raise UserTypeError(f"{call}: inner_split must be True or False")
    if not 1 <= factor < _INT64_LIMIT:
        raise UserError(f"{call}: factor must be at least 1, and an int64")
    position = _transformable(program, tensor, axis, call)
    schedule = program.schedule(tensor)
    program, outer = fresh_name(program, "a")
    program, inner = fresh_name(program, "a")
    children = (AxisName(outer), AxisName(inner))
    step = Split(schedule.leaves[position], *children, const(factor), inner_split)
    leaves = (*schedule.leaves[:position], *children, *schedule.leaves[position + 1 :])
    return _extended(program, tensor, step, leaves)


def merge(program: Program, tensor: TensorName, outer_axis: int, inner_axis: int) -> Program:
    """Replace two loop axes by their product, at the place of the outer one.

    A broadcast axis merged with another takes its kind. Raises UserError for axes that are out of
    range, the same, bound, or of which only one is reduced.
    """
    call = f"merge({tensor}, outer={outer_axis}, inner={inner_axis})"
    outer = _transformable(program, tensor, outer_axis, call)
    inner = _transformable(program, tensor, inner_axis, call)
    if outer == inner:
        raise UserError(f"{call}: needs two different axes")
    domains = program.leaf_domains(tensor)
    kinds = (domains[outer].kind, domains[inner].kind)
    if kinds[0].is_tensor_axis != kinds[1].is_tensor_axis or AxisKind.partial in kinds:
        raise UserError(
            f"{call}: {domains[outer]} is {kinds[0].name}, {domains[inner]} is {kinds[1].name}; "
            "both or neither must be reduced"
        )
    schedule = program.schedule(tensor)
    program, out = fresh_name(program, "a")
    step = Merge(schedule.leaves[outer], schedule.leaves[inner], AxisName(out))
    leaves = tuple(
        step.out if leaf == step.outer else leaf for leaf in schedule.leaves if leaf != step.inner
    )
    return _extended(program, tensor, step, leaves)


def reorder(program: Program, tensor: TensorName, moves: Mapping[int, int]) -> Program:
    """Move loop axis k to place moves[k]; the others keep their order in the places left.

    Raises UserError for a place out of range, and if two axes move to one place or one axis twice.
    """
    call = f"reorder({tensor}, {dict(moves)})"
    leaves = program.schedule(tensor).leaves
    rank = len(leaves)
    sources = [wrap_dim(old, rank, call) for old in moves]
    targets = [wrap_dim(new, rank, call) for new in moves.values()]
    if len(set(sources)) < len(moves) or len(set(targets)) < len(moves):
        raise UserError(f"{call}: each axis moves once, and to a place of its own")
    placed = dict(zip(targets, sources, strict=True))
    others = iter([axis for axis in range(rank) if axis not in sources])
    order = [placed[place] if place in placed else next(others) for place in range(rank)]
    reordered = tuple(leaves[axis] for axis in order)
    return program.with_schedule(tensor, replace(program.schedule(tensor), leaves=reordered))


def set_loop_domain(program: Program, tensor: TensorName, order: Sequence[AxisName]) -> Program:
    """Put the loops in this order, outermost first.

    Raises UserError, naming an axis, unless `order` is a permutation of the leaves: loops derive
    from one another by split, merge and swizzle only.
    """
    call = f"set_loop_domain({tensor}, [{', '.join(order)}])"
    leaves = program.schedule(tensor).leaves
    for place, axis in enumerate(order):
        if axis not in leaves:
            named = ", ".join(map(str, program.leaf_domains(tensor)))
            raise UserError(f"{call}: {axis} is no loop axis; those are [{named}]")
        if axis in order[:place]:
            raise UserError(f"{call}: {axis} stands twice")
    for axis in leaves:
        if axis not in order:
            raise UserError(f"{call}: loop axis {axis} is missing")
    return program.with_schedule(tensor, replace(program.schedule(tensor), leaves=tuple(order)))


def swizzle1d(
    program: Program, tensor: TensorName, axis: int, parallel_type: ParallelType, offset: int = 0
) -> Program:
    """Let each rank begin loop axis `axis` at its own number along a mesh axis, or `offset` behind
    it: ring order.

    Raises UserError for another type than a mesh axis, and for an axis out of range or bound.
    """
    call = f"swizzle1d({tensor}, axis={axis}, {parallel_type})"
    if not parallel_type.is_mesh:
        raise UserError(f"{call}: takes a mesh axis, as ParallelType.mesh_x")
    position = _transformable(program, tensor, axis, call)
    leaves = program.schedule(tensor).leaves
    program, out = fresh_name(program, "a")
    step = Swizzle1d(leaves[position], AxisName(out), parallel_type, offset)
    return _extended(program, tensor, step, (*leaves[:position], step.out, *leaves[position + 1 :]))


def set_inline_depth(program: Program, tensor: TensorName, depth: int) -> Program:
    """Say that the outer `depth` loops are shared with the readers of `tensor`.

    They are transformed no more. Raises UserError for another number of loops than there are.
    """
    rank = len(program.schedule(tensor).leaves)
    if not 0 <= depth <= rank:
        raise UserError(f"set_inline_depth({tensor}, {depth}): must lie in [0, {rank}]")
    return program.with_schedule(tensor, replace(program.schedule(tensor), inline_depth=depth))


def _transformable(program: Program, tensor: TensorName, axis: int, call: str) -> int:
    """The position of a loop axis that may be split or merged."""
    schedule = program.schedule(tensor)
    if not schedule.leaves:
        raise UserError(f"{call}: a 0-dim tensor has no loop axes")
    position = wrap_dim(axis, len(schedule.leaves), call)
    bound = schedule.binding(schedule.leaves[position])
    if bound != ParallelType.serial:
        raise UserError(
            f"{call}: {program.leaf_domains(tensor)[position]} is bound to {bound} already; "
            "transform axes before binding them"
        )
    if position < schedule.inline_depth:
        raise UserError(f"{call}: axis {position} is shared with the consumers (inlined)")
    return position


def _extended(
    program: Program, tensor: TensorName, step: Step, leaves: tuple[AxisName, ...]
) -> Program:
    schedule = program.schedule(tensor)
    return program.with_schedule(
        tensor, replace(schedule, steps=(*schedule.steps, step), leaves=leaves)
    )
