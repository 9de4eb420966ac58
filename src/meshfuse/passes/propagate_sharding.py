"""Give every tensor a mesh and a sharding, from the few that the user annotated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from meshfuse.base.trace import Note
from meshfuse.facts.digits import gathered_from, is_whole
from meshfuse.facts.facts import output_names, tensor_operands, tensor_outputs
from meshfuse.facts.layout import allocation_of, layout_of
from meshfuse.facts.reshape import digits_after_reshape, is_whole_pieces
from meshfuse.facts.sharding import (
    Digits,
    Sharding,
    axis_digits,
    canonical,
    describe,
    has_mesh_leaf,
    mesh_axes_on,
    owners_of,
    reduced_mesh_axes,
    sharding_of,
)
from meshfuse.ir.axes import AxisKind, AxisName, TensorName
from meshfuse.ir.comm import Communication
from meshfuse.ir.fusion import Output
from meshfuse.ir.infer import is_tensor
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.ops import Broadcast, Expr, Permute, Reshape, Set, Squeeze
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import read_names, with_exprs
from meshfuse.passes.apply_sharding import is_free_leaf, new_sharded_tensor, shard_leaf
from meshfuse.passes.finalize_multidevice import check_tensor
from meshfuse.passes.reduced_leaves import bind_reduced
from meshfuse.passes.sharding_rules import carried_axes, sharding_rule
from meshfuse.passes.sites import (
    bytes_between,
    bytes_moved,
    cheapest_site,
    parameter_of,
    site_of_result,
)

STAGE = "propagate_sharding"

Offer = tuple[AxisName, Digits]
"""An axis of the receiving tensor and the digits it could take."""

Wanted = tuple[DeviceMesh | None, tuple[Offer, ...]]
"""A mesh, and the digits of all axes there."""


def propagate_sharding(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Spread shardings forward, then backward, from the tensors that have a mesh.

    T1 = relu(T0), T0 a0{i0} split by 2 over mesh_x, T1 free  ->  T1 is split alike

    Where operands disagree, the sharding wins for which the fewest bytes move, as far as sizes tell
    (`sites.py`), then the first by the rule's priority; what does not fit is moved by
    decomposition. Annotated tensors keep their shardings; a reduced leaf of theirs is bound where
    the operands are sharded on it. Inputs that are not annotated are replicated. Without a mesh
    anywhere nothing changes.
    """
    annotated = {t for t, schedule in program.schedules.items() if schedule.mesh is not None}
    for tensor in program.fusion.tensors:
        if tensor in annotated or has_mesh_leaf(program, tensor):
            check_tensor(program, tensor)
    if not annotated:
        return program, ()
    program, pinned = _follow_aliases(program, annotated)
    frozen = annotated | pinned
    exprs = program.fusion.exprs
    wanted = _wanted_by_views(program, frozen)
    for expr in exprs:
        program = _spread_forward(program, expr, frozen, wanted)
    for expr in reversed(exprs):
        program = _spread_backward(program, expr, frozen)
    reached = {t for t, schedule in program.schedules.items() if schedule.mesh is not None}
    for expr in exprs:
        program = _spread_forward(program, expr, reached, {})
    program = _give_mesh_to_rest(program)
    return program, tuple(_gathering_notes(program))


def _follow_aliases(
    program: Program, annotated: Container[TensorName]
) -> tuple[Program, set[TensorName]]:
    """An output written into an input's memory lies as that input does; a free input is whole.

    Of one that its user placed otherwise a copy is written.
    """
    default = _first_mesh(program)
    pinned: set[TensorName] = set()
    for output in program.fusion.outputs:
        if output.alias is None:
            continue
        lies = replace(
            sharding_of(program, output.alias),
            mesh=program.schedule(output.alias).mesh or default,
        )
        if output.tensor not in annotated:
            axes = program.tensor(output.tensor).tensor_axes
            offers = [(axis.name, digits) for axis, digits in zip(axes, lies.axes, strict=True)]
            program = _take(program, output.tensor, lies.mesh, offers)
            pinned.add(output.tensor)
        if sharding_of(program, output.tensor) != lies:
            program, copy = _copy_to_write(program, output, lies)
            pinned.add(copy)
    return program, pinned


