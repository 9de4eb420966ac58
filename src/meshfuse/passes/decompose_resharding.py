"""Turn an expression whose tensors do not lie alike into local compute and pure communications."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from meshfuse.base.dtypes import ITEM_BYTES
from meshfuse.base.errors import Unsupported
from meshfuse.base.trace import Note
from meshfuse.facts.digits import is_whole
from meshfuse.facts.facts import output_names, tensor_outputs
from meshfuse.facts.redistribute import COMMUNICATION_NAMES, Move, communication_of
from meshfuse.facts.refusal import Refusal
from meshfuse.facts.sharding import Sharding, sharding_of
from meshfuse.facts.views import View
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import Communication
from meshfuse.ir.ops import Expr, Linear, Reshape, Set, Welford
from meshfuse.ir.printer import op_name
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import (
    Name,
    add_tensor,
    map_names,
    read_names,
    with_exprs,
    without_unnamed,
)
from meshfuse.passes.apply_sharding import new_sharded_tensor
from meshfuse.passes.before_views import lift, view_again
from meshfuse.passes.defer_reductions import defer_reductions
from meshfuse.passes.linear_bias import separate_bias
from meshfuse.passes.moments import combine_parts
from meshfuse.passes.operands import with_operands
from meshfuse.passes.placement import (
    crossing_axes,
    needed_sharding,
    new_local_result,
    placed_operands,
    placement_at,
    produced_sharding,
)
from meshfuse.passes.sites import Site, cheapest_site, moved_bytes, moves_between

STAGE = "decompose_resharding"


def decompose_resharding(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Make every expression local to its rank, or a communication.

    T1 = sum(T0, [1]), T0 split over mesh_x on axis 1, T1 replicated
    ->  T2 = sum(T0, [1]), T2 partial over mesh_x;  T1 = all_reduce(T2, mesh_x)

    The annotated tensor stays the redistribution's result and keeps its schedule; the local one is
    new. Raises Unsupported, naming the tensor, for what no sequence of communications reaches.
    """
    rewriting = _Rewriting(program, _count_readers(program.fusion.exprs))
    for expr in program.fusion.exprs:
        _decompose(rewriting, expr)
    program, notes = _without_bypassed(rewriting)
    return defer_reductions(program, notes)


@final
@dataclass(slots=True, eq=False, repr=False)
class _Rewriting:
    """The program with the tensors made so far, and the expressions that replace those seen.

    `copies` has the tensors that hold another one's value, placed otherwise, by that other one's
    name; `origins` leads from them to it. `bypassed` are copies, and views, in whose place another
    was read. `views` are those that compute where their results lie. `readers` has for each tensor
    how many expressions read it as the program was.
    """

    program: Program
    readers: Mapping[Name, int]
    exprs: list[Expr] = field(default_factory=list[Expr])
    notes: list[Note] = field(default_factory=list[Note])
    copies: dict[TensorName, list[TensorName]] = field(
        default_factory=dict[TensorName, list[TensorName]]
    )
    origins: dict[TensorName, TensorName] = field(default_factory=dict[TensorName, TensorName])
    bypassed: dict[TensorName, TensorName] = field(default_factory=dict[TensorName, TensorName])
    views: dict[TensorName, View] = field(default_factory=dict[TensorName, View])

    def note_copy(self, copy: TensorName, source: TensorName) -> None:
        origin = self.origins.get(source, source)
        self.origins[copy] = origin
        self.copies.setdefault(origin, []).append(copy)


def _count_readers(exprs: Iterable[Expr]) -> Counter[Name]:
    return Counter(name for expr in exprs for name in set(read_names(expr)))


def _without_bypassed(work: _Rewriting) -> tuple[Program, tuple[Note, ...]]:
    """Drop copies and views that nothing reads, as their readers found what they need elsewhere."""
    readers = Counter(name for expr in work.exprs for name in read_names(expr))
    outputs = output_names(work.program)
    kept: list[Expr] = []
    dropped: dict[TensorName, TensorName] = {}
    for expr in reversed(work.exprs):
        if isinstance(expr, Communication | Set | View) and expr.out in work.bypassed:
            if not readers[expr.out] and expr.out not in outputs:
                dropped[expr.out] = work.bypassed[expr.out]
                readers[expr.src] -= 1
                if expr.src in work.origins:
                    work.bypassed.setdefault(expr.src, dropped[expr.out])
                continue
        kept.append(expr)
    notes = [note for note in work.notes if note.subject not in dropped]
    for copy, source in sorted((k, v) for k, v in dropped.items() if k not in work.views):
        notes.append(Note(STAGE, copy, "not_moved", f"what reads it takes its parts from {source}"))
    program = with_exprs(work.program, kept[::-1])
    return (without_unnamed(program) if dropped else program), tuple(notes)


