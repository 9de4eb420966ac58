"""Bind host loops around communications and the contractions beside them, as a form says.

T2 = matmul(T0, T1);  T3 = all_reduce(T2, mesh_x), rows of T3 [a0{64}, ..], in 4 chunks
->  T3 [a1{4} on the stream, a2{16}, ..]: chunk k is reduced while chunk k + 1 is multiplied
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.trace import Note
from meshfuse.expr import const, const_value
from meshfuse.expr.polynomial import quotient_if_exact
from meshfuse.facts.axis_map import operand_axis_map
from meshfuse.facts.digits import digits_above, is_one_block
from meshfuse.facts.facts import Facts, facts_of, tensor_outputs
from meshfuse.facts.holdings import is_even
from meshfuse.facts.overlap_form import Overlap, Way
from meshfuse.facts.peers import delivers
from meshfuse.facts.sharding import local_extents, sharding_of
from meshfuse.facts.shared_loops import loops_of
from meshfuse.facts.streams import has_streams
from meshfuse.ir.axes import AxisKind, AxisName, TensorName
from meshfuse.ir.comm import AllGather, AllReduce, Communication, ReduceScatter
from meshfuse.ir.infer import is_tensor
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import Expr, Linear, MatMul
from meshfuse.ir.printer import op_name, print_expr
from meshfuse.ir.program import Program
from meshfuse.passes.bound_loops import Reached, bind_loop, team_size
from meshfuse.passes.propagate_streams import IN_LOOPS, propagate_streams

STAGE = "overlap"
BOUND = "overlapped"
"""Kind of the notes on communications that are in a loop."""


def bind_overlap(program: Program, form: Overlap) -> tuple[Program, tuple[Note, ...]]:
    """Bind stream leaves so that communications run beside contractions; notes say which.

    A program that has stream leaves, which are its user's, stays as it is. So does a communication
    that no contraction is next to, through operations that a loop may hold, or whose chunks ranks
    do not hold in one piece each.
    """
    if form.way is Way.plain:
        return program, ()
    if has_streams(program):
        reason = "the program has stream leaves of its user's, and those alone"
        return program, (Note(STAGE, "program", "not_overlapped", reason),)
    facts, notes, found = facts_of(program), list[Note](), list[_Binding]()
    for expr in program.fusion.exprs:
        if isinstance(expr, AllGather | AllReduce | ReduceScatter):
            binding = _find_binding(program, facts, expr, form)
            if isinstance(binding, str):
                notes.append(Note(STAGE, expr.out, "not_overlapped", binding))
            else:
                found.append(binding)
    kept, refused = _in_loops(program, found, form)
    bound = _bind_all(program, kept, form)
    return bound, (*notes, *refused, *(_note_bound(each, form) for each in kept))


def binds(notes: Sequence[Note]) -> bool:
    """Whether notes of `bind_overlap` say that it bound anything."""
    return any(note.kind == BOUND for note in notes)


@final
@frozen_dataclass
class _Binding:
    """Loop along `axis` of `tensor`, which holds a communication and `contraction`."""

    communication: Reached
    tensor: TensorName
    axis: AxisName
    contraction: Expr


# Where a loop could be.


def _find_binding(
    program: Program, facts: Facts, communication: Reached, form: Overlap
) -> _Binding | str:
    """The loop of a form around a communication, or why there is none."""
    reasons: list[str] = []
    beside = f"next to {op_name(communication)}"
    for found in _axes_for(program, communication, form):
        tensor, axis = found.tensor, found.axis
        contraction = _contraction_beside(program, facts, communication, found, form)
        if contraction is None:
            reasons.append(f"no contraction {beside} has axis {axis} of {tensor}")
        elif found.against is not None:
            reasons.append(found.against)
        elif found.held is not None and found.held < form.count:
            reasons.append(f"a rank holds {found.held} of axis {axis} of {tensor}")
        else:
            return _Binding(communication, tensor, axis, contraction)
    return "; ".join(reasons) or f"{op_name(communication)} has no axis for {form.way.value}"


@final
@frozen_dataclass
class _Axis:
    """An axis that a loop could be along. `held`: what a rank holds of what there are chunks of, if
    that is known. `against`: why there can be none."""

    tensor: TensorName
    axis: AxisName
    held: int | None
    against: str | None = None


def _axes_for(program: Program, communication: Reached, form: Overlap) -> Iterator[_Axis]:
    """Axes that a loop could be along, best first: from the outside.

    Peers have blocks of the axis that is gathered or scattered, or of any one of what all of them
    sum. Chunks are of any axis; of that one a chunk is a piece of each rank's block, of others what
    all ranks have alike.
    """
    is_by_peers = form.way is Way.peers
    if is_by_peers and isinstance(communication, AllReduce):
        yield from _axes_to_halve(program, communication, form)
        return
    moved = None if isinstance(communication, AllReduce) else communication.axis
    scatters = isinstance(communication, ReduceScatter)
    tensor = communication.src if scatters and is_by_peers else communication.out
    extents = local_extents(program, tensor)
    part = communication.out if scatters else communication.src
    for place, axis in enumerate(program.tensor(tensor).tensor_axes):
        is_moved = place == moved
        if axis.kind is not AxisKind.iteration or (is_by_peers and not is_moved):
            continue
        held = const_value(local_extents(program, part)[place] if is_moved else extents[place])
        against = None
        if is_moved and not is_by_peers and not isinstance(communication, AllReduce):
            against = _reason_against_pieces(program, part, place, communication.mesh_axis)
        yield _Axis(tensor, axis.name, held, against)


def _axes_to_halve(program: Program, reduce: AllReduce, form: Overlap) -> Iterator[_Axis]:
    """Axes of which each rank could sum a block, or one of each piece, and fetch the others'."""
    ranks, against = team_size(program, reduce.out, reduce.mesh_axis), None
    if reduce.function != "sum":
        against = f"peers deliver terms to be added, not for {reduce.function}"
    value, extents = program.tensor(reduce.out), local_extents(program, reduce.out)
    digits = sharding_of(program, reduce.out).axes
    for axis, extent, cuts in zip(value.tensor_axes, extents, digits, strict=True):
        held, unequal = const_value(extent), None
        is_cut = any(digit.owner is not None for digit in cuts)  # parts of blocks must be even
        is_even_needed = form.count > 1 or is_cut
        if is_even_needed and quotient_if_exact(extent, const(ranks * form.count)) is None:
            blocks = f"a block for each of {ranks} ranks"
            blocks = f"{form.count} pieces with {blocks}" if form.count > 1 else blocks
            unequal = f"axis {axis.name} of {reduce.out} has no {blocks}, all of one size"
        if axis.kind is AxisKind.iteration:
            part = None if held is None else held // ranks
            yield _Axis(reduce.out, axis.name, part, against or unequal)


