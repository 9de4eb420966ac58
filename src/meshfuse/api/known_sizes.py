"""Numbers that users give for the symbols of extents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.expr import IntExpr, Symbol, const_value, evaluate, free_symbols


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