def _copy_to_write(program: Program, output: Output, lies: Sharding) -> tuple[Program, TensorName]:
    """Let a copy, placed as the updated input is, go into it in place of the output."""
    program, copy = new_sharded_tensor(program, output.tensor, lies)
    if output.alias is not None:
        layout = layout_of(program, output.alias)
        allocation = allocation_of(program, copy, layout)
        schedule = replace(program.schedule(copy), allocation=allocation)
        program = program.with_schedule(copy, schedule)
    outputs = tuple(
        replace(other, tensor=copy) if other == output else other
        for other in program.fusion.outputs
    )
    program = replace(program, fusion=replace(program.fusion, outputs=outputs))
    return with_exprs(program, (*program.fusion.exprs, Set(copy, output.tensor))), copy


def _wanted_by_views(program: Program, frozen: Container[TensorName]) -> dict[TensorName, Wanted]:
    """How free tensors lie if they lie as the one view does that is made of them, and is placed.

    T1 = matmul(T0, ..), T2 = permute(T1), T2 split over mesh_x  ->  T1 split alike
    """
    fusion = program.fusion
    readers = Counter(name for expr in fusion.exprs for name in set(read_names(expr)))
    others = {*fusion.inputs, *output_names(program)}
    wanted: dict[TensorName, Wanted] = {}
    for expr in reversed(fusion.exprs):
        if not isinstance(expr, Broadcast | Permute | Squeeze) or readers[expr.src] > 1:
            continue
        free = expr.src not in frozen and expr.src not in others
        if free and (expr.out in frozen or expr.out in wanted):
            program = _spread_backward(program, expr, frozen)
            digits = axis_digits(program, expr.src)
            # What is derived of these axes has other names when the operands have been spread.
            offers = tuple((a.name, digits[a.name]) for a in program.tensor(expr.src).logical)
            wanted[expr.src] = (program.schedule(expr.src).mesh, offers)
    return wanted


# One expression.


def _spread_forward(
    program: Program,
    expr: Expr,
    frozen: Container[TensorName],
    wanted: Mapping[TensorName, Wanted],
) -> Program:
    """Offer the operands' shardings to the results, or give a result what is wanted of it.

    That for which fewer bytes move until it lies as wanted; the operands' for equal bytes.
    """
    offered = _spread_operands(program, expr, frozen)
    out = next((out for out in tensor_outputs(program, expr) if out in wanted), None)
    mesh, offers = wanted[out] if out is not None else (None, ())
    if out is None or mesh is None or offered.schedule(out).mesh != mesh:
        return offered
    there = _take(program, out, mesh, offers)
    there = bind_reduced(there, expr, out, _priority(there, expr))
    have, want = sharding_of(offered, out), sharding_of(there, out)
    moved = bytes_between(offered, out, have, want)
    if moved is None or _least_cost(there, expr) >= _least_cost(offered, expr) + moved:
        return offered
    return there


def _spread_operands(program: Program, expr: Expr, frozen: Container[TensorName]) -> Program:
    """Offer the operands' shardings to the results: in the order for which the fewest bytes move.

    Orders are compared where they come to different results: each operand may lead, the others
    follow by priority. The first one by priority wins a tie.
    """
    order = _priority(program, expr)
    outs = tensor_outputs(program, expr)
    if all(out in frozen for out in outs):
        for out in outs:
            program = bind_reduced(program, expr, out, order)
        return program
    first = _offer_in_order(program, expr, frozen, order)
    if _is_settled(program, expr, order):
        return first
    found = {_shardings(first, outs): first}
    for leader in _other_leaders(program, expr, order):
        others = tuple(position for position in order if position != leader)
        offered = _offer_in_order(program, expr, frozen, (leader, *others))
        found.setdefault(_shardings(offered, outs), offered)
    if len(found) == 1:
        return first
    return min(found.values(), key=lambda offered: _cost(offered, expr))


