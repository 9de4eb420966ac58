"""One symbol for one size: extents that meet in an axis become equal."""

from __future__ import annotations

from collections.abc import Iterator

from meshfuse.base.trace import Note
from meshfuse.expr import Const, IntExpr, Symbol, const
from meshfuse.facts.axis_map import operand_axis_map
from meshfuse.facts.facts import tensor_outputs
from meshfuse.ir.axes import TensorName
from meshfuse.ir.infer import is_tensor
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import substitute_extents


def concretize(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Unify the symbols of axes that meet, so that equal sizes compare equal.

    T2 = add(T0, T1), T0 [i0, i1], T1 [i2, 8]  ->  i2 becomes i0, i1 becomes 8

    A static size wins, else the symbol of a scalar, else the one that the inputs name first: what
    is replaced is the size of an input, which a run checks. A symbol whose whole axis is bound to a
    mesh axis is the number of ranks along it. Sizes that are no symbols are left as they are.
    """
    parents: dict[IntExpr, IntExpr] = {}
    rank = {symbol: k for k, symbol in enumerate(_input_symbols(program))}

    def weight(size: IntExpr) -> int:
        if isinstance(size, Const):
            return -2
        return -1 if _is_scalar(program, size) else rank.get(size, len(rank))

    for left, right in _meetings(program):
        kept, dropped = sorted((_find(parents, left), _find(parents, right)), key=weight)
        if kept is not dropped and isinstance(dropped, Symbol) and not _is_scalar(program, dropped):
            parents[dropped] = kept
    if not parents:
        return program, ()
    return substitute_extents(program, {size: _find(parents, size) for size in parents}), ()


def _meetings(program: Program) -> Iterator[tuple[IntExpr, IntExpr]]:
    """Pairs of extents that must be equal, symbols and constants only."""
    for expr in program.fusion.exprs:
        for out in tensor_outputs(program, expr):
            target = {axis.name: axis.extent for axis in program.tensor(out).maybe_root}
            for position, operand in enumerate(expr.ins):
                if not is_tensor(program, operand):
                    continue
                axes = program.tensor(TensorName(str(operand))).tensor_axes
                extents = {axis.name: axis.extent for axis in axes}
                for axis, image in operand_axis_map(expr, program, position, out).items():
                    pair = (extents[axis], target[image])
                    if all(isinstance(size, Symbol | Const) for size in pair):
                        yield pair
    for output in program.fusion.outputs:
        if output.alias is not None:
            have, want = program.tensor(output.tensor), program.tensor(output.alias)
            for ours, theirs in zip(have.tensor_axes, want.tensor_axes, strict=True):
                yield ours.extent, theirs.extent
    yield from _whole_axes_on_a_mesh(program)


def _whole_axes_on_a_mesh(program: Program) -> Iterator[tuple[IntExpr, IntExpr]]:
    for tensor, schedule in program.schedules.items():
        extents = {axis.name: axis.extent for axis in program.tensor(tensor).logical}
        for leaf, owner in schedule.bindings.items():
            if leaf in extents and schedule.mesh is not None and schedule.mesh.has(owner):
                yield extents[leaf], const(schedule.mesh.axis_size(owner))


def _is_scalar(program: Program, size: IntExpr) -> bool:
    return isinstance(size, Symbol) and size.name in program.fusion.scalars


def _input_symbols(program: Program) -> Iterator[IntExpr]:
    """The sizes of the inputs in call order."""
    for name in program.fusion.inputs:
        if is_tensor(program, name):
            yield from (axis.extent for axis in program.tensor(TensorName(name)).logical)


def _find(parents: dict[IntExpr, IntExpr], size: IntExpr) -> IntExpr:
    while size in parents:
        size = parents[size]
    return size
