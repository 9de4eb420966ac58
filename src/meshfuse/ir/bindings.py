"""Verbs that say where iterations run: bind a leaf, place a tensor on a mesh."""

from __future__ import annotations

from dataclasses import replace

from meshfuse.base.errors import UserError
from meshfuse.expr import const_value
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import (
    Merge,
    Split,
    Step,
    Swizzle1d,
    step_results,
    step_sources,
    steps_above,
)


def parallelize(
    program: Program, tensor: TensorName, leaf: AxisName, parallel_type: ParallelType
) -> Program:
    """Bind a leaf of the loop nest. Binding it again to the same type changes nothing.

    Raises UserError if the axis is no leaf (any more) or bound otherwise, if the mesh has no such
    axis or another size, and if two tensor axes (or two reduced ones) would share a mesh axis, or
    two reduced ones a stream: tensor axes are loops in one another; Unsupported if the mesh does
    not divide a static size.
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
    if parallel_type.is_mesh:
        _check_not_swizzled(program, tensor, leaf, call)
    bindings = {**schedule.bindings, leaf: parallel_type}
    program = program.with_schedule(tensor, replace(schedule, bindings=bindings))
    if parallel_type.is_mesh and schedule.mesh is not None:
        _check_mesh_binding(program, tensor, leaf, schedule.mesh, call)
    return program


_PARTICIPLES: dict[type[Step], str] = {Split: "split", Merge: "merged", Swizzle1d: "swizzled"}


def _why_no_leaf(program: Program, tensor: TensorName, axis: AxisName) -> str:
    for step in program.schedule(tensor).steps:
        if axis in step_sources(step):
            verb, made = _PARTICIPLES[type(step)], ", ".join(step_results(step))
            return f"the axis was {verb} into {made}; bind one of those"
    leaves = ", ".join(map(str, program.leaf_domains(tensor)))
    return f"no such axis; the loop axes of {tensor} are [{leaves}]"


def _check_unused(
    program: Program, tensor: TensorName, leaf: AxisName, parallel_type: ParallelType, call: str
) -> None:
    axes = program.all_axes(tensor)
    is_tensor_axis = axes[leaf].kind.is_tensor_axis
    for other, bound in program.schedule(tensor).bindings.items():
        if is_tensor_axis and bound == ParallelType.stream:
            continue
        if bound == parallel_type and axes[other].kind.is_tensor_axis == is_tensor_axis:
            which = "tensor" if is_tensor_axis else "reduced"
            raise UserError(
                f"{call}: {parallel_type} is bound to {which} axis {axes[other]} already; "
                f"one {which} axis can have it"
            )


def _check_not_swizzled(program: Program, tensor: TensorName, leaf: AxisName, call: str) -> None:
    for step in steps_above(program.schedule(tensor).steps, [leaf]):
        if isinstance(step, Swizzle1d):
            raise UserError(
                f"{call}: the axis is swizzled by {step.mesh_axis}: the order of its iterations "
                "depends on the rank, so it cannot say what each rank holds"
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
    """The leaf's mesh axis exists and has its extent."""
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