def _is_settled(program: Program, expr: Expr, order: Sequence[int]) -> bool:
    """Whether the first operand's sharding wins, whatever moves: a parameter's does."""
    return len(order) < 2 or parameter_of(program, expr) == expr.ins[order[0]]


def _other_leaders(program: Program, expr: Expr, order: Sequence[int]) -> Iterator[int]:
    """Operands behind the first that have something of their own to offer."""
    mesh = program.schedule(TensorName(str(expr.ins[order[0]]))).mesh
    for position in order[1:]:
        source = TensorName(str(expr.ins[position]))
        theirs = program.schedule(source).mesh
        if has_mesh_leaf(program, source) or theirs not in (None, mesh):
            yield position


def _shardings(program: Program, tensors: Sequence[TensorName]) -> str:
    """Equal for equal meshes and shardings of `tensors`, reduced axes included."""
    return ", ".join(
        f"{describe(sharding_of(program, tensor))} {reduced_mesh_axes(program, tensor)}"
        for tensor in tensors
    )


def _cost(program: Program, expr: Expr) -> float:
    mesh = program.schedule(tensor_outputs(program, expr)[0]).mesh
    assert mesh is not None
    moved = bytes_moved(program, expr, site_of_result(program, expr, mesh))
    return inf if moved is None else moved


def _least_cost(program: Program, expr: Expr) -> float:
    """Bytes that move for `expr` where decomposition computes it."""
    mesh = program.schedule(tensor_outputs(program, expr)[0]).mesh
    assert mesh is not None
    moved = bytes_moved(program, expr, cheapest_site(program, expr, mesh))
    return inf if moved is None else moved


def _offer_in_order(
    program: Program, expr: Expr, frozen: Container[TensorName], order: Sequence[int]
) -> Program:
    for out in tensor_outputs(program, expr):
        for position in order if out not in frozen else ():
            source = TensorName(str(expr.ins[position]))
            mesh = program.schedule(source).mesh
            if mesh is not None:
                digits = axis_digits(program, source)
                if isinstance(expr, Reshape):
                    offers = _reshaped_offers(program, expr, digits)
                else:
                    kept = _kept_axes(program, expr, position, out)
                    offers = [(kept[a], digits[a]) for a in kept]
                program = _take(program, out, mesh, offers)
        program = bind_reduced(program, expr, out, order)
    return program


def _reshaped_offers(
    program: Program, expr: Reshape, digits: Mapping[AxisName, Digits]
) -> list[Offer]:
    """What each sharded axis of the operand makes of the result's axes, where that is whole pieces.

    T1 [a, k] = reshape(T0 [a*k]), T0 split over mesh_x  ->  a of T1 is split alike
    """
    offers: list[Offer] = []
    for axis, image in carried_axes(program, expr, 0, expr.out).items():
        if is_whole(digits[axis]):
            continue
        found = digits_after_reshape(program, expr.out, {image: digits[axis]}, None)
        extents = {a.name: a.extent for a in program.tensor(expr.out).logical}
        pairs = (found or {}).items()
        offers += [(name, d) for name, d in pairs if is_whole_pieces(d, extents[name])]
    return offers


def _spread_backward(program: Program, expr: Expr, frozen: Container[TensorName]) -> Program:
    outs = [o for o in tensor_outputs(program, expr) if program.schedule(o).mesh is not None]
    if not outs:
        return program
    out = max(outs, key=lambda name: _parallelism(program, name))
    mesh, digits = program.schedule(out).mesh, axis_digits(program, out)
    reduced = {a.name for a in program.tensor(out).logical if a.kind is AxisKind.reduction}
    assert mesh is not None
    for position, operand in enumerate(expr.ins):
        source = TensorName(str(operand))
        if not is_tensor(program, operand) or source in frozen:
            continue
        carried = carried_axes(program, expr, position, out)
        # A mesh axis on reduced and kept leaves is a reduce-scatter: operands have the reduced.
        pairs = sorted(carried.items(), key=lambda pair: pair[1] not in reduced)
        offers = [(axis, digits[image]) for axis, image in pairs if image in digits]
        if isinstance(expr, Reshape):
            extents = {axis.name: axis.extent for axis in program.tensor(source).tensor_axes}
            offers = [(axis, canonical(d, extents[axis], None)) for axis, d in offers]
            offers = [offer for offer in offers if is_whole_pieces(offer[1], extents[offer[0]])]
        whole = source in program.fusion.inputs
        program = _take(program, source, mesh, [] if whole else offers)
    return program