def _reason_against_pieces(
    program: Program, part: TensorName, place: int, mesh_axis: ParallelType
) -> str | None:
    """Why ranks' parts of an axis, cut along a mesh axis, are not blocks of one size, which have
    like pieces."""
    axis = program.tensor(part).tensor_axes[place]
    digits = sharding_of(program, part).axes[place]
    above = digits_above(digits, mesh_axis)
    is_last = all(digit.owner is None for digit in digits[len(above) + 1 :])
    if not is_one_block(digits, mesh_axis) or not is_last:
        return f"what a rank holds of axis {axis.name} of {part} is no block of its team's"
    if not is_even(digits, axis.extent):
        return f"ranks may hold unequal parts of axis {axis.name} of {part}"
    return None


def _contraction_beside(
    program: Program, facts: Facts, communication: Reached, found: _Axis, form: Overlap
) -> Expr | None:
    """The nearest contraction whose result has the axis: behind a gather, before a reduction; or
    before a gather, of whose chunks ranks gather one while they make the next."""
    tensor, axis = found.tensor, found.axis
    if isinstance(communication, AllGather):
        behind = _search(program, facts, tensor, axis, _readers, set())
        if behind is not None or form.way is Way.peers:
            return behind
    if tensor == communication.src:
        return _search(program, facts, tensor, axis, _makers, set())
    start = _image(program, communication, 0, communication.out, axis)
    if start is None:
        return None
    return _search(program, facts, communication.src, start, _makers, set())


_Onward = Sequence[tuple[TensorName, AxisName]]
_Steps = Callable[[Program, Facts, TensorName, AxisName], Iterator[tuple[Expr, _Onward]]]
"""Expressions one step on, each with the tensors there that have the axis."""


