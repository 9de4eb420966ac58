"""Shardings: which rank holds what. Derived from loop nests, compared structurally."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial, singledispatch

from meshfuse.base.errors import InvariantError, Unsupported, UserError
from meshfuse.expr import IntExpr, ceildiv, const, const_value, known_multiple, mul
from meshfuse.expr.polynomial import quotient_if_exact
from meshfuse.facts.digits import (
    Digit,
    Digits,
    Sharding,
    is_whole,
    local_extent,
    remaining_digit,
)
from meshfuse.facts.holdings import coordinate_symbol, held_count
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, TensorName
from meshfuse.ir.comm import AllReduce, ReduceScatter
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.ir.ops import Expr, Linear, MatMul, Reduction, Welford
from meshfuse.ir.ops_indexing import IndexSelect, TakeAlongAxis
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Merge, Split, Step, Swizzle1d
from meshfuse.ir.terms import Terms

__all__ = [
    "UNSAID",
    "Digit",
    "Digits",
    "Sharding",
    "add_root_digits",
    "axis_digits",
    "axis_sharded_on",
    "canonical",
    "deal_digits",
    "describe",
    "describe_axes",
    "describe_digits",
    "has_mesh_leaf",
    "keep_owners",
    "local_extent",
    "local_extents",
    "mesh_axes_on",
    "owners_of",
    "rank_extent",
    "rank_extents",
    "reduced_mesh_axes",
    "reduction_function",
    "sharding_of",
    "written_sharding_of",
]

# Deriving.


def sharding_of(program: Program, tensor: TensorName) -> Sharding:
    """The sharding that the schedule of `tensor` says. Stream, block and thread leaves are local.

    Raises UserError for a mesh axis that the tensor's mesh lacks, Unsupported for a mesh leaf below
    a merge that belongs to neither of the merged axes.
    """
    waiting = [a for a in program.tensor(tensor).logical if a.kind is AxisKind.partial]
    given = program.fusion.exprs if waiting else None
    return program.remember("sharding", tensor, partial(_find_sharding, program, waiting), given)


def _find_sharding(program: Program, waiting: Sequence[IterDomain], tensor: TensorName) -> Sharding:
    mesh, axes = program.schedule(tensor).mesh, _tensor_digits(program, tensor)
    if not waiting:
        return Sharding(mesh, axes)
    digits, function = axis_digits(program, tensor), _reduction_behind(program, tensor)
    owners = {owner: function for a in waiting for owner in owners_of(digits[a.name], mesh)}
    return Sharding(mesh, axes, owners)


def written_sharding_of(program: Program, tensor: TensorName) -> Sharding:
    """As `sharding_of`, but mesh axes of one rank stay: what users are told, not what compares."""
    found, digits = sharding_of(program, tensor), axis_digits(program, tensor)
    axes = program.tensor(tensor).tensor_axes
    return replace(found, axes=tuple(canonical(digits[a.name], a.extent, None) for a in axes))


def _tensor_digits(program: Program, tensor: TensorName) -> tuple[Digits, ...]:
    """Canonical digits of the tensor axes."""
    return program.remember("tensor_digits", tensor, partial(_find_tensor_digits, program))


def _find_tensor_digits(program: Program, tensor: TensorName) -> tuple[Digits, ...]:
    axes, mesh = program.tensor(tensor).tensor_axes, program.schedule(tensor).mesh
    digits = axis_digits(program, tensor)
    return tuple(canonical(digits[axis.name], axis.extent, mesh) for axis in axes)


def axis_digits(program: Program, tensor: TensorName) -> Mapping[AxisName, Digits]:
    """The digits of each root and logical axis, tensor axis or not, as the loop nest has them.

    Left out are root axes of which ranks hold no whole pieces.
    """
    return program.remember("axis_digits", tensor, partial(_find_axis_digits, program))


def _find_axis_digits(program: Program, tensor: TensorName) -> Mapping[AxisName, Digits]:
    schedule, axes = program.schedule(tensor), program.all_axes(tensor)
    digits: dict[AxisName, Digits] = {}
    for leaf in schedule.leaves:
        binding = schedule.binding(leaf)
        if binding.is_mesh and schedule.mesh is not None and not schedule.mesh.has(binding):
            raise UserError(
                f"{tensor}, loop axis {axes[leaf]}: {binding} is no axis of {schedule.mesh}"
            )
        digits[leaf] = (Digit(axes[leaf].extent, binding if binding.is_mesh else None),)
    for step in reversed(schedule.steps):
        _undo(step, digits, axes, tensor)
    add_root_digits(program, tensor, digits)
    return digits


def add_root_digits(program: Program, tensor: TensorName, digits: dict[AxisName, Digits]) -> None:
    """To the digits of logical axes add those of the axes that they were made of.

    None for an axis of which these digits say no whole pieces.
    """
    axes = program.all_axes(tensor)
    for step in reversed(program.tensor(tensor).root_steps):
        _undo_root(step, digits, axes)


def _undo(
    step: Step,
    digits: dict[AxisName, Digits],
    axes: Mapping[AxisName, IterDomain],
    tensor: TensorName,
) -> None:
    """Add the digits of the axes that `step` consumes."""
    match step:
        case Split(source, outer, inner):
            digits[source] = digits[outer] + digits[inner]
        case Merge(outer, inner, out):
            pair = deal_digits(digits[out], axes[outer], axes[inner])
            if pair is None:
                owners = ", ".join(str(d.owner) for d in digits[out] if d.owner is not None)
                raise Unsupported(
                    f"sharding of {tensor}: axis {out} merges {axes[outer]} and {axes[inner]}, "
                    f"and what {owners} leaves to a rank of it, {describe_digits(digits[out])}, is "
                    f"no part of each; split {outer} or {inner} over {owners} before merging"
                )
            digits[outer], digits[inner] = pair
        case Swizzle1d(source, out):
            digits[source] = digits[out]  # which chunk a rank begins with is not compared


def _undo_root(
    step: Step, digits: dict[AxisName, Digits], axes: Mapping[AxisName, IterDomain]
) -> None:
    """As `_undo`, but without an entry for what cannot be told."""
    match step:
        case Split(source, outer, inner):
            if outer in digits and inner in digits:
                digits[source] = digits[outer] + digits[inner]
        case Merge(outer, inner, out):
            pair = deal_digits(digits[out], axes[outer], axes[inner]) if out in digits else None
            if pair is not None:
                digits[outer], digits[inner] = pair
        case Swizzle1d(source, out):
            if out in digits:
                digits[source] = digits[out]


def local_extents(program: Program, tensor: TensorName) -> tuple[IntExpr, ...]:
    """What one rank holds of each tensor axis; the largest block where blocks are uneven."""
    axes = _tensor_digits(program, tensor)
    return tuple(local_extent(digits) for digits in axes)


def rank_extents(program: Program, tensor: TensorName) -> tuple[IntExpr, ...]:
    """What the running rank holds of each tensor axis, over the symbols of its coordinates.

    As `local_extents` where blocks are even.
    """
    mesh = program.schedule(tensor).mesh
    digits = axis_digits(program, tensor)
    return tuple(
        rank_extent(canonical(digits[axis.name], axis.extent, mesh), axis.extent, mesh)
        for axis in program.tensor(tensor).tensor_axes
    )


def rank_extent(digits: Digits, extent: IntExpr, mesh: DeviceMesh | None) -> IntExpr:
    """What the running rank holds of an axis of canonical digits, as `rank_extents` does."""
    if mesh is None:
        return local_extent(digits)
    owners = owners_of(digits, mesh)
    return held_count(digits, extent, {owner: coordinate_symbol(mesh, owner) for owner in owners})


def reduced_mesh_axes(
    program: Program, tensor: TensorName
) -> tuple[tuple[ParallelType, AxisName], ...]:
    """Mesh axes bound below a reduced logical axis, with that axis: reductions that cross ranks.

    Mesh axes of size 1 are left out.
    """
    mesh = program.schedule(tensor).mesh
    reduced = [a for a in program.tensor(tensor).logical if a.kind is AxisKind.reduction]
    if mesh is None or not reduced or not has_mesh_leaf(program, tensor):
        return ()
    digits = axis_digits(program, tensor)
    return tuple((owner, a.name) for a in reduced for owner in owners_of(digits[a.name], mesh))


def has_mesh_leaf(program: Program, tensor: TensorName) -> bool:
    """Whether any leaf is bound to a mesh axis."""
    return any(binding.is_mesh for binding in program.schedule(tensor).bindings.values())


def mesh_axes_on(
    program: Program, tensor: TensorName, *kinds: AxisKind
) -> tuple[ParallelType, ...]:
    """The mesh axes bound to leaves of these kinds."""
    if not has_mesh_leaf(program, tensor):
        return ()
    bindings = program.schedule(tensor).bindings
    leaves = program.leaf_domains(tensor)
    return tuple(
        bindings[leaf.name]
        for leaf in leaves
        if leaf.kind in kinds and leaf.name in bindings and bindings[leaf.name].is_mesh
    )


# Normal form and questions.


def canonical(digits: Sequence[Digit], extent: IntExpr, mesh: DeviceMesh | None) -> Digits:
    """Drop digits that spread nothing, merge local neighbours; one takes what the others leave.

    [2@x, 3, n/6] -> [2@x, n/2]     [2, n/2] -> [n]     [1@x, n] -> [n] where x has one rank.
    [2, 2@x, 3] over 7 stays, as [ceil(ceil(n/3)/2), 2@x, 3] does.
    Without a mesh, every mesh digit stays.
    """
    if is_whole(digits):
        return (Digit(extent),)
    return _canonical(tuple(digits), extent, mesh)


@lru_cache(1 << 12)
def _canonical(digits: Digits, extent: IntExpr, mesh: DeviceMesh | None) -> Digits:
    """Found once: layers of a model have like shardings, and every pass asks for each."""
    one, merged = const(1), list[Digit]()
    for digit in digits:
        if digit.owner is not None and not _spreads(digit.owner, mesh):
            continue
        if digit.owner is not None:
            merged.append(_counting_ranks(digit, digit.owner, mesh))
        elif merged and merged[-1].owner is None:
            merged[-1] = Digit(merged[-1].extent * digit.extent)
        elif digit.extent is not one:
            merged.append(digit)
    if not merged:
        return (Digit(extent),)
    taking = remaining_digit(merged)
    if taking is None:
        return tuple(merged)
    for k, digit in enumerate(merged):
        if k != taking and digit.extent is const(0):  # of an empty axis, which `taking` says
            merged[k] = Digit(const(1))
    others = mul(const(1), *(digit.extent for k, digit in enumerate(merged) if k != taking))
    rest = extent if others is const(1) else ceildiv(extent, others)
    merged[taking] = Digit(rest)
    found = tuple(digit for digit in merged if digit.owner or digit.extent is not const(1))
    if rest is const(1) and any(digit.owner is None for digit in found):
        return _canonical(found, extent, mesh)  # Another one is the first now.
    return found or (Digit(extent),)


def keep_owners(
    digits: Sequence[Digit],
    owners: Sequence[ParallelType],
    extent: IntExpr,
    mesh: DeviceMesh | None,
) -> Digits:
    """The canonical digits after every mesh axis but `owners` is gathered."""
    kept = (digit if digit.owner in owners else Digit(digit.extent) for digit in digits)
    return canonical(tuple(kept), extent, mesh)


def owners_of(digits: Sequence[Digit], mesh: DeviceMesh | None) -> tuple[ParallelType, ...]:
    """The mesh axes that own a digit, most significant first, those of size 1 left out."""
    return tuple(d.owner for d in digits if d.owner is not None and _spreads(d.owner, mesh))


def axis_sharded_on(sharding: Sharding, parallel_type: ParallelType) -> int:
    """The tensor axis that a mesh axis shards; -1 if none: replicated or partial along it."""
    for position, digits in enumerate(sharding.axes):
        if any(digit.owner == parallel_type for digit in digits):
            return position
    return -1


def describe(sharding: Sharding) -> str:
    """One line for messages: `[mesh_x{2} 3, 8] on DeviceMesh{0 1}, partial sum over mesh_y`."""
    return (
        f"{_describe_blocks(sharding)} on {sharding.mesh or 'no mesh'}{_describe_terms(sharding)}"
    )


def describe_axes(sharding: Sharding) -> str:
    """`describe` where the mesh is known: `[mesh_x{2} 3, 8], partial sum over mesh_y`."""
    return _describe_blocks(sharding) + _describe_terms(sharding)


def describe_digits(digits: Sequence[Digit]) -> str:
    """One axis for messages: `mesh_x{2} 3`."""
    return " ".join(
        str(digit.extent) if digit.owner is None else f"{digit.owner}{{{digit.extent}}}"
        for digit in digits
    )


def _describe_blocks(sharding: Sharding) -> str:
    return f"[{', '.join(map(describe_digits, sharding.axes))}]"


def _describe_terms(sharding: Sharding) -> str:
    return "".join(f", partial {fn} over {owner}" for owner, fn in sharding.partial.items())


def _spreads(owner: ParallelType, mesh: DeviceMesh | None) -> bool:
    return mesh is None or not mesh.has(owner) or mesh.axis_size(owner) > 1


def _counting_ranks(digit: Digit, owner: ParallelType, mesh: DeviceMesh | None) -> Digit:
    """A symbolic axis bound as a whole has one block a rank, so that it equals a static one."""
    if mesh is None or not mesh.has(owner):
        return digit
    return Digit(const(mesh.axis_size(owner)), owner)


def _unmerge(digits: Digits, outer: IterDomain, inner: IterDomain) -> tuple[Digits, Digits] | None:
    """Deal the digits of a merged axis out to its parts; None if a mesh digit straddles them."""
    if is_whole(digits):
        return (Digit(outer.extent),), (Digit(inner.extent),)
    taken: list[Digit] = []
    rest, needed = list(digits), inner.extent
    while needed is not const(1):
        if not rest:
            return None
        digit = rest.pop()
        fits = quotient_if_exact(needed, digit.extent)
        if fits is not None:
            taken.insert(0, digit)
            needed = fits
            continue
        above = quotient_if_exact(digit.extent, needed)
        if digit.owner is not None or above is None:
            return None
        taken.insert(0, Digit(needed))
        rest.append(Digit(above))
        needed = const(1)
    return tuple(rest) or (Digit(outer.extent),), tuple(taken)


def deal_digits(
    digits: Digits, outer: IterDomain, inner: IterDomain
) -> tuple[Digits, Digits] | None:
    """The digits of an axis that splits exactly into two parts; None if one straddles them.

    Blocks of an outer part whose size is a symbol are taken to be whole, as a run demands of it.
    """
    pair = _unmerge(digits, outer, inner)
    if pair is not None:
        return pair
    owned = [digit for digit in digits if digit.owner is not None]
    ranks = mul(const(1), *(digit.extent for digit in owned))
    even = const_value(outer.extent) is None or known_multiple(
        outer.extent, const_value(ranks) or 0
    )
    if list(digits[: len(owned)]) != owned or not even:
        return None
    return (*owned, Digit(ceildiv(outer.extent, ranks))), (Digit(inner.extent),)


# The reduction behind a partial tensor.

UNSAID = "unsaid"
"""In place of the reduction, in a segment that only copies partial results of another."""

MOMENTS = "moments"
"""The reduction behind what a Welford makes of a part: no row of REDUCTION_FUNCTIONS."""


@singledispatch
def reduction_function(expr: Expr) -> str | None:
    """The row of REDUCTION_FUNCTIONS that combines terms across ranks; None where none does."""
    return None


@reduction_function.register(Reduction)
@reduction_function.register(AllReduce)
@reduction_function.register(ReduceScatter)
@reduction_function.register(IndexSelect)
@reduction_function.register(TakeAlongAxis)
def _(
    expr: Reduction | AllReduce | ReduceScatter | IndexSelect | TakeAlongAxis,
) -> str | None:
    return expr.function


@reduction_function.register(Welford)
def _(expr: Welford) -> str | None:
    """Decomposition combines these terms, no collective does."""
    return MOMENTS


@reduction_function.register(Linear)
@reduction_function.register(MatMul)
def _(expr: Linear | MatMul) -> str | None:
    return "sum"


def _reduction_behind(program: Program, tensor: TensorName) -> str:
    """The reduction that made the terms; what stands between works on each term by itself."""
    expr = program.fusion.definition(tensor)
    while expr is not None:
        function = reduction_function(expr)
        if function is not None:
            return function
        operands = (name for name in expr.ins if isinstance(name, str))
        source = next((name for name in operands if _has_terms(program, name)), None)
        if source is None:
            raise InvariantError(f"{tensor} has a partial axis but {expr} makes no partial results")
        tensor = TensorName(source)
        expr = program.fusion.definition(tensor)
    return _reduction_ahead(program, tensor)


def _has_terms(program: Program, name: str) -> bool:
    definition = program.fusion.tensors.get(TensorName(name))
    return definition is not None and AxisKind.partial in (a.kind for a in definition.logical)


def _reduction_ahead(program: Program, tensor: TensorName) -> str:
    """Of the input of a segment, what made it standing in another: who combines it says how."""
    names = {tensor}
    for expr in program.fusion.exprs:
        if names.intersection(expr.ins):
            if isinstance(expr, AllReduce | ReduceScatter):
                return expr.function
            if isinstance(expr, Terms):
                return MOMENTS
            names.update(TensorName(out) for out in expr.outs if _has_terms(program, out))
    return UNSAID