def _take(
    program: Program, tensor: TensorName, mesh: DeviceMesh | None, offers: Iterable[Offer]
) -> Program:
    """Let a free tensor take the offered digits whose mesh axes it does not use yet."""
    if mesh is None or program.tensor(tensor).is_cpu:
        return program
    schedule = program.schedule(tensor)
    if schedule.mesh is None:
        program = program.with_schedule(tensor, replace(schedule, mesh=mesh))
    elif schedule.mesh != mesh:
        return program
    axes = program.tensor(tensor).logical
    extents = {axis.name: axis.extent for axis in axes}
    single = {axis.name for axis in axes if axis.kind is AxisKind.broadcast}
    for axis, digits in offers:
        if axis in single and owners_of(digits, mesh):
            continue  # One element is not shared.
        used = mesh_axes_on(program, tensor, AxisKind.iteration, AxisKind.broadcast)
        digits = gathered_from(digits, used)
        if not is_whole(digits) and is_free_leaf(program, tensor, axis):
            # No mesh: digits of mesh axes with one rank are bound, too, and appear in reports.
            program = shard_leaf(program, tensor, axis, canonical(digits, extents[axis], None))
    return program


# Order and bookkeeping.


def _priority(program: Program, expr: Expr) -> tuple[int, ...]:
    """Positions of the tensor operands, the one whose sharding comes first in front."""
    tensors = tuple(k for k, operand in enumerate(expr.ins) if is_tensor(program, operand))
    rule = sharding_rule(expr)
    if rule is not None and rule.priority is not None:
        return tuple(position for position in rule.priority if position in tensors)
    return tuple(sorted(tensors, key=lambda k: _parallelism(program, expr.ins[k]), reverse=True))


def _parallelism(program: Program, tensor: object) -> tuple[int, int]:
    """nvFuser's order: more sharded kept leaves, then a mesh of higher rank."""
    name = TensorName(str(tensor))
    mesh = program.schedule(name).mesh
    bound = mesh_axes_on(program, name, AxisKind.iteration, AxisKind.broadcast)
    return len(bound), 0 if mesh is None else mesh.ndim


def _kept_axes(
    program: Program, expr: Expr, position: int, out: TensorName
) -> Mapping[AxisName, AxisName]:
    tensor_axes = {axis.name for axis in program.tensor(out).tensor_axes}
    carried = carried_axes(program, expr, position, out)
    return {axis: image for axis, image in carried.items() if image in tensor_axes}


def _first_mesh(program: Program) -> DeviceMesh | None:
    meshes = (program.schedule(tensor).mesh for tensor in program.fusion.tensors)
    return next((mesh for mesh in meshes if mesh is not None), None)


def _give_mesh_to_rest(program: Program) -> Program:
    """What no expression reached is replicated, on the first mesh of the program."""
    mesh = _first_mesh(program)
    for tensor in program.fusion.tensors:
        if program.schedule(tensor).mesh is None:
            program = _take(program, tensor, mesh, ())
    return program


def _gathering_notes(program: Program) -> Iterable[Note]:
    for expr in program.fusion.exprs:
        if sharding_rule(expr) is None and not isinstance(expr, Communication):
            for source in tensor_operands(program, expr):
                if has_mesh_leaf(program, source):
                    reason = f"{type(expr).__name__} has no sharding rule: {source} is needed whole"
                    yield Note(STAGE, str(expr.outs[0]), "gathered", reason)
