"""Schedule verbs: change a tensor's loop nest, bind its leaves, place it on a mesh, lay it out.

Each maps a Program to a Program and only extends the schedule (law L4): a bound leaf is neither
transformed nor bound to something else. Loop axes are counted with reduced ones among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshfuse.base.errors import Unsupported, UserError, UserTypeError
from meshfuse.base.orders import wrap_dim
from meshfuse.expr import const, const_value
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, TensorName
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.ir.program import Program, fresh_name
from meshfuse.ir.rewrite import add_tensor
from meshfuse.ir.schedule import (
    Allocation,
    Merge,
    Schedule,
    Split,
    step_results,
    step_sources,
)

# Loop nests.


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
    if factor < 1:
        raise UserError(f"{call}: factor must be at least 1")
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
        raise UserError(f"{call}: needs two axes")
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
    program: Program, tensor: TensorName, step: Split | Merge, leaves: tuple[AxisName, ...]
) -> Program:
    schedule = program.schedule(tensor)
    return program.with_schedule(
        tensor, replace(schedule, steps=(*schedule.steps, step), leaves=leaves)
    )


# Bindings and meshes.


def parallelize(
    program: Program, tensor: TensorName, leaf: AxisName, parallel_type: ParallelType
) -> Program:
    """Bind a leaf of the loop nest. Binding it again to the same type changes nothing.

    Raises UserError if the axis is no leaf (any more) or bound otherwise, if the mesh has no such
    axis or another size, and if two tensor axes (or two reduced ones) would share a mesh axis or
    stream; Unsupported if the mesh does not divide a static size.
    """
    call = f"parallelize({tensor}, {leaf}, {parallel_type})"
    schedule = program.schedule(tensor)
    if leaf not in schedule.leaves:
        raise UserError(f"{call}: {_why_no_leaf(program, tensor, leaf)}")
    bound = schedule.binding(leaf)
    if bound == parallel_type:
        return program
    if bound != ParallelType.serial:
        raise UserError(f"{call}: the axis is bound to {bound} already")
    if parallel_type.is_mesh or parallel_type == ParallelType.stream:
        _check_unused(program, tensor, leaf, parallel_type, call)
    bindings = {**schedule.bindings, leaf: parallel_type}
    program = program.with_schedule(tensor, replace(schedule, bindings=bindings))
    if parallel_type.is_mesh and schedule.mesh is not None:
        _check_mesh_binding(program, tensor, leaf, schedule.mesh, call)
    return program


def _why_no_leaf(program: Program, tensor: TensorName, axis: AxisName) -> str:
    for step in program.schedule(tensor).steps:
        if axis in step_sources(step):
            verb = "split" if isinstance(step, Split) else "merged"
            return f"the axis was {verb} into {', '.join(step_results(step))}; bind one of those"
    leaves = ", ".join(map(str, program.leaf_domains(tensor)))
    return f"no such axis; the loop axes of {tensor} are [{leaves}]"


def _check_unused(
    program: Program, tensor: TensorName, leaf: AxisName, parallel_type: ParallelType, call: str
) -> None:
    axes = program.all_axes(tensor)
    is_tensor_axis = axes[leaf].kind.is_tensor_axis
    for other, bound in program.schedule(tensor).bindings.items():
        if bound == parallel_type and axes[other].kind.is_tensor_axis == is_tensor_axis:
            which = "tensor" if is_tensor_axis else "reduced"
            raise UserError(
                f"{call}: {parallel_type} is bound to {which} axis {axes[other]} already; "
                f"one {which} axis can have it"
            )


def set_device_mesh(program: Program, tensor: TensorName, mesh: DeviceMesh) -> Program:
    """Place a tensor on a mesh, before or after its leaves are bound.

    Raises UserError if a leaf is bound to a mesh axis that `mesh` does not have or that has another
    size; Unsupported if the mesh does not divide a static size.
    """
    schedule = replace(program.schedule(tensor), mesh=mesh)
    program = program.with_schedule(tensor, schedule)
    for leaf, bound in schedule.bindings.items():
        if bound.is_mesh:
            _check_mesh_binding(program, tensor, leaf, mesh, f"set_device_mesh({tensor}, {mesh})")
    return program


def _check_mesh_binding(
    program: Program, tensor: TensorName, leaf: AxisName, mesh: DeviceMesh, call: str
) -> None:
    """The leaf's mesh axis exists and has its extent, and all blocks are of equal size."""
    bound = program.schedule(tensor).bindings[leaf]
    if not mesh.has(bound):
        named = ", ".join(map(str, mesh.parallel_types()))
        raise UserError(f"{call}: {leaf} is bound to {bound}, but {mesh} has only {named}")
    ranks = mesh.axis_size(bound)
    axes = program.all_axes(tensor)
    extent = const_value(axes[leaf].extent)
    if extent is not None and extent != ranks:
        raise UserError(
            f"{call}: axis {axes[leaf]} has size {extent} and {bound} of {mesh} has {ranks} ranks; "
            f"split the axis by {ranks} and bind the part of that size"
        )
    for step in _splits_above(program.schedule(tensor), leaf):
        whole, factor = const_value(axes[step.source].extent), const_value(step.factor)
        if whole is not None and factor is not None and whole % factor:
            raise Unsupported(
                f"{call}: axis {axes[step.source]} of {tensor} has size {whole}, which {factor} "
                f"does not divide, and {bound} of {mesh} with {ranks} ranks is bound to a part of "
                "it; every rank must hold a block of the same size"
            )


