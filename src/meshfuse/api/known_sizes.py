"""Numbers for the symbols of extents: those that users give, nominal ones, those of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch

from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.expr import IntExpr, Symbol, const_value, evaluate, free_symbols
from meshfuse.facts.holdings import coordinate_symbol
from meshfuse.facts.nominal import nominal_size
from meshfuse.host.nodes import ForLoop, HostProgram, all_nodes
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.program import Program


def bind_input_sizes(
    call: str, program: Program, inputs: Sequence[object] | None
) -> dict[str, int]:
    """The symbols that the inputs give: for each a shape, a tensor, a scalar's value or None.

    UserError for what does not fit them.
    """
    names = program.fusion.inputs
    if inputs is None:
        return {}
    if not isinstance(inputs, list | tuple):
        raise UserTypeError(
            f"{call}(inputs={type(inputs).__name__}): takes one entry for each input"
        )
    if len(inputs) != len(names):
        raise UserError(f"{call}(inputs): expected {len(names)} entries, but got {len(inputs)}")
    shapes: list[tuple[Sequence[IntExpr], object]] = []
    known: dict[str, int] = {}
    for name, given in zip(names, cast(Sequence[object], inputs), strict=True):
        if given is None:
            continue
        if name in program.fusion.scalars:
            if isinstance(given, int):
                known[name] = int(given)
            continue
        extents = tuple(axis.extent for axis in program.tensor(TensorName(name)).tensor_axes)
        shapes.append((extents, list(given.shape) if isinstance(given, torch.Tensor) else given))
    return {**known, **bind_sizes(f"{call}(inputs)", shapes)}


def nominal_sizes(
    host: HostProgram, known: Mapping[str, int], others: Iterable[IntExpr] = ()
) -> dict[str, int]:
    """Values for the symbols of the host program that are not known, and say nothing of a rank or
    of an iteration.

    `others` are extents that are not in its buffers.
    """
    extents = {
        extent for buffer in host.buffers.values() for extent in (*buffer.shape, *buffer.extents)
    }
    extents.update(others)
    indices = (node.index for node in all_nodes(host.body) if isinstance(node, ForLoop))
    given = {*known, *(coordinate.symbol for coordinate in host.coordinates), *indices}
    found = {symbol.name: symbol for extent in extents for symbol in free_symbols(extent)}
    return {name: nominal_size(found[name]) for name in sorted(found.keys() - given)}


def coordinates_of(meshes: Iterable[DeviceMesh], rank: int) -> dict[str, int]:
    """The coordinates of a rank by symbol; 0 on meshes that it is not in."""
    return {
        coordinate_symbol(mesh, axis).name: mesh.coordinate(rank, axis) or 0
        for mesh in meshes
        for axis in mesh.parallel_types()
    }


def bind_sizes(call: str, shapes: Iterable[tuple[Sequence[IntExpr], object]]) -> dict[str, int]:
    """The symbols' values, given the numbers that extents stand for. UserError if they disagree."""
    pairs = list(shapes)
    known: dict[str, int] = {}
    for extents, shape in pairs:
        for extent, size in zip(extents, _read_shape(call, extents, shape), strict=True):
            if isinstance(extent, Symbol):
                known.setdefault(extent.name, size)
    for extents, shape in pairs:
        for extent, size in zip(extents, _read_shape(call, extents, shape), strict=True):
            unknown = [found for found in free_symbols(extent) if found.name not in known]
            if not unknown and evaluate(extent, known) != size:
                told = "" if const_value(extent) is not None else f", which is {extent}"
                raise UserError(
                    f"{call}: size {size} must be {evaluate(extent, known)}{told}; the extents "
                    f"are [{', '.join(map(str, extents))}]"
                )
    return known


def _read_shape(call: str, extents: Sequence[IntExpr], shape: object) -> tuple[int, ...]:
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes):
        raise UserTypeError(f"{call}: a shape is a list of ints, got {type(shape).__name__}")
    sizes: list[int] = []
    for size in cast(Sequence[object], shape):
        if type(size) is not int:
            raise UserTypeError(f"{call}: a size is an int, got {size!r}")
        if size < 0:
            raise UserError(f"{call}: a size is 0 or more, got {size}")
        sizes.append(size)
    if len(sizes) != len(extents):
        raise UserError(f"{call}: takes {len(extents)} sizes, got {len(sizes)}")
    return tuple(sizes)
