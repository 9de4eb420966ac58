"""One symbol per size: extents that meet are equal, so that all but one are replaced.

    T0[i0, 8], T1[i1, i2]; T2[i0, 8] = add(T0, T1)  ->  T1[i0, 8]

A constant wins, then the symbol of a scalar, then the one that is defined first. What was merely
assumed when the program was defined becomes a demand on the inputs, which the host program checks.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshfuse.base.trace import Note
from meshfuse.expr import Const, IntExpr, Symbol
from meshfuse.facts.axis_map import axis_pairs
from meshfuse.ir.axes import AxisKind, ScalarName, TensorName
from meshfuse.ir.ops import Expr
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import substitute_extents


def unify_sizes(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Replace each symbol by the representative of the extents it meets. Leaves no Note."""
    parents: dict[IntExpr, IntExpr] = {}
    ranks = {extent: place for place, extent in enumerate(_extents(program))}

    def find(extent: IntExpr) -> IntExpr:
        while extent in parents:
            extent = parents[extent]
        return extent

    def precedence(extent: IntExpr) -> tuple[int, int]:
        if isinstance(extent, Symbol):
            return (1 if _is_scalar(program, extent) else 2), ranks[extent]
        return 0, ranks[extent]

    for met in _meetings(program):
        winner, loser = sorted(map(find, met), key=precedence)
        if winner is not loser and _may_win(winner) and _may_go(program, loser):
            parents[loser] = winner
    if not parents:
        return program, ()
    return substitute_extents(program, {extent: find(extent) for extent in parents}), ()


def _extents(program: Program) -> Iterator[IntExpr]:
    """Every extent, inputs' first."""
    fusion = program.fusion
    inputs = [TensorName(name) for name in fusion.inputs if name in fusion.tensors]
    seen: dict[IntExpr, None] = {}
    for name in (*inputs, *fusion.tensors):
        definition = fusion.tensors[name]
        seen.update(dict.fromkeys(axis.extent for axis in definition.maybe_root))
        seen.update(dict.fromkeys(axis.extent for axis in definition.logical))
    yield from seen


def _meetings(program: Program) -> Iterator[tuple[IntExpr, IntExpr]]:
    """Pairs of extents that the program takes to be equal."""
    for expr in program.fusion.exprs:
        yield from _expression_meetings(program, expr)
    for output in program.fusion.outputs:
        if output.alias is not None:
            pair = (program.tensor(output.tensor), program.tensor(output.alias))
            for ours, theirs in zip(*(definition.tensor_axes for definition in pair), strict=True):
                yield ours.extent, theirs.extent


def _expression_meetings(program: Program, expr: Expr) -> Iterator[tuple[IntExpr, IntExpr]]:
    """Pairs of extents, of an operand's axis and of the result's axis that it is."""
    for position, places in axis_pairs(expr, program).items():
        operand = expr.ins[position]
        target = program.tensor(TensorName(expr.outs[0])).maybe_root
        source = program.tensor(TensorName(str(operand))).tensor_axes
        for axis, place in zip(source, places, strict=True):
            if place is not None and axis.kind is not AxisKind.broadcast:
                if axis.extent is not target[place].extent:
                    yield axis.extent, target[place].extent


def _may_win(extent: IntExpr) -> bool:
    return isinstance(extent, Const | Symbol)


def _may_go(program: Program, extent: IntExpr) -> bool:
    """Only a symbol that stands for an input's size: a scalar keeps its own value."""
    return isinstance(extent, Symbol) and not _is_scalar(program, extent)


def _is_scalar(program: Program, extent: Symbol) -> bool:
    return ScalarName(extent.name) in program.fusion.scalars