def _splits_above(schedule: Schedule, axis: AxisName) -> list[Split]:
    """The splits that `axis` derives from."""
    found: list[Split] = []
    pending = {axis}
    for step in reversed(schedule.steps):
        if pending.intersection(step_results(step)):
            pending.update(step_sources(step))
            found += [step] if isinstance(step, Split) else []
    return found


# Memory.


def set_allocation_domain(
    program: Program,
    tensor: TensorName,
    order: Sequence[AxisName],
    contiguity: Sequence[bool | None] | bool,
) -> Program:
    """Lay a tensor out: its axes, slowest first, and a contiguity flag for each.

    `order` names tensor axes or loop leaves. Leaves bound to a mesh axis or stream, and reduced
    ones, are dropped with their flags; another leaf stands for the tensor axis that it is the only
    local part of. A bool flag holds for all axes but broadcast and expanded ones. Raises UserError,
    naming the axis, if `order` then is no permutation of the tensor's axes, or if the flags do not
    fit.
    """
    names = ", ".join(order)
    call = f"set_allocation_domain({tensor}, [{names}], contiguity={contiguity})"
    flags = [contiguity] * len(order) if isinstance(contiguity, bool) else list(contiguity)
    if len(flags) != len(order):
        raise UserError(f"{call}: got {len(flags)} contiguity flags for {len(order)} axes")
    placed: dict[AxisName, bool | None] = {}
    for axis, flag in zip(order, flags, strict=True):
        domain = _allocated_axis(program, tensor, axis, call)
        if domain is None:
            continue
        if domain.name in placed:
            raise UserError(f"{call}: axis {domain} stands twice, the second time as {axis}")
        flagless = _has_no_flag(program.schedule(tensor), domain)
        if flagless and isinstance(contiguity, bool):
            flag = None
        if flagless != (flag is None):
            wanted = "None: it is broadcast or expanded" if flagless else "True or False"
            raise UserError(f"{call}: the contiguity flag of axis {domain} must be {wanted}")
        placed[domain.name] = flag
    for domain in program.tensor(tensor).tensor_axes:
        if domain.name not in placed:
            raise UserError(f"{call}: axis {domain} of {tensor} is missing")
    allocation = Allocation(tuple(placed), tuple(placed.values()))
    return program.with_schedule(tensor, replace(program.schedule(tensor), allocation=allocation))


def _has_no_flag(schedule: Schedule, axis: IterDomain) -> bool:
    """Whether a tensor axis is broadcast, or expanded according to its present allocation."""
    allocation = schedule.allocation
    if axis.kind is AxisKind.broadcast or allocation is None:
        return axis.kind is AxisKind.broadcast
    return allocation.contiguity[allocation.order.index(axis.name)] is None


def _allocated_axis(
    program: Program, tensor: TensorName, axis: AxisName, call: str
) -> IterDomain | None:
    """The tensor axis that an axis of an allocation order stands for; None if it has no memory."""
    axes = program.all_axes(tensor)
    if axis not in axes:
        leaves = ", ".join(map(str, program.leaf_domains(tensor)))
        raise UserError(f"{call}: {axis} is no axis of {tensor}; its loop axes are [{leaves}]")
    schedule = program.schedule(tensor)
    if not axes[axis].kind.is_tensor_axis or _is_elsewhere(schedule, axis):
        return None
    logical = {domain.name: domain for domain in program.tensor(tensor).tensor_axes}
    for step in reversed(schedule.steps):
        if axis in logical:
            break
        if axis not in step_results(step):
            continue
        others = [made for made in step_results(step) if made != axis]
        if isinstance(step, Merge) or not all(_is_elsewhere(schedule, made) for made in others):
            raise UserError(f"{call}: {axes[axis]} is only a part of tensor axes, or a product")
        axis = step.source
    return logical[axis]


def _is_elsewhere(schedule: Schedule, axis: AxisName) -> bool:
    """Whether a leaf's iterations lie on other ranks or in other chunks."""
    bound = schedule.binding(axis)
    return bound.is_mesh or bound == ParallelType.stream


# Reduced axes.


def clear_reductions(program: Program, tensor: TensorName) -> Program:
    """Drop the reduced and partial axes, with the loops, steps and bindings that are theirs alone.

    For a tensor that is to be defined by another expression. Raises UserError if it has root axes,
    which may mix reduced axes with others.
    """
    definition, schedule = program.tensor(tensor), program.schedule(tensor)
    if definition.root:
        raise UserError(f"clear_reductions({tensor}): the tensor has root axes {definition.root}")
    axes = program.all_axes(tensor)

    def stays(axis: AxisName) -> bool:
        return axes[axis].kind.is_tensor_axis

    schedule = replace(
        schedule,
        leaves=tuple(leaf for leaf in schedule.leaves if stays(leaf)),
        steps=tuple(step for step in schedule.steps if all(map(stays, step_sources(step)))),
        bindings={leaf: bound for leaf, bound in schedule.bindings.items() if stays(leaf)},
    )
    definition = replace(definition, logical=definition.tensor_axes)
    return add_tensor(program, tensor, definition, schedule)
