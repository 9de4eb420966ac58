"""Where an expression computes: what lies where for it to need no communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshfuse.base.errors import InvariantError, Unsupported
from meshfuse.expr import IntExpr
from meshfuse.facts.axis_map import output_places
from meshfuse.facts.digits import is_whole
from meshfuse.facts.facts import tensor_outputs
from meshfuse.facts.reshape import digits_after_reshape, digits_of_root
from meshfuse.facts.sharding import (
    Digit,
    Digits,
    Sharding,
    axis_digits,
    canonical,
    keep_owners,
    owners_of,
    reduced_mesh_axes,
    reduction_function,
    sharding_of,
)
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, TensorName
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.infer import is_tensor
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.ir.ops import Expr, Reshape, Set
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import fresh_axes, replay_steps
from meshfuse.ir.schedule import Split
from meshfuse.passes.apply_sharding import covering, place_tensor, split_into
from meshfuse.passes.sharding_rules import carried_axes
from meshfuse.passes.terms_carried import carried_terms, needed_terms

Placement = tuple[Digits, ...]
"""Canonical digits of each root (else logical) axis of an expression's first output, to which the
axes of the others correspond.
"""


def placement_of(program: Program, out: TensorName, mesh: DeviceMesh) -> Placement:
    """The placement that makes `out` as it lies, short of a reduction across ranks.

    A mesh axis on a reduced leaf spreads the reduction, so that kept axes are whole along it. The
    one element of a broadcast axis is computed everywhere.
    """
    digits, axes = axis_digits(program, out), program.tensor(out).maybe_root
    found = [digits_of_root(digits.get(a.name, ()), a, mesh) for a in axes]
    crossing = crossing_axes(program, out, tuple(found))
    for place, axis in enumerate(axes):
        if axis.kind is AxisKind.broadcast:
            found[place] = (Digit(axis.extent),)
        elif axis.kind.is_tensor_axis:
            kept = [owner for owner in owners_of(found[place], mesh) if owner not in crossing]
            found[place] = keep_owners(found[place], kept, axis.extent, mesh)
    return tuple(found)


def placement_at(
    program: Program, expr: Expr, out: TensorName, placement: Placement, mesh: DeviceMesh
) -> Placement:
    """The digits of the root (else logical) axes of one output.

    An axis to which none of the first output's corresponds is whole as it is computed, and each
    rank keeps what it is to have.
    """
    own: Mapping[AxisName, Digits] = {}
    if program.schedule(out).mesh == mesh:
        own = axis_digits(program, out)
    axes = program.tensor(out).maybe_root
    return tuple(
        canonical(own.get(axis.name, ()), axis.extent, mesh) if place is None else placement[place]
        for axis, place in zip(axes, output_places(expr, program, out), strict=True)
    )


def crossing_axes(
    program: Program, out: TensorName, placement: Placement
) -> tuple[ParallelType, ...]:
    """The mesh axes over which reduced axes spread: each rank gets one term of the reduction."""
    axes = program.tensor(out).maybe_root
    return tuple(
        digit.owner
        for axis, digits in zip(axes, placement, strict=True)
        if not axis.kind.is_tensor_axis
        for digit in digits
        if digit.owner is not None
    )


def needed_sharding(
    program: Program, expr: Expr, position: int, placement: Placement, mesh: DeviceMesh
) -> Sharding:
    """How the operand at `position` must lie for `expr` to compute at `placement` locally."""
    out = TensorName(expr.outs[0])
    places = {
        axis.name: (axis.extent, digits)
        for axis, digits in zip(program.tensor(out).maybe_root, placement, strict=True)
    }
    carried = carried_axes(program, expr, position, out)
    axes: list[Digits] = []
    for axis in program.tensor(TensorName(str(expr.ins[position]))).tensor_axes:
        whole: tuple[IntExpr, Digits] = (axis.extent, ())
        extent, digits = places[carried[axis.name]] if axis.name in carried else whole
        is_same = extent is axis.extent  # Sizes that meet may be equal and not known to be.
        axes.append(
            canonical(digits, extent, mesh) if is_same else digits_of_root(digits, axis, mesh)
        )
    return Sharding(mesh, tuple(axes), needed_terms(program, expr, position, mesh))


def produced_sharding(
    program: Program, expr: Expr, out: TensorName, placement: Placement, mesh: DeviceMesh
) -> Sharding:
    """How `out` lies after `expr` has computed at `placement`.

    Raises Unsupported for a reduction that cannot be finished across ranks.
    """
    definition = program.tensor(out)
    placement = placement_at(program, expr, out, placement, mesh)
    carried = carried_terms(program, expr, out, mesh)
    crossing = [axis for axis in crossing_axes(program, out, placement) if axis not in carried]
    function = reduction_function(expr)
    if crossing and function is None:
        raise Unsupported(
            f"decompose_resharding: {type(expr).__name__} {out} reduces an axis that {crossing[0]} "
            "shards, and its terms do not combine across ranks; reduce a set() of the operand that "
            "is replicated there"
        )
    if isinstance(expr, Reshape):
        return _reshaped(program, out, placement, mesh)
    if definition.root:
        if reduced_mesh_axes(program, out):
            raise Unsupported(
                f"decompose_resharding: {out} has root axes and a reduction across ranks; place "
                "the tensor on its mesh before taking its reduction apart"
            )
        return sharding_of(program, out)
    axes = tuple(
        canonical(digits, axis.extent, mesh)
        for axis, digits in zip(definition.logical, placement, strict=True)
        if axis.kind.is_tensor_axis
    )
    return Sharding(mesh, axes, {**carried, **{owner: str(function) for owner in crossing}})


def _reshaped(
    program: Program, out: TensorName, placement: Placement, mesh: DeviceMesh
) -> Sharding:
    definition = program.tensor(out)
    root = {a.name: digits for a, digits in zip(definition.root, placement, strict=True)}
    digits = digits_after_reshape(program, out, root, mesh)
    if digits is None:
        raise InvariantError(f"reshape {out} computes where ranks hold parts of blocks: {root}")
    return Sharding(mesh, tuple(digits[axis.name] for axis in definition.tensor_axes))


def reshape_placement(
    program: Program, expr: Reshape, placement: Placement, mesh: DeviceMesh
) -> Placement:
    """`placement`, but all axes whole where the pieces would not be whole ones of the result."""
    root = program.tensor(expr.out).root
    pieces = dict(zip((axis.name for axis in root), placement, strict=True))
    if digits_after_reshape(program, expr.out, pieces, mesh) is None:
        return tuple((Digit(axis.extent),) for axis in root)
    return placement


def is_local(program: Program, expr: Expr, mesh: DeviceMesh) -> bool:
    """Whether `expr`, no communication, needs and makes only what its ranks hold."""
    if isinstance(expr, Set):
        return sharding_of(program, expr.src) == sharding_of(program, expr.out)
    outs = tensor_outputs(program, expr)
    placement = placement_of(program, outs[0], mesh)
    return all(
        sharding_of(program, TensorName(str(expr.ins[position])))
        == needed_sharding(program, expr, position, placement, mesh)
        for position in placed_operands(program, expr)
    ) and all(
        sharding_of(program, out) == produced_sharding(program, expr, out, placement, mesh)
        for out in outs
    )


def placed_operands(program: Program, expr: Expr) -> tuple[int, ...]:
    """Positions of the tensor operands that have a mesh: all but CPU scalars."""
    return tuple(
        position
        for position, operand in enumerate(expr.ins)
        if is_tensor(program, operand)
        and program.schedule(TensorName(str(operand))).mesh is not None
    )


def new_local_result(
    program: Program, out: TensorName, placement: Placement, sharding: Sharding
) -> tuple[Program, TensorName]:
    """A tensor for what an expression computes at `placement` in place of `out`.

    A reduced axis that is spread over ranks splits between root and logical, and the part across
    ranks is partial:  root [m, r{k}], k at [2@x, k/2]  ->  logical [m, p{2}, r{k/2}], p bound to x
    """
    like = program.tensor(out)
    if like.root and all(axis.kind.is_tensor_axis for axis in like.root):
        return _new_reshaped(program, like, sharding)
    program, root = fresh_axes(program, [(_reduced_kind(a), a.extent) for a in like.maybe_root])
    logical: list[IterDomain] = []
    steps: list[Split] = []
    bindings: dict[AxisName, ParallelType] = {}
    for axis, digits in zip(root, placement, strict=True):
        if axis.kind.is_tensor_axis or is_whole(digits):
            logical.append(axis)
            continue
        digits = covering(digits, axis.extent)
        program, made, parts = split_into(program, axis.name, digits)
        steps.extend(made)
        for part, digit in zip(parts, digits, strict=True):
            kind = AxisKind.reduction if digit.owner is None else AxisKind.partial
            logical.append(IterDomain(part, kind, digit.extent))
            if digit.owner is not None:
                bindings[part] = digit.owner
    definition = TensorDef(like.dtype, tuple(logical), root if steps else (), tuple(steps))
    return place_tensor(program, definition, sharding, bindings)


def _new_reshaped(
    program: Program, like: TensorDef, sharding: Sharding
) -> tuple[Program, TensorName]:
    """A tensor that is reshaped as `like` is."""
    program, root = fresh_axes(program, [(axis.kind, axis.extent) for axis in like.root])
    renamed = {old.name: new.name for old, new in zip(like.root, root, strict=True)}
    program, steps = replay_steps(program, like.root_steps, renamed)
    logical = tuple(replace(axis, name=renamed[axis.name]) for axis in like.logical)
    return place_tensor(program, TensorDef(like.dtype, logical, root, steps), sharding, {})


def _reduced_kind(axis: IterDomain) -> AxisKind:
    return axis.kind if axis.kind.is_tensor_axis else AxisKind.reduction