def _search(
    program: Program,
    facts: Facts,
    tensor: TensorName,
    axis: AxisName,
    steps: _Steps,
    seen: set[TensorName],
) -> Expr | None:
    """The first contraction on a way of operations that a loop may hold, all with the axis."""
    if tensor in seen:
        return None
    seen.add(tensor)
    for expr, onward in steps(program, facts, tensor, axis):
        if isinstance(expr, Communication) or not isinstance(expr, IN_LOOPS):
            continue
        if isinstance(expr, MatMul | Linear):
            if onward:
                return expr
            continue
        for other, there in onward:
            found = _search(program, facts, other, there, steps, seen)
            if found is not None:
                return found
    return None


def _readers(
    program: Program, facts: Facts, tensor: TensorName, axis: AxisName
) -> Iterator[tuple[Expr, _Onward]]:
    """Who reads a tensor, with the results that have the axis."""
    for expr in facts.uses.get(tensor, ()):
        onward = [
            (out, image)
            for out in tensor_outputs(program, expr)
            for position, operand in enumerate(expr.ins)
            if operand == tensor
            for source, image in operand_axis_map(expr, program, position, out).items()
            if source == axis and _is_kept(program, out, image)
        ]
        yield expr, onward


def _makers(
    program: Program, facts: Facts, tensor: TensorName, axis: AxisName
) -> Iterator[tuple[Expr, _Onward]]:
    """Who makes a tensor, with the operands that have the axis."""
    expr = facts.definitions.get(tensor)
    if expr is None:
        return
    onward: list[tuple[TensorName, AxisName]] = []
    for position, operand in enumerate(expr.ins):
        if is_tensor(program, operand):
            source = _image(program, expr, position, tensor, axis)
            if source is not None:
                onward.append((TensorName(str(operand)), source))
    yield expr, onward


def _image(
    program: Program, expr: Expr, position: int, out: TensorName, axis: AxisName
) -> AxisName | None:
    """The axis of an operand that becomes `axis` of `out`."""
    pairs = operand_axis_map(expr, program, position, out).items()
    return next((source for source, image in pairs if image == axis), None)


def _is_kept(program: Program, tensor: TensorName, axis: AxisName) -> bool:
    """Whether it is an axis of the tensor, and not summed over."""
    return any(own.name == axis for own in program.tensor(tensor).tensor_axes)


# Binding.


def _in_loops(
    program: Program, found: Sequence[_Binding], form: Overlap
) -> tuple[list[_Binding], list[Note]]:
    """Those whose communication and contraction do come into a loop, and notes on the others.

    Tried all together: they are spread as the next pass will.
    """
    kept, refused = list(found), list[Note]()
    while kept:
        spread, said = propagate_streams(_bind_all(program, kept, form))
        reasons = {note.subject: note.reason for note in said if note.kind == "not_streamed"}
        failed = [each for each in kept if not _is_in_loop(spread, each)]
        for each in failed:
            names = (each.communication.out, each.tensor, *each.contraction.outs)
            reason = next((reasons[name] for name in names if name in reasons), "no loop has both")
            refused.append(Note(STAGE, each.communication.out, "not_overlapped", reason))
        if not failed:
            break
        kept = [each for each in kept if each not in failed]
    return kept, refused


def _is_in_loop(program: Program, binding: _Binding) -> bool:
    held = _communications_of(program, binding)
    loops = [loops_of(program, each) for each in (*held, binding.contraction)]
    if not all(loops) or len({found[0].span.count for found in loops}) > 1:
        return False
    if len(held) == 1:
        is_scattered = isinstance(held[0], ReduceScatter)
        if is_scattered and len(loops[-1]) > len(loops[0]):
            return False  # a block would be delivered behind all of its pieces
        return len({found[0].rotation for found in loops}) == 1
    return delivers(program, held[0])


def _communications_of(program: Program, binding: _Binding) -> tuple[Communication, ...]:
    """What a binding holds: a communication, or the two halves that are in its place."""
    definitions = facts_of(program).definitions
    found = definitions[binding.communication.out]
    if type(found) is type(binding.communication):
        return (binding.communication,)
    assert isinstance(found, AllGather)
    scatter = definitions[found.src]
    assert isinstance(scatter, ReduceScatter)
    return scatter, found


def _bind_all(program: Program, bindings: Sequence[_Binding], form: Overlap) -> Program:
    for binding in bindings:
        program = bind_loop(program, binding.communication, binding.tensor, binding.axis, form)
    return program


def _note_bound(binding: _Binding, form: Overlap) -> Note:
    reason = f"in {form}, along axis {binding.axis} of {binding.tensor}, beside "
    reason += print_expr(binding.contraction)
    return Note(STAGE, binding.communication.out, BOUND, reason)
