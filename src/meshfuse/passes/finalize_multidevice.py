"""The last pass before segmentation: what later stages may take for granted about meshes."""

from __future__ import annotations

from meshfuse.base.errors import InvariantError, UserError
from meshfuse.base.trace import Note
from meshfuse.expr import const_value
from meshfuse.facts.facts import tensor_outputs
from meshfuse.facts.redistribute import leads
from meshfuse.facts.sharding import describe, sharding_of
from meshfuse.ir.axes import IterDomain, TensorName
from meshfuse.ir.comm import Communication
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import Expr
from meshfuse.ir.program import Program
from meshfuse.passes.placement import is_local


def finalize_multidevice(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Check that meshes and shardings are sound; the program stays as it is.

    All tensors have a mesh or none has (CPU scalars are exempt), each sharding passes
    `check_tensor`, each expression is local or the communication that its tensors ask for.
    """
    tensors = [t for t, definition in program.fusion.tensors.items() if not definition.is_cpu]
    without = [tensor for tensor in tensors if program.schedule(tensor).mesh is None]
    if without and len(without) < len(tensors):
        raise InvariantError(f"{', '.join(without)} of a program with a mesh have none")
    for tensor in tensors:
        check_tensor(program, tensor)
    for expr in program.fusion.exprs:
        _check_expr(program, expr)
    return program, ()


def _check_expr(program: Program, expr: Expr) -> None:
    """Raise InvariantError unless `expr` is local or a communication that leads where it should."""
    outs = tensor_outputs(program, expr)
    mesh = program.schedule(outs[0]).mesh if outs else None
    if mesh is None:
        return
    if isinstance(expr, Communication):
        have, want = sharding_of(program, expr.src), sharding_of(program, expr.out)
        if not leads(expr, have, want):
            raise InvariantError(f"{expr} does not lead from {describe(have)} to {describe(want)}")
        return
    if not is_local(program, expr, mesh):
        raise InvariantError(f"{expr} is neither local nor a communication")


def check_tensor(program: Program, tensor: TensorName) -> None:
    """Check the mesh leaves of one tensor.

    Raises UserError if a mesh axis is bound without a mesh, is none of the mesh, has another size
    than the leaf, or is bound to two iteration leaves. Blocks may be uneven.
    """
    schedule = program.schedule(tensor)
    seen: dict[tuple[ParallelType, bool], IterDomain] = {}
    for leaf in program.leaf_domains(tensor):
        owner = schedule.binding(leaf.name)
        if not owner.is_mesh:
            continue
        place = f"{tensor}, loop axis {leaf}, bound to {owner}"
        if schedule.mesh is None:
            raise UserError(f"{place}: the tensor has no mesh; call set_device_mesh")
        if not schedule.mesh.has(owner):
            raise UserError(f"{place}: {schedule.mesh} has no such axis")
        ranks = schedule.mesh.axis_size(owner)
        if const_value(leaf.extent) not in (None, ranks):
            raise UserError(f"{place}: {schedule.mesh} has {ranks} ranks there, not {leaf.extent}")
        earlier = seen.setdefault((owner, leaf.kind.is_tensor_axis), leaf)
        if earlier is not leaf:
            raise UserError(f"{place}: loop axis {earlier} is bound to it already")
