"""Emit the anchors of a kernel: nested loops with stores and reductions at their leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from meshfuse.base.errors import ScheduleError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import Symbol
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.ops import Welford
from meshfuse.ir.program import Program
from meshfuse.kernel.accumulators import (
    Reducing,
    accumulator_dtypes,
    emit_end,
    emit_step,
    identities,
)
from meshfuse.kernel.elements import Element, Index, operand_elements
from meshfuse.kernel.frame import Frame, Position, is_never_empty, loop_symbol, position_in
from meshfuse.kernel.index import bounds_within, symbol_names
from meshfuse.kernel.nests import Nest
from meshfuse.kernel.nodes import BufferName, Carry, For, KernelOperand, Store, ValueName
from meshfuse.kernel.values import Emitter, convert, keep_reduced, value_at

Path = tuple[Symbol, ...]
"""The variables of the open serial loops, outermost first."""


@final
@frozen_dataclass
class Anchor:
    """What a kernel must do: a reduction, or without one the store of `nest.tensor`."""

    number: int
    nest: Nest
    reduction: Reducing | None
    waits: frozenset[int]
    """The numbers of the reductions whose results it needs."""

    def reduces_at(self, depth: int) -> bool:
        return self.reduction is not None and self.nest.serial[depth].reduced


Running = dict[int, tuple[ValueName, ...]]
"""The accumulators of reductions whose loops are open, by the number of their anchor."""


@final
@frozen_dataclass
class LoopEmitter:
    """Emits loops around values."""

    values: Emitter
    frame: Frame

    @property
    def program(self) -> Program:
        return self.values.program


def emit_anchors(
    emitter: LoopEmitter, anchors: Sequence[Anchor], path: Path, running: Running
) -> Running:
    """Emit anchors that all stand in the loops of `path`, each after those it waits for.

    Returns what the accumulators of `running` are at the end of this block.
    """
    running = dict(running)
    pending = list(anchors)
    while pending:
        if len(pending[0].nest.serial) == len(path):
            members = pending[:1]
            _emit_leaf(emitter, members[0], path, running)
        else:
            members = _sharing(pending, len(path))
            _emit_loop(emitter, members, path, running)
        pending = [anchor for anchor in pending if anchor not in members]
    return running


def _sharing(pending: Sequence[Anchor], depth: int) -> list[Anchor]:
    """The first anchor and those after it that can run in its next loop."""
    members = [pending[0]]
    extent = pending[0].nest.serial[depth].extent
    for anchor in pending[1:]:
        loops = anchor.nest.serial
        if len(loops) <= depth or loops[depth].extent is not extent:
            continue
        ready = {other.number for other in members if not other.reduces_at(depth)}
        if all(other.number in ready or other.number not in anchor.waits for other in pending):
            members.append(anchor)
    return members


def _emit_loop(
    emitter: LoopEmitter, members: Sequence[Anchor], path: Path, running: Running
) -> None:
    """One loop around `members`, then the ends of those reductions whose outermost loop it was."""
    body, depth = emitter.values.body, len(path)
    extent = members[0].nest.serial[depth].extent
    variable = body.fresh_variable()
    carried = [anchor for anchor in members if anchor.reduces_at(depth)]
    entry: Running = {
        anchor.number: tuple(body.fresh_value() for _ in _outs(anchor)) for anchor in carried
    }
    body.open(variable)
    after = emit_anchors(emitter, members, (*path, loop_symbol(variable, extent)), entry)
    statements = body.close()
    carries: list[Carry] = []
    for anchor in carried:
        carries += _carries(
            emitter, anchor, running.get(anchor.number), entry[anchor.number], after[anchor.number]
        )
    body.emit(For(variable, extent, tuple(carries), statements))
    for anchor in carried:
        if anchor.number in running:
            running[anchor.number] = entry[anchor.number]
        else:
            _end_reduction(emitter, anchor, path, entry[anchor.number])


def _outs(anchor: Anchor) -> tuple[TensorName, ...]:
    return () if anchor.reduction is None else anchor.reduction.outs


def _carries(
    emitter: LoopEmitter,
    anchor: Anchor,
    outer: tuple[KernelOperand, ...] | None,
    entry: tuple[ValueName, ...],
    following: tuple[ValueName, ...],
) -> list[Carry]:
    """The accumulators as carries, from the enclosing loop's or from the identity."""
    if anchor.reduction is None:
        return []
    dtypes = accumulator_dtypes(emitter.program, anchor.reduction)
    initial = outer or identities(emitter.program, anchor.reduction)
    tiles = tuple(axis.name for axis in emitter.frame.tile_axes_of(anchor.nest))
    columns = zip(entry, dtypes, initial, following, strict=True)
    return [Carry(*column, tiles) for column in columns]


