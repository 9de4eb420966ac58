"""What the host program knows of sizes: symbols from inputs, demands on them, buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from meshfuse.base.errors import InvariantError, Unsupported
from meshfuse.expr import IntExpr, Symbol, const_value, free_symbols, known_equal
from meshfuse.expr.bounds import is_nonnegative
from meshfuse.facts.axis_map import element_counts, meeting_extents
from meshfuse.facts.layout import is_contiguous, layout_of
from meshfuse.facts.sharding import (
    Digit,
    Sharding,
    axis_sharded_on,
    local_extents,
    owners_of,
    sharding_of,
)
from meshfuse.host.nodes import Divides, Equals, HostBuffer, NotNegative, SizeOf
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.program import Program
from meshfuse.kernel.nodes import IndexName


def buffer_of(program: Program, tensor: TensorName) -> HostBuffer:
    """The part of a tensor that one rank holds."""
    layout, sharding = layout_of(program, tensor), sharding_of(program, tensor)
    mesh = program.schedule(tensor).mesh
    owners = () if mesh is None else mesh.parallel_types()
    axes = {owner: axis_sharded_on(sharding, owner) for owner in owners}
    return HostBuffer(
        tensor,
        program.tensor(tensor).dtype,
        local_extents(program, tensor),
        () if layout.is_row_major else layout.order,
        mesh,
        {owner: axis for owner, axis in axes.items() if axis >= 0},
        dict(sharding.partial),
        tensor not in program.fusion.inputs and not is_contiguous(program, tensor),
    )


def size_symbols(program: Program) -> tuple[SizeOf, ...]:
    """Each symbol of the inputs' extents, from an axis that is whole on every rank if one is."""
    found: dict[str, SizeOf] = {}
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
            if extent.name not in found or found[extent.name].factor > size.factor == 1:
                found[extent.name] = size
    return tuple(found.values())


def divisibility_demands(program: Program, tensors: Iterable[TensorName]) -> tuple[Divides, ...]:
    """What makes all blocks of the tensors' symbolic axes equal, each said once."""
    demands: dict[tuple[int, IntExpr], Divides] = {}
    for tensor in tensors:
        sharding = sharding_of(program, tensor)
        for axis, domain in zip(sharding.axes, program.tensor(tensor).tensor_axes, strict=True):
            divisor = _divisor(axis)
            if divisor > 1 and const_value(domain.extent) is None:
                demand = Divides(divisor, domain.extent, tensor)
                demands.setdefault((divisor, domain.extent), demand)
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
    if all(digit.owner is None for digit in digits):
        return 1
    sizes = [const_value(digit.extent) for digit in digits]
    if sizes.count(None) > 1:
        raise InvariantError(f"digits {digits}: more than one extent is symbolic")
    return math.prod(size for size in sizes if size is not None)
