"""One size for what is one number: extents that meet in an axis become equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from meshfuse.base.trace import Note
from meshfuse.expr import (
    Const,
    IntExpr,
    IntLike,
    Symbol,
    const,
    const_value,
    free_symbols,
    substitute,
)
from meshfuse.facts.axis_map import element_counts, meeting_extents
from meshfuse.facts.digits import in_blocks
from meshfuse.facts.sharding import axis_digits, has_mesh_leaf
from meshfuse.ir.axes import TensorName
from meshfuse.ir.build_reshape import derive_reshape
from meshfuse.ir.infer import is_tensor
from meshfuse.ir.ops import Reshape
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import add_tensor, substitute_extents


def concretize(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Unify the symbols of axes that meet, so that equal sizes compare equal.

    T2 = add(T0, T1), T0 [i0, i1, 2*i0], T1 [i2, 8, i3]  ->  i2 becomes i0, i1 8, and i3 2*i0

    A static size wins, then the symbol of a scalar, a size made of others, and the symbol that the
    inputs name first: what is replaced is the size of an input, which a run checks. A symbol whose
    whole axis is bound to a mesh axis is the number of ranks along it. Other sizes that meet stay
    as they are, and a run compares them.
    """
    parents: dict[IntExpr, IntExpr] = {}
    rank = {symbol: k for k, symbol in enumerate(_input_symbols(program))}

    def weight(size: IntExpr) -> int:
        if isinstance(size, Const):
            return -3
        if not isinstance(size, Symbol):
            return -1
        return -2 if _is_scalar(program, size) else rank.get(size, len(rank))

    for left, right in _meetings(program):
        kept, dropped = sorted((_find(parents, left), _find(parents, right)), key=weight)
        if kept is dropped or not isinstance(dropped, Symbol) or _is_scalar(program, dropped):
            continue
        if isinstance(kept, Const) and not _keeps_parts(program, parents, dropped, kept):
            continue
        if dropped not in free_symbols(_resolved(parents, kept)):
            parents[dropped] = kept
    if not parents:
        return program, ()
    sizes = {size: _resolved(parents, size) for size in parents}
    return _derive_reshapes_anew(substitute_extents(program, sizes)), ()


def _derive_reshapes_anew(program: Program) -> Program:
    """With more sizes known to be equal, fewer axes are merged."""
    for expr in program.fusion.exprs:
        if isinstance(expr, Reshape):
            old = program.tensor(expr.out)
            own = [axis.extent for axis in old.root]
            changed, root, steps = derive_reshape(program, own, old.logical)
            if len(steps) < len(old.root_steps):
                definition = replace(old, root=root, root_steps=steps)
                program = add_tensor(changed, expr.out, definition, program.schedule(expr.out))
    return program


def _meetings(program: Program) -> Iterator[tuple[IntExpr, IntExpr]]:
    """Pairs of extents that must be equal."""
    for _, extent, other in meeting_extents(program):
        yield other, extent
    for _, have, want in element_counts(program):
        yield want, have
    yield from _whole_axes_on_a_mesh(program)


def _whole_axes_on_a_mesh(program: Program) -> Iterator[tuple[IntExpr, IntExpr]]:
    for tensor, schedule in program.schedules.items():
        extents = {axis.name: axis.extent for axis in program.tensor(tensor).logical}
        for leaf, owner in schedule.bindings.items():
            if leaf in extents and schedule.mesh is not None and schedule.mesh.has(owner):
                yield extents[leaf], const(schedule.mesh.axis_size(owner))


def _keeps_parts(
    program: Program, parents: Mapping[IntExpr, IntExpr], size: IntExpr, value: Const
) -> bool:
    """Whether ranks hold the same parts of axes of `size` once it is known to be `value`.

    Of strided pieces that do not divide an axis of unknown size the last digit takes the rest; of
    one that is known the first does, as nothing tells them apart.
    """
    for tensor, definition in program.fusion.tensors.items():
        for axis in definition.logical if has_mesh_leaf(program, tensor) else ():
            if _find(parents, axis.extent) is not size:
                continue
            digits = axis_digits(program, tensor)[axis.name]
            pieces = (const_value(substitute(d.extent, {axis.extent: value})) for d in digits)
            if not in_blocks(digits) and prod(n or 0 for n in pieces) != value.value:
                return False
    return True


def _is_scalar(program: Program, size: IntExpr) -> bool:
    return isinstance(size, Symbol) and size.name in program.fusion.scalars


def _input_symbols(program: Program) -> Iterator[IntExpr]:
    """The sizes of the inputs in call order."""
    for name in program.fusion.inputs:
        if is_tensor(program, name):
            yield from (axis.extent for axis in program.tensor(TensorName(name)).logical)


def _find(parents: Mapping[IntExpr, IntExpr], size: IntExpr) -> IntExpr:
    while size in parents:
        size = parents[size]
    return size


def _resolved(parents: Mapping[IntExpr, IntExpr], size: IntExpr) -> IntExpr:
    """`size` in symbols that stay."""
    size = _find(parents, size)
    while not isinstance(size, Symbol | Const):
        known: dict[str | IntExpr, IntLike] = {
            symbol: _find(parents, symbol) for symbol in free_symbols(size) if symbol in parents
        }
        if not known:
            break
        size = _find(parents, substitute(size, known))
    return size