# Leaves.


def _emit_leaf(emitter: LoopEmitter, anchor: Anchor, path: Path, running: Running) -> None:
    if anchor.reduction is None:
        _emit_store(emitter, anchor.nest, position_in(emitter.frame, anchor.nest, path))
    else:
        accumulators = running[anchor.number]
        running[anchor.number] = _emit_element(
            emitter, anchor, anchor.reduction, path, accumulators
        )


def _emit_store(emitter: LoopEmitter, nest: Nest, position: Position) -> None:
    """The store of one element; where a grid axis is none of the tensor's, by its first program."""
    for axis in emitter.frame.axes_missing_from(nest):
        if not is_never_empty(axis):
            raise ScheduleError(
                "grid-coverage",
                nest.tensor,
                None,
                f"it is stored once, but the kernel has {axis.extent} programs, perhaps none",
                "Store it in a kernel of its own.",
            )
    index = _tensor_index(emitter.program, nest.tensor, position)
    value = value_at(emitter.values, Element(nest.tensor, index, position.bounds))
    stored = convert(emitter.values, value, emitter.program.tensor(nest.tensor).dtype)
    mask = (*position.bounds, *emitter.frame.first_program_only(nest))
    emitter.values.body.emit(Store(BufferName(nest.tensor), index, stored.operand, mask))


def _emit_element(
    emitter: LoopEmitter, anchor: Anchor, expr: Reducing, path: Path, running: tuple[ValueName, ...]
) -> tuple[ValueName, ...]:
    """One element taken into a reduction; idle iterations of reduced axes leave it as it is."""
    nest, program = anchor.nest, emitter.program
    position = position_in(emitter.frame, nest, path)
    index = tuple(position.indices[axis.name] for axis in program.tensor(nest.tensor).maybe_root)
    terms = operand_elements(expr, program, Element(nest.tensor, index, position.bounds))
    operands = [
        convert(emitter.values, value_at(emitter.values, term), program.tensor(out).dtype).operand
        for term, out in zip(terms, expr.outs, strict=False)
    ]
    mask = bounds_within(position.bounds, _reduced_symbols(emitter, nest, position))
    return emit_step(emitter.values.body, expr, running, operands, mask)


def _reduced_symbols(emitter: LoopEmitter, nest: Nest, position: Position) -> frozenset[str]:
    """The loops and tile axes that run over axes reduced here, or later where this is a part.

    A part has elements for which no terms are left; they count when the parts are reduced.
    """
    return symbol_names(
        position.indices[axis.name]
        for axis in emitter.program.tensor(nest.tensor).maybe_root
        if axis.kind is AxisKind.reduction
    )


def _end_reduction(
    emitter: LoopEmitter, anchor: Anchor, path: Path, accumulators: tuple[ValueName, ...]
) -> None:
    """Combine lanes after the last loop and make the results available at their kept index."""
    expr, nest, program = anchor.reduction, anchor.nest, emitter.program
    if expr is None:
        return
    groups = zip(nest.tiles, emitter.frame.tile_axes_of(nest), strict=True)
    tiles = tuple(axis.name for group, axis in groups if group.reduced)
    of_counted_parts = isinstance(expr, Welford) and expr.src_count is not None  # all may be 0
    may_be_empty = of_counted_parts or any(
        axis.kind is AxisKind.reduction and (axis.extent.low or 0) < 1
        for axis in program.tensor(nest.tensor).maybe_root
    )
    values = emit_end(
        emitter.values.body, program, expr, accumulators, tiles, may_be_empty=may_be_empty
    )
    index = _tensor_index(program, nest.tensor, position_in(emitter.frame, nest, path))
    for out, value in zip(expr.outs, values, strict=True):
        keep_reduced(emitter.values, out, index, value)


def _tensor_index(program: Program, tensor: TensorName, position: Position) -> Index:
    return tuple(position.indices[axis.name] for axis in program.tensor(tensor).tensor_axes)
