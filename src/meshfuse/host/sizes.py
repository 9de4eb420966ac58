"""What the host program knows of sizes: symbols from inputs and ranks, demands on them, buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from meshfuse.base.errors import InvariantError, Unsupported
from meshfuse.expr import IntExpr, Symbol, const, const_value, free_symbols, known_equal, mul
from meshfuse.expr.bounds import is_nonnegative
from meshfuse.facts.axis_map import element_counts, meeting_extents
from meshfuse.facts.digits import is_whole
from meshfuse.facts.holdings import coordinate_symbol
from meshfuse.facts.layout import is_contiguous, layout_of
from meshfuse.facts.sharding import (
    Digit,
    Sharding,
    axis_digits,
    owners_of,
    rank_extents,
    sharding_of,
)
from meshfuse.host.nodes import HostBuffer
from meshfuse.host.symbols import (
    Coordinate,
    Covers,
    Divides,
    Equals,
    NotNegative,
    SizeOf,
)
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.ops import Reshape
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import step_results, step_sources
from meshfuse.kernel.nodes import IndexName


def buffer_of(program: Program, tensor: TensorName) -> HostBuffer:
    """The part of a tensor that one rank holds."""
    layout, sharding = layout_of(program, tensor), sharding_of(program, tensor)
    extents = tuple(axis.extent for axis in program.tensor(tensor).tensor_axes)
    is_divided = any(digit.owner for digits in sharding.axes for digit in digits)
    return HostBuffer(
        tensor,
        program.tensor(tensor).dtype,
        rank_extents(program, tensor),
        () if layout.is_row_major else layout.order,
        None if sharding.mesh is None else sharding,
        extents if is_divided else (),
        tensor not in program.fusion.inputs and not is_contiguous(program, tensor),
    )


def size_symbols(program: Program) -> tuple[SizeOf, ...]:
    """Each symbol of the inputs' extents, from an axis that is whole on every rank if one is.

    Once for each mesh with such an input, for its ranks.
    """
    found: dict[tuple[str, DeviceMesh | None], SizeOf] = {}
    for name in program.fusion.inputs:
        if name not in program.fusion.tensors:
            continue
        tensor = TensorName(name)
        sharding = sharding_of(program, tensor)
        for axis, domain in enumerate(program.tensor(tensor).tensor_axes):
            extent = domain.extent
            if not isinstance(extent, Symbol) or ScalarName(extent.name) in program.fusion.scalars:
                continue
            size = SizeOf(IndexName(extent.name), tensor, axis, _ranks(sharding, axis))
            key = (extent.name, sharding.mesh)
            if key not in found or found[key].factor > size.factor == 1:
                found[key] = size
    return tuple(found.values())


def coordinates_in(extents: Iterable[IntExpr], meshes: Iterable[DeviceMesh]) -> list[Coordinate]:
    """The coordinates of ranks that `extents` name, in the order of the meshes."""
    names = {found.name for extent in extents for found in free_symbols(extent)}
    return [
        Coordinate(IndexName(name), mesh, mesh_axis)
        for mesh in dict.fromkeys(meshes)
        for mesh_axis in mesh.parallel_types()
        if (name := coordinate_symbol(mesh, mesh_axis).name) in names
    ]


def divisibility_demands(program: Program) -> tuple[Divides, ...]:
    """What makes blocks of symbolic axes whole where a reshape takes them apart or together.

    How a merged axis is dealt out counts on it; all other axes may be shared unevenly.
    """
    demands: dict[tuple[int, IntExpr], Divides] = {}
    for expr in program.fusion.exprs:
        if not isinstance(expr, Reshape):
            continue
        definition, digits = program.tensor(expr.out), axis_digits(program, expr.out)
        axes = {axis.name: axis for axis in (*definition.root, *definition.logical)}
        for step in definition.root_steps:
            for name in (*step_sources(step), *step_results(step)):
                if name not in axes or name not in digits:
                    continue
                extent, divisor = axes[name].extent, _divisor(digits[name])
                if divisor > 1 and const_value(extent) is None:
                    demands.setdefault((divisor, extent), Divides(divisor, extent, expr.out))
    return tuple(demands.values())


def coverage_demands(program: Program) -> tuple[Covers, ...]:
    """What keeps symbolic axes within the blocks of ranks, where no digit grows with the axis."""
    demands: dict[tuple[int, IntExpr], Covers] = {}
    for tensor, definition in program.fusion.tensors.items():
        axes = sharding_of(program, tensor).axes
        for digits, domain in zip(axes, definition.tensor_axes, strict=True):
            most = const_value(mul(const(1), *(digit.extent for digit in digits)))
            if most is not None and const_value(domain.extent) is None:
                demands.setdefault((most, domain.extent), Covers(most, domain.extent, tensor))
    return tuple(demands.values())


def size_demands(program: Program) -> tuple[Equals | NotNegative, ...]:
    """What sizes must be for operations to make sense, where that is known only when run."""
    demands: dict[tuple[IntExpr, ...], Equals | NotNegative] = {}
    for tensor, extent, other in meeting_extents(program):
        if not known_equal(extent, other):
            demands.setdefault((extent, other), Equals(extent, other, tensor))
    for tensor, extent, other in element_counts(program):
        if not known_equal(extent, other):
            demands.setdefault((extent, other), Equals(extent, other, tensor, elements=True))
    for name, definition in program.fusion.tensors.items():
        for axis in definition.logical:
            for extent in _doubtful(program, axis.extent):
                demands.setdefault((extent,), NotNegative(extent, name))
    return tuple(demands.values())


def _doubtful(program: Program, extent: IntExpr) -> Iterator[IntExpr]:
    """What must not be negative for `extent` to be a size: scalars in it, and a difference."""
    for symbol in free_symbols(extent):
        if ScalarName(symbol.name) in program.fusion.scalars:
            yield symbol
    if not is_nonnegative(extent):
        yield extent


def check_symbols(buffers: Iterable[HostBuffer], known: Iterable[str]) -> None:
    """Raise Unsupported, naming the tensor, for a size that neither an input nor a scalar gives."""
    names = set(known)
    for buffer in buffers:
        for extent in buffer.shape:
            for symbol in free_symbols(extent):
                if symbol.name not in names:
                    raise Unsupported(
                        f"host lowering: {buffer.name} has size {extent}, but no input has an axis "
                        f"of size {symbol.name}; pass that size as a scalar input"
                    )


def _ranks(sharding: Sharding, axis: int) -> int:
    mesh = sharding.mesh
    if mesh is None:
        return 1
    return math.prod(mesh.axis_size(owner) for owner in owners_of(sharding.axes[axis], mesh))


def _divisor(digits: tuple[Digit, ...]) -> int:
    """The product of the constant digits of a sharded axis; 1 for one that is whole."""
    if is_whole(digits):
        return 1
    sizes = [const_value(digit.extent) for digit in digits]
    if sizes.count(None) > 1:
        raise InvariantError(f"digits {digits}: more than one extent is symbolic")
    return math.prod(size for size in sizes if size is not None)
