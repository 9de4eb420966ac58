"""Law 1: the same tensors as one rank sees them, with local extents and no mesh.

    T0 [a0:i{8}], a0 split in 2 over mesh_x   ->   T0 [a0:i{4}]
    T0 [a0:i{7}], a0 split in 2 over mesh_x   ->   T0 [a0:i{e0}],  sizes {e0: min(4, 7 - 4*x_2_0)}

Mesh leaves vanish with the splits that made them, partial axes with the root they came from. A
local extent that is no constant and no symbol becomes a fresh size symbol, so that a kernel does
not depend on how its tensors are sharded, nor on the rank: one kernel serves blocks of all sizes.
Integer operands speak of global sizes and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from meshfuse.base.errors import InvariantError, Unsupported
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import Const, IntExpr, Symbol, const, free_symbols, symbol
from meshfuse.facts.sharding import Digits, axis_digits, canonical, rank_extent
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, TensorName
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.ops import Reduction, Welford
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import (
    Merge,
    Schedule,
    Split,
    Step,
    Swizzle1d,
    step_results,
    step_sources,
)


@final
@frozen_dataclass
class Localized:
    """A Program of local extents, and what its size symbols are in the sizes of the global one and
    the coordinates of the rank."""

    program: Program
    sizes: Mapping[str, IntExpr]


def localize(program: Program) -> Localized:
    """The program of one rank.

    Raises Unsupported for stream leaves, and for kernel schedules that a mesh split does not leave
    whole.
    """
    namer = _SizeNamer(_names_in_use(program), {}, {})
    tensors: dict[TensorName, TensorDef] = {}
    schedules: dict[TensorName, Schedule] = {}
    reducing = (expr for expr in program.fusion.exprs if isinstance(expr, Reduction | Welford))
    ranks = {out: program.tensor(expr.src).ndim for expr in reducing for out in expr.outs}
    for name in program.fusion.tensors:
        tensors[name] = _local_definition(program, name, ranks.get(name, 0), namer)
        schedules[name] = _local_schedule(program, name, tensors[name])
    namer.note_symbols(
        operand
        for expr in program.fusion.exprs
        for operand in expr.ins
        if isinstance(operand, IntExpr)
    )
    namer.note_symbols(
        step.factor
        for schedule in schedules.values()
        for step in schedule.steps
        if isinstance(step, Split)
    )
    fusion = replace(program.fusion, tensors=tensors)
    return Localized(replace(program, fusion=fusion, schedules=schedules), namer.sizes)


# Extents.


@final
@dataclass(slots=True, eq=False, repr=False)
class _SizeNamer:
    """Gives local extents their symbols: mutable, private to one call of `localize`."""

    taken: frozenset[str]
    symbols: dict[IntExpr, IntExpr]
    sizes: dict[str, IntExpr]

    def local(self, extent: IntExpr) -> IntExpr:
        """A constant or symbol as it is, anything else as one fresh symbol per expression."""
        if isinstance(extent, Const):
            return extent
        if isinstance(extent, Symbol):
            self.sizes[extent.name] = extent
            return extent
        if extent not in self.symbols:
            name = self._fresh()
            fact = symbol(name, extent.low, extent.high, max(extent.divisor, 1))
            self.symbols[extent], self.sizes[name] = fact, extent
        return self.symbols[extent]

    def _fresh(self) -> str:
        number = len(self.symbols)
        while f"e{number}" in self.taken or f"e{number}" in self.sizes:
            number += 1
        return f"e{number}"

    def note_symbols(self, expressions: Iterable[IntExpr]) -> None:
        """Global sizes that stay in the program."""
        for e in expressions:
            self.sizes.update({found.name: found for found in free_symbols(e)})


def _names_in_use(program: Program) -> frozenset[str]:
    names: set[str] = {*program.fusion.tensors, *program.fusion.scalars}
    for definition in program.fusion.tensors.values():
        for axis in (*definition.root, *definition.logical):
            names.update(found.name for found in free_symbols(axis.extent))
    return frozenset(names)


def _local_definition(
    program: Program, tensor: TensorName, reduced_rank: int, namer: _SizeNamer
) -> TensorDef:
    """A partial axis has no local form; what is left of a reduced one is what the rank has of it.

    T2 [p{2}, i{4}] = sum(T0, [0]), axis 0 of T0 whole on the mesh  ->  T2 [r{1}, i{4}]
    T2 [p{2}, r{4}, i{4}] = sum(T0, [0]), of 7 elements             ->  T2 [r{e0}, i{4}]

    `reduced_rank`: how many axes the tensor has that is reduced, 0 if none is. Partial axes behind
    those are the operand's.
    """
    definition, mesh = program.tensor(tensor), program.schedule(tensor).mesh
    digits, axes = axis_digits(program, tensor), program.all_axes(tensor)

    def local_size(axis: AxisName) -> IntExpr:
        own = canonical(digits[axis], axes[axis].extent, mesh)
        return namer.local(rank_extent(own, axes[axis].extent, mesh))

    def local_axis(axis: IterDomain) -> IterDomain:
        """A broadcast axis that some ranks do not have is no broadcast axis."""
        extent = local_size(axis.name)
        is_spread = axis.kind is AxisKind.broadcast and extent is not const(1)
        return IterDomain(axis.name, AxisKind.iteration if is_spread else axis.kind, extent)

    if _shows_terms_anew(definition, reduced_rank):
        definition = _without_terms(definition)
    if all(axis.kind is not AxisKind.partial for axis in definition.logical):
        logical = tuple(map(local_axis, definition.logical))
        local = replace(definition, logical=logical)
        return _with_local_root(program, tensor, local, digits, namer) if local.root else local
    reduced = {axis.name for axis in definition.maybe_root[:reduced_rank]}
    kept: list[IterDomain] = []
    gone: set[AxisName] = set()
    for origin, parts in _parts_by_origin(definition).items():
        here = [axis for axis in parts if axis.kind is not AxisKind.partial]
        if len(here) == len(parts):
            kept += map(local_axis, here)
        elif here:
            kept.append(replace(here[0], extent=local_size(origin)))
        elif origin in reduced:
            kept.append(IterDomain(parts[0].name, AxisKind.reduction, local_size(origin)))
        else:
            gone.add(origin)
    roots = [axis for axis in definition.root if axis.name not in gone]
    if roots and _reduced_places(kept) != _reduced_places(roots):
        raise InvariantError(f"localize: {tensor}: {kept} and its root {roots} differ in kinds")
    return replace(definition, logical=tuple(kept), root=(), root_steps=())


def _reduced_places(axes: Sequence[IterDomain]) -> list[bool]:
    return [axis.kind is AxisKind.reduction for axis in axes]


def _shows_terms_anew(definition: TensorDef, reduced_rank: int) -> bool:
    """Whether it is a reshape of terms, whose partial axes are the operand's.

    T2 [i{6}, p{2}], root [i{2}, i{3}, p{2}]  ->  T2 [i{6}], root [i{2}, i{3}]
    """
    root = {axis.name for axis in definition.root}
    terms = (axis for axis in definition.logical if axis.kind is AxisKind.partial)
    return not reduced_rank and bool(root) and all(axis.name in root for axis in terms)


def _without_terms(definition: TensorDef) -> TensorDef:
    logical, root = (
        tuple(axis for axis in axes if axis.kind is not AxisKind.partial)
        for axes in (definition.logical, definition.root)
    )
    return replace(definition, logical=logical, root=root)


def _parts_by_origin(definition: TensorDef) -> dict[AxisName, list[IterDomain]]:
    """Each axis of the op, with what it has been split into, in the order of the logical axes."""
    origins = {axis.name: axis.name for axis in definition.maybe_root}
    for step in definition.root_steps:
        for made in step_results(step):
            origins[made] = origins[step_sources(step)[0]]
    parts: dict[AxisName, list[IterDomain]] = {}
    for axis in definition.logical:
        parts.setdefault(origins[axis.name], []).append(axis)
    return parts


def _with_local_root(
    program: Program,
    tensor: TensorName,
    local: TensorDef,
    digits: Mapping[AxisName, Digits],
    namer: _SizeNamer,
) -> TensorDef:
    """The steps of a reshape on local sizes: what a rank holds of a merged axis is the product of
    what it holds of the parts.
    """
    axes, mesh = program.all_axes(tensor), program.schedule(tensor).mesh

    def local_size(axis: AxisName) -> IntExpr:
        if axis not in digits:
            raise Unsupported(
                f"localize: {tensor}, axis {axes[axis]}: a rank holds parts of blocks of it"
            )
        own = canonical(digits[axis], axes[axis].extent, mesh)
        return namer.local(rank_extent(own, axes[axis].extent, mesh))

    steps = tuple(
        replace(step, factor=local_size(step.inner if step.inner_split else step.outer))
        if isinstance(step, Split)
        else step
        for step in local.root_steps
    )
    root = tuple(replace(axis, extent=local_size(axis.name)) for axis in local.root)
    return replace(local, root=root, root_steps=steps)


# Schedules.


def _local_schedule(program: Program, tensor: TensorName, local: TensorDef) -> Schedule:
    """The schedule without mesh leaves, and without steps where it binds no other leaf."""
    schedule = program.schedule(tensor)
    axes = tuple(axis.name for axis in local.logical)
    bindings = {
        leaf: bound
        for leaf, bound in schedule.bindings.items()
        if not bound.is_mesh and bound != ParallelType.serial
    }
    for step in schedule.steps:
        if isinstance(step, Swizzle1d):
            raise Unsupported(
                f"localize: {tensor}, axis {step.source}: it is swizzled by {step.mesh_axis}, and "
                "a kernel does not know its rank; swizzle host loops only"
            )
    if ParallelType.stream in bindings.values():
        raise Unsupported(f"localize: {tensor} has a stream leaf; loop over its chunks first")
    if bindings or not any(bound.is_mesh for bound in schedule.bindings.values()):
        steps, leaves, renamed = _without_mesh(tensor, schedule)
        bindings = {renamed.get(leaf, leaf): bound for leaf, bound in bindings.items()}
    else:
        steps, leaves = (), axes
    return replace(schedule, leaves=leaves, steps=steps, bindings=bindings, mesh=None)


def _without_mesh(
    tensor: TensorName, schedule: Schedule
) -> tuple[tuple[Step, ...], tuple[AxisName, ...], dict[AxisName, AxisName]]:
    """Steps and leaves without mesh splits, and the axes that take the names of what they are cut
    from.

    a0 -> (a1 on the mesh, a2), a2 -> (a3, a4)   becomes   a0 -> (a3, a4)
    """
    names: dict[AxisName, AxisName] = {}
    kept: list[Step] = []
    for step in reversed(schedule.steps):
        on_mesh = [a for a in step_results(step) if schedule.binding(a).is_mesh]
        if not on_mesh:
            kept.insert(0, step)
        elif isinstance(step, Split) and len(on_mesh) == 1:
            rest = step.inner if step.outer in on_mesh else step.outer
            names[rest] = step.source
        else:
            raise _not_whole(tensor, on_mesh[0])
    for step in kept:
        sized = step.inner if isinstance(step, Split) and step.inner_split else None
        sized = step.outer if isinstance(step, Split) and not step.inner_split else sized
        if sized in names.values():
            raise _not_whole(tensor, sized)
    final = {old: _final_name(old, names) for old in names}
    derived = {axis for step in schedule.steps for axis in step_results(step)}
    leaves = tuple(
        final.get(leaf, leaf)
        for leaf in schedule.leaves
        if not (schedule.binding(leaf).is_mesh and leaf in derived)
    )
    return tuple(_renamed(step, final) for step in kept), leaves, final


def _not_whole(tensor: TensorName, axis: AxisName | None) -> Unsupported:
    return Unsupported(
        f"localize: {tensor}, axis {axis}: its mesh split stands below a split or merge for the "
        "kernel; split over the mesh first"
    )


def _final_name(axis: AxisName, names: Mapping[AxisName, AxisName]) -> AxisName:
    while axis in names:
        axis = names[axis]
    return axis


def _renamed(step: Step, names: Mapping[AxisName, AxisName]) -> Step:
    def new(axis: AxisName) -> AxisName:
        return names.get(axis, axis)

    match step:
        case Split(source, outer, inner):
            return replace(step, source=new(source), outer=new(outer), inner=new(inner))
        case Merge(outer, inner, out):
            return Merge(new(outer), new(inner), new(out))
        case Swizzle1d(source, out):
            return replace(step, source=new(source), out=new(out))
