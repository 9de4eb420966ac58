"""Turn an expression whose tensors do not lie alike into local compute and pure communications."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import final

from meshfuse.base.dtypes import ITEM_BYTES
from meshfuse.base.errors import Unsupported
from meshfuse.base.trace import Note
from meshfuse.facts.facts import tensor_outputs
from meshfuse.facts.redistribute import COMMUNICATION_NAMES, Move, communication_of, plan
from meshfuse.facts.refusal import Refusal
from meshfuse.facts.reshape import digits_after_reshape, in_blocks
from meshfuse.facts.sharding import Digits, Sharding, canonical, owners_of, sharding_of
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import Communication, LocalSlice
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.ops import Expr, Linear, Pointwise, Reduction, Reshape, Set
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import Name, add_tensor, map_names, with_exprs
from meshfuse.passes.apply_sharding import new_sharded_tensor
from meshfuse.passes.linear_bias import separate_bias
from meshfuse.passes.operands import with_operands
from meshfuse.passes.placement import (
    Placement,
    crossing_axes,
    needed_sharding,
    new_local_result,
    placed_operands,
    placement_of,
    produced_sharding,
    reshape_placement,
)
from meshfuse.passes.sharding_rules import carried_axes, sharding_rule

STAGE = "decompose_resharding"


def decompose_resharding(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Make every expression local to its rank, or a communication.

    T1 = sum(T0, [1]), T0 split over mesh_x on axis 1, T1 replicated
    ->  T2 = sum(T0, [1]), T2 partial over mesh_x;  T1 = all_reduce(T2, mesh_x)

    The annotated tensor stays the redistribution's result and keeps its schedule; the local one is
    new. Raises Unsupported, naming the tensor, for what no sequence of communications reaches.
    """
    rewriting = _Rewriting(program)
    for expr in program.fusion.exprs:
        _decompose(rewriting, expr)
    return with_exprs(rewriting.program, rewriting.exprs), tuple(rewriting.notes)


@final
@dataclass(slots=True)
class _Rewriting:
    """The program with the tensors made so far, and the expressions that replace those seen.

    `moved` remembers redistributed operands, so that a tensor is gathered once for all that need it
    whole.
    """

    program: Program
    exprs: list[Expr] = field(default_factory=list[Expr])
    notes: list[Note] = field(default_factory=list[Note])
    moved: dict[tuple[TensorName, tuple[Digits, ...]], TensorName] = field(
        default_factory=dict[tuple[TensorName, tuple[Digits, ...]], TensorName]
    )


def _decompose(work: _Rewriting, expr: Expr) -> None:
    outs = tensor_outputs(work.program, expr)
    mesh = work.program.schedule(outs[0]).mesh if outs else None
    if mesh is None or isinstance(expr, Communication):
        work.exprs.append(expr)
    elif isinstance(expr, Set):
        _decompose_copy(work, expr)
    else:
        placement = placement_of(work.program, outs[0], mesh)
        crossing = crossing_axes(work.program, outs[0], placement)
        if crossing and isinstance(expr, Linear) and expr.bias is not None:
            work.program, parts = separate_bias(work.program, expr)
            for part in parts:
                _decompose(work, part)
        else:
            _decompose_compute(work, expr, mesh)


def _decompose_copy(work: _Rewriting, expr: Set) -> None:
    """A copy between shardings is a redistribution already."""
    program = work.program
    have, want = sharding_of(program, expr.src), sharding_of(program, expr.out)
    moves = _plan(program, expr.src, have, want)
    if moves:
        _communicate(
            work, expr.src, moves, f"{expr.out} is a copy of it placed otherwise", expr.out
        )
    else:
        work.exprs.append(expr)


def _decompose_compute(work: _Rewriting, expr: Expr, mesh: DeviceMesh) -> None:
    program, outs = work.program, tensor_outputs(work.program, expr)
    placement = _cheaper_placement(program, expr, placement_of(program, outs[0], mesh), mesh)
    if isinstance(expr, Reshape):
        placement = reshape_placement(program, expr, placement, mesh)
    operands = list(expr.ins)
    for position in placed_operands(program, expr):
        need = needed_sharding(program, expr, position, placement, mesh)
        operand = TensorName(str(expr.ins[position]))
        operands[position] = _moved_operand(work, operand, need, expr)
    renamed: dict[Name, Name] = {}
    results: list[tuple[TensorName, TensorName, Sharding]] = []
    for out in outs:
        made = produced_sharding(program, expr, out, placement, mesh)
        if made != sharding_of(program, out):
            work.program, local = new_local_result(work.program, out, placement, made)
            renamed[out] = local
            results.append((out, local, made))
            if isinstance(expr, Reshape):
                work.program = _without_root(work.program, out)
    work.exprs.append(map_names(with_operands(expr, operands), renamed))
    for out, local, made in results:
        moves = _plan(work.program, out, made, sharding_of(work.program, out))
        _communicate(work, local, moves, _result_reason(expr, out, made), out)


def _without_root(program: Program, tensor: TensorName) -> Program:
    """For a tensor that a communication is to define, which changes no axes."""
    definition = replace(program.tensor(tensor), root=(), root_steps=())
    return add_tensor(program, tensor, definition, program.schedule(tensor))