def _decompose(work: _Rewriting, expr: Expr) -> None:
    outs = tensor_outputs(work.program, expr)
    mesh = work.program.schedule(outs[0]).mesh if outs else None
    if mesh is None or isinstance(expr, Communication):
        work.exprs.append(expr)
    elif isinstance(expr, Set):
        _decompose_copy(work, expr)
    else:
        site = cheapest_site(work.program, expr, mesh)
        crossing = crossing_axes(work.program, outs[0], site.placement)
        if crossing and isinstance(expr, Linear) and expr.bias is not None:
            work.program, parts = separate_bias(work.program, expr)
            for part in parts:
                _decompose(work, part)
        else:
            _decompose_compute(work, expr, site)


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


def _decompose_compute(work: _Rewriting, expr: Expr, site: Site) -> None:
    operands = list(expr.ins)
    for position in placed_operands(work.program, expr):
        need = needed_sharding(work.program, expr, position, site.placement, site.mesh)
        operand = TensorName(str(expr.ins[position]))
        operands[position] = _moved_operand(work, operand, need, expr)
    renamed: dict[Name, Name] = {}
    results: list[tuple[TensorName, TensorName, Sharding]] = []
    for out in tensor_outputs(work.program, expr):
        made = produced_sharding(work.program, expr, out, site.placement, site.mesh)
        if made != sharding_of(work.program, out):
            placement = placement_at(work.program, expr, out, site.placement, site.mesh)
            work.program, local = new_local_result(work.program, out, placement, made)
            renamed[out] = local
            results.append((out, local, made))
    made_there = map_names(with_operands(expr, operands), renamed)
    work.exprs.append(made_there)
    if isinstance(made_there, View) and not renamed:
        work.views[made_there.out] = made_there
    if isinstance(expr, Welford) and results and results[0][2].partial:
        locals_ = tuple(local for _, local, _ in results)
        work.program, stacked, combining = combine_parts(work.program, expr, locals_)
        work.exprs.extend(stacked)
        _decompose(work, combining)
        return
    for out, local, made in results:
        if isinstance(expr, Reshape):
            work.program = _without_root(work.program, out)
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
    source, moves = _nearest(work, operand, need)
    viewed = _view_of_moved(work, operand, need, moved_bytes(work.program, source, moves), expr)
    if viewed is not None:
        return viewed
    if moves:
        source = _communicate(work, source, moves, _operand_reason(operand, have, need, expr))
    if source != operand and operand in work.origins:
        work.bypassed[operand] = source
    return source


def _view_of_moved(
    work: _Rewriting, operand: TensorName, need: Sharding, cost: int, expr: Expr
) -> TensorName | None:
    """`operand`, if it is a view, as a view of what others may need as well; if that costs no more.

    None where it does, or nothing has to move.
    """
    lifted = lift(work.program, operand, need, work.views, work.readers) if cost else None
    if lifted is None:
        return None
    source, moves = _nearest(work, lifted.tensor, lifted.need)
    if moved_bytes(work.program, source, moves) > cost:
        return None
    found = _moved_operand(work, lifted.tensor, lifted.need, expr)
    for view, placement, made in lifted.views:
        work.program, again, found = view_again(work.program, view, placement, made, found)
        work.exprs.append(again)
        work.bypassed[view.out] = found
    work.note_copy(found, operand)
    return found


def _nearest(
    work: _Rewriting, operand: TensorName, need: Sharding
) -> tuple[TensorName, tuple[Move, ...]]:
    """The tensor of the operand's value from which the fewest bytes move, and those moves.

    What is gathered and sliced again is read where it was sharded; what is needed at two places
    moves once.
    """
    program = work.program
    best, moves = operand, _plan(program, operand, sharding_of(program, operand), need)
    cost = moved_bytes(program, operand, moves)
    origin = work.origins.get(operand, operand)
    for other in (origin, *work.copies.get(origin, ())):
        if not moves:
            break
        found = _plan(program, other, sharding_of(program, other), need)
        other_cost = moved_bytes(program, other, found)
        if other_cost < cost or not found:
            best, moves, cost = other, found, other_cost
    return best, moves


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
        if not sharding_of(work.program, src).partial:
            work.note_copy(result, src)
        src = result
    return src


def _plan(program: Program, tensor: TensorName, have: Sharding, want: Sharding) -> tuple[Move, ...]:
    moves = moves_between(program, tensor, have, want)
    if isinstance(moves, Refusal):
        raise Unsupported(f"{STAGE}: {tensor} cannot be redistributed: {moves.reason}")
    return moves


# Reasons.


def _call(expr: Expr) -> str:
    """`linear T5`: an expression by its name and first output."""
    return f"{op_name(expr)} {expr.outs[0]}"


def _operand_reason(operand: TensorName, have: Sharding, need: Sharding, expr: Expr) -> str:
    if have.mesh != need.mesh:
        return f"{operand} lies on {have.mesh}, and {_call(expr)} is computed on {need.mesh}"
    whole = all(map(is_whole, need.axes))
    return f"{operand} is needed {'whole' if whole else 'sharded'} by {_call(expr)}"


def _result_reason(expr: Expr, out: TensorName, made: Sharding) -> str:
    if made.partial:
        over = ", ".join(map(str, made.partial))
        return f"{_call(expr)} reduces an axis that is sharded over {over}"
    return f"{out} is computed where the operands of {_call(expr)} lie"
