"""The last pass before segmentation: what later stages may take for granted about meshes."""

from __future__ import annotations

from meshfuse.base.errors import InvariantError, Unsupported, UserError
from meshfuse.base.trace import Note
from meshfuse.expr import const_value
from meshfuse.facts.facts import tensor_outputs
from meshfuse.facts.redistribute import communication_of, plan
from meshfuse.facts.refusal import Refusal
from meshfuse.facts.sharding import Digits, axis_digits, describe, sharding_of
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
    """Raise InvariantError unless `expr` is local or the one communication that it should be."""
    outs = tensor_outputs(program, expr)
    mesh = program.schedule(outs[0]).mesh if outs else None
    if mesh is None:
        return
    if isinstance(expr, Communication):
        extents = [axis.extent for axis in program.tensor(expr.src).tensor_axes]
        have, want = sharding_of(program, expr.src), sharding_of(program, expr.out)
        moves = plan(have, want, extents)
        if not isinstance(moves, Refusal):
            if [communication_of(move, expr.out, expr.src) for move in moves] == [expr]:
                return
        raise InvariantError(f"{expr} leads from {describe(have)} to {describe(want)}")
    if not is_local(program, expr, mesh):
        raise InvariantError(f"{expr} is neither local nor a communication")


def check_tensor(program: Program, tensor: TensorName) -> None:
    """Check the mesh leaves of one tensor.

    Raises UserError if a mesh axis is bound without a mesh, is none of the mesh, has another size
    than the leaf, or is bound to two iteration leaves; Unsupported for blocks that are uneven.
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
    if seen:
        digits = axis_digits(program, tensor)
        for axis in program.tensor(tensor).logical:
            _check_even(tensor, axis, digits[axis.name])


def _check_even(tensor: TensorName, axis: IterDomain, digits: Digits) -> None:
    if all(digit.owner is None for digit in digits):
        return
    size, sizes = const_value(axis.extent), [const_value(digit.extent) for digit in digits]
    if size is None or None in sizes:
        return
    product = 1
    for extent in sizes:
        product *= extent or 0
    if product != size:
        owners = ", ".join(str(digit.owner) for digit in digits if digit.owner)
        raise Unsupported(
            f"sharding of {tensor}: axis {axis} does not divide into equal blocks over {owners}; "
            "the size must be a multiple of the number of ranks"
        )