def _moved_operand(work: _Rewriting, operand: TensorName, need: Sharding, expr: Expr) -> TensorName:
    """The tensor that holds `operand` as `need` says: itself, or a redistribution, old or new."""
    have = sharding_of(work.program, operand)
    if have == need:
        return operand
    key = (operand, need.axes)
    if key not in work.moved:
        moves = _plan(work.program, operand, have, need)
        whole = all(digit.owner is None for digits in need.axes for digit in digits)
        reason = f"{operand} is needed {'whole' if whole else 'sharded'} by {_call(expr)}"
        work.moved[key] = _communicate(work, operand, moves, reason)
    return work.moved[key]


def _communicate(
    work: _Rewriting,
    src: TensorName,
    moves: tuple[Move, ...],
    reason: str,
    out: TensorName | None = None,
) -> TensorName:
    """Append the communications of `moves` from `src`; the last defines `out`, if given."""
    for position, move in enumerate(moves):
        if out is not None and position == len(moves) - 1:
            result = out
        else:
            work.program, result = new_sharded_tensor(work.program, src, move.after)
        size = move.elements * ITEM_BYTES[work.program.tensor(src).dtype]
        kind = COMMUNICATION_NAMES[move.communication]
        work.exprs.append(communication_of(move, result, src))
        work.notes.append(
            Note(STAGE, result, kind, reason, "" if kind == "local_slice" else str(size))
        )
        src = result
    return src


def _plan(program: Program, tensor: TensorName, have: Sharding, want: Sharding) -> tuple[Move, ...]:
    extents = [axis.extent for axis in program.tensor(tensor).tensor_axes]
    moves = plan(have, want, extents)
    if isinstance(moves, Refusal):
        raise Unsupported(f"{STAGE}: {tensor} cannot be redistributed: {moves.reason}")
    return moves


# Where to compute.


def _cheaper_placement(
    program: Program, expr: Expr, placement: Placement, mesh: DeviceMesh
) -> Placement:
    """Compute where the operands lie and move the result, if that leaves all operands in place.

    T1 = relu(T0), T0 split, T1 replicated: relu on the blocks, then gather. Contractions, whose
    results may be larger than their operands, keep the placement of the result; so does what only
    needs slicing.
    """
    rule = sharding_rule(expr)
    positions = placed_operands(program, expr)
    crossing = crossing_axes(program, TensorName(expr.outs[0]), placement)
    if rule is None or rule.priority is not None or crossing:
        return placement
    for position in positions:
        if not _moves_data(program, expr, position, placement, mesh):
            continue
        other = _placement_like(program, expr, position, placement, mesh)
        if isinstance(expr, Reshape) and not _makes_blocks(program, expr, other):
            return placement
        if other is not None and all(
            sharding_of(program, TensorName(str(expr.ins[k])))
            == needed_sharding(program, expr, k, other, mesh)
            for k in positions
        ):
            return other
        return placement
    return placement


def _makes_blocks(program: Program, expr: Reshape, placement: Placement | None) -> bool:
    """Whether ranks that compute at `placement` make blocks of the result."""
    axes = [axis.name for axis in program.tensor(expr.out).root]
    root = {} if placement is None else dict(zip(axes, placement, strict=True))
    found = digits_after_reshape(program, expr.out, root, None)
    return found is not None and all(map(in_blocks, found.values()))


def _moves_data(
    program: Program, expr: Expr, position: int, placement: Placement, mesh: DeviceMesh
) -> bool:
    operand = TensorName(str(expr.ins[position]))
    extents = [axis.extent for axis in program.tensor(operand).tensor_axes]
    need = needed_sharding(program, expr, position, placement, mesh)
    moves = plan(sharding_of(program, operand), need, extents)
    return isinstance(moves, Refusal) or any(m.communication is not LocalSlice for m in moves)


def _placement_like(
    program: Program, expr: Expr, position: int, placement: Placement, mesh: DeviceMesh
) -> Placement | None:
    """`placement`, but the axes of one operand as that has them; None if one has no place."""
    operand, out = TensorName(str(expr.ins[position])), TensorName(expr.outs[0])
    carried = carried_axes(program, expr, position, out)
    root = program.tensor(out).maybe_root
    places = {axis.name: place for place, axis in enumerate(root)}
    found: dict[int, Digits] = {}
    axes = program.tensor(operand).tensor_axes
    for axis, digits in zip(axes, sharding_of(program, operand).axes, strict=True):
        place = places[carried[axis.name]] if axis.name in carried else None
        spread = bool(owners_of(digits, mesh))
        if spread and (place is None or not root[place].kind.is_tensor_axis):
            return None
        if place is not None:
            found[place] = canonical(digits, root[place].extent, mesh)
    used = {owner for digits in found.values() for owner in owners_of(digits, mesh)}
    if any(
        used.intersection(owners_of(digits, mesh))
        for place, digits in enumerate(placement)
        if place not in found
    ):
        return None
    return tuple(found.get(place, digits) for place, digits in enumerate(placement))


# Reasons.


def _call(expr: Expr) -> str:
    """`linear T5`: an expression by its name and first output."""
    name = expr.function if isinstance(expr, Pointwise | Reduction) else type(expr).__name__.lower()
    return f"{name} {expr.outs[0]}"


def _result_reason(expr: Expr, out: TensorName, made: Sharding) -> str:
    if made.partial:
        over = ", ".join(map(str, made.partial))
        return f"{_call(expr)} reduces an axis that is sharded over {over}"
    return f"{out} is computed where the operands of {_call(expr)} lie"
