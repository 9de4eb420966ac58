"""Let each rank begin its host loops with the chunk of its own number.

T2 [a0{4} on the stream, ..] on mesh_x   ->   [a9, ..], a9 = swizzle1d(a0, mesh_x), on the stream
"""

from __future__ import annotations

from dataclasses import replace

from meshfuse.base.errors import Unsupported
from meshfuse.facts.streams import stream_leaves
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.program import Program, fresh_name
from meshfuse.ir.schedule import Swizzle1d, steps_above


def rotate_streams(program: Program) -> Program:
    """Swizzle the stream leaves that are not swizzled yet by the mesh axis of their tensor.

    Inputs have no loops of their own. Raises Unsupported for a tensor without a mesh, and for one
    on a mesh of several axes: which of them counts is its user's to say.
    """
    for tensor in program.fusion.tensors:
        if tensor in program.fusion.inputs:
            continue
        for leaf in stream_leaves(program, tensor):
            above = steps_above(program.schedule(tensor).steps, [leaf])
            if not any(isinstance(step, Swizzle1d) for step in above):
                program = _rotated(program, tensor, leaf)
    return program


def _rotated(program: Program, tensor: TensorName, leaf: AxisName) -> Program:
    schedule = program.schedule(tensor)
    axis = _own_axis(program, tensor, leaf)
    if axis is None:
        return program
    program, name = fresh_name(program, "a")
    out = AxisName(name)
    leaves = tuple(out if other == leaf else other for other in schedule.leaves)
    bindings = {out if a == leaf else a: bound for a, bound in schedule.bindings.items()}
    steps = (*schedule.steps, Swizzle1d(leaf, out, axis))
    return program.with_schedule(
        tensor, replace(schedule, leaves=leaves, bindings=bindings, steps=steps)
    )


def _own_axis(program: Program, tensor: TensorName, leaf: AxisName) -> ParallelType | None:
    """The mesh axis along which ranks differ; None on a mesh of one rank."""
    schedule = program.schedule(tensor)
    place = schedule.leaves.index(leaf)
    way_out = (
        f"swizzle the loop by the mesh axis that counts, before it is bound to the stream: "
        f"{tensor}.swizzle1d({place}, mesh.axis(0))"
    )
    if schedule.mesh is None:
        raise Unsupported(
            f"offset_stream_indexing_by_rank: {tensor} lies on no mesh, so no rank has a chunk of "
            f"its own; call set_device_mesh, or {way_out}"
        )
    axes = [a for a in schedule.mesh.parallel_types() if schedule.mesh.axis_size(a) > 1]
    if len(axes) > 1:
        named = ", ".join(map(str, axes))
        raise Unsupported(
            f"offset_stream_indexing_by_rank: {tensor} lies on {schedule.mesh}, where ranks have a "
            f"number along each of {named}; {way_out}"
        )
    return axes[0] if axes else None
