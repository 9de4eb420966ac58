"""Masks, loads and stores in C++.

A mask that cuts off the end of a tile, the usual kind, is a count of active lanes, and the whole
tile takes the vector path. Any other mask, and any address that is not affine in the tile axis,
makes a loop over the lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.codegen.cpp_frame import CppFrame, Printed, Tile, index_text, symbol_named
from meshfuse.codegen.cpp_ops import STORAGE_TYPES
from meshfuse.expr import (
    IntExpr,
    IntLike,
    as_expr,
    ceildiv,
    coefficient_of,
    free_symbols,
    known_less,
    substitute,
    symbol,
)
from meshfuse.kernel.nodes import Bound, BufferName, IndexName, Load, Mask, Store


@final
@frozen_dataclass
class Everywhere:
    """All lanes are active."""


@final
@frozen_dataclass
class Uniform:
    """A condition that is the same in each lane; the only kind without a tile."""

    condition: str


@final
@frozen_dataclass
class Leading:
    """Lanes 0 to `active` - 1; the int64 expression `active` may be negative or large."""

    active: str


@final
@frozen_dataclass
class Scattered:
    """Lanes where `condition`, an expression in the tile axis, holds."""

    condition: str


MaskForm = Everywhere | Uniform | Leading | Scattered


@final
@frozen_dataclass
class Address:
    """Element `base + stride * lane` of a buffer; no stride if it is not affine in the lane."""

    base: str
    stride: int | IntExpr | None


def print_mask(frame: CppFrame, mask: Mask, tile: Tile) -> MaskForm:
    """The form of `mask` for an access whose lanes run along `tile`; may define a lane count."""
    open_bounds = [b for b in mask if not known_less(b.index, b.limit)]
    if not open_bounds:
        return Everywhere()
    condition = " && ".join(_condition(b) for b in open_bounds)
    if tile is None:
        return Uniform(condition)
    if (mask, tile) in frame.actives:
        return Leading(frame.actives[mask, tile])
    counts = [_count_active(b, tile, frame.lanes(tile)) for b in open_bounds]
    if None in counts:
        return Scattered(condition)
    name = f"active{frame.actives_made}"
    frame.actives_made += 1
    frame.line(f"const int64_t {name} = {_smallest([c for c in counts if c is not None])};")
    frame.actives[mask, tile] = name
    return Leading(name)


def _condition(bound: Bound) -> str:
    return f"{index_text(bound.index)} < {index_text(bound.limit)}"


def _count_active(bound: Bound, tile: IndexName, lanes: int) -> str | None:
    """How many leading lanes keep the bound; None if its lanes are not the leading ones."""
    room = bound.limit - bound.index
    symbol = symbol_named(room, tile)
    if symbol is None:
        varies = tile in (s.name for s in free_symbols(room))
        return None if varies else f"({_condition(bound)} ? {lanes} : 0)"
    step = coefficient_of(room, symbol)
    if not isinstance(step, int) or step >= 0:
        return None
    return index_text(ceildiv(substitute(room, {symbol: 0}), -step))


def _smallest(counts: Sequence[str]) -> str:
    text = counts[0]
    for count in counts[1:]:
        text = f"mf_min({text}, {count})"
    return text


def address_of(
    frame: CppFrame, buffer: BufferName, index: Sequence[IntExpr], tile: Tile
) -> Address:
    """Where the first lane's element lies, in elements, and how far apart the lanes are."""
    element = _element(frame, buffer, index)
    if tile is None:
        return Address(index_text(element), 0)
    symbol = symbol_named(element, tile)
    if symbol is None:
        varies = frame.tile_of(str(buffer), element) is not None
        return Address(index_text(element), None if varies else 0)
    stride = coefficient_of(element, symbol)
    if stride is None:
        return Address(index_text(element), None)
    return Address(index_text(substitute(element, {symbol: 0})), stride)


def _element(frame: CppFrame, buffer: BufferName, index: Sequence[IntExpr]) -> IntExpr:
    """The offset of an element. Where one is, no size is 0: n * (i // n) + i % n is i."""
    declared = frame.buffer(buffer)
    sizes = (found for extent in declared.shape for found in free_symbols(extent))
    positive: dict[str | IntExpr, IntLike] = {
        s: symbol(s.name, 1, s.high, s.multiple) for s in sizes
    }
    element = as_expr(0)
    for position, stride in zip(index, declared.strides, strict=True):
        element += substitute(position, positive) * substitute(stride, positive)
    return element


def print_load(frame: CppFrame, load: Load) -> None:
    """Define the load's value."""
    buffer = frame.buffer(load.buffer)
    tile = frame.join(
        load.buffer,
        frame.tile_of(load.buffer, _element(frame, load.buffer, load.index)),
        frame.tile_of_mask(load.buffer, load.mask),
    )
    lanes = frame.lanes(tile)
    address = address_of(frame, load.buffer, load.index, tile)
    form = print_mask(frame, load.mask, tile)
    pointer = data_pointer(load.buffer, address.base)
    if address.stride is None or isinstance(form, Scattered):
        _print_lane_load(frame, load, tile, form)
        return
    active = f", {form.active}" if isinstance(form, Leading) else ""
    match address.stride:
        case _ if tile is None:
            text = f"mf_load<1>({pointer})"
        case 1:
            text = f"mf_load<{lanes}>({pointer}{active})"
        case 0:
            text = f"mf_load_same<{lanes}>({pointer}{active})"
        case stride:
            step = index_text(as_expr(stride))
            text = f"mf_load_strided<{lanes}>({pointer}, {step}{active})"
    if isinstance(form, Uniform):
        text = f"{form.condition} ? {text} : 0"
    frame.define(load.out, text, buffer.dtype, tile)


def _print_lane_load(frame: CppFrame, load: Load, tile: Tile, form: MaskForm) -> None:
    lanes = frame.lanes(tile)
    dtype = frame.buffer(load.buffer).dtype
    element = index_text(_element(frame, load.buffer, load.index))
    frame.line(f"{STORAGE_TYPES[dtype]} {load.out}_lanes[{lanes}] = {{}};")
    copy = f"{load.out}_lanes[{tile}] = {data_name(load.buffer)}[{element}];"
    _print_lane_loop(frame, tile, form, copy)
    frame.define(load.out, f"mf_load<{lanes}>({load.out}_lanes)", dtype, tile)


def print_store(frame: CppFrame, store: Store) -> None:
    """Write the value, converted to the buffer's type."""
    value = frame.operand(store.value)
    element = _element(frame, store.buffer, store.index)
    tile = frame.join(
        store.buffer,
        value.tile,
        frame.tile_of(store.buffer, element),
        frame.tile_of_mask(store.buffer, store.mask),
    )
    address = address_of(frame, store.buffer, store.index, tile)
    form = print_mask(frame, store.mask, tile)
    if tile is not None and value.tile is None and address.stride == 0:
        _print_uniform_store(frame, store, value, form, address)
    elif address.stride is None or isinstance(form, Scattered):
        _print_lane_store(frame, store, value, tile, form)
    else:
        text = frame.converted(value, frame.buffer(store.buffer).dtype, tile)
        pointer = data_pointer(store.buffer, address.base)
        active = f", {form.active}" if isinstance(form, Leading) else ""
        if tile is None or address.stride == 1:
            call = f"mf_store({pointer}, {text}{active});"
        else:
            step = index_text(as_expr(address.stride))
            call = f"mf_store_strided({pointer}, {step}, {text}{active});"
        frame.line(f"if ({form.condition}) {call}" if isinstance(form, Uniform) else call)


def _print_uniform_store(
    frame: CppFrame, store: Store, value: Printed, form: MaskForm, address: Address
) -> None:
    """One element, the same from each active lane."""
    text = frame.converted(value, frame.buffer(store.buffer).dtype, None)
    call = f"mf_store({data_pointer(store.buffer, address.base)}, {text});"
    if isinstance(form, Leading):
        frame.line(f"if ({form.active} > 0) {call}")
    elif isinstance(form, Scattered):
        tile = frame.tile_of_mask(store.buffer, store.mask)
        _print_lane_loop(frame, tile, form, call)
    else:
        frame.line(call)


def _print_lane_store(
    frame: CppFrame, store: Store, value: Printed, tile: Tile, form: MaskForm
) -> None:
    dtype = frame.buffer(store.buffer).dtype
    element = index_text(_element(frame, store.buffer, store.index))
    with frame.block(""):
        frame.line(f"{STORAGE_TYPES[dtype]} lanes[{frame.lanes(tile)}];")
        frame.line(f"mf_store(lanes, {frame.converted(value, dtype, tile)});")
        copy = f"{data_name(store.buffer)}[{element}] = lanes[{tile}];"
        _print_lane_loop(frame, tile, form, copy)


def _print_lane_loop(frame: CppFrame, tile: Tile, form: MaskForm, action: str) -> None:
    """Do `action`, which names the tile axis, in each active lane."""
    match form:
        case Everywhere():
            pass
        case Leading(active):
            action = f"if ({tile} < {active}) {action}"
        case Uniform(condition) | Scattered(condition):
            action = f"if ({condition}) {action}"
    lanes = frame.lanes(tile)
    frame.line(f"for (int64_t {tile} = 0; {tile} < {lanes}; ++{tile}) {action}")


def keep_masked(frame: CppFrame, mask: Mask, tile: Tile, following: str, old: str) -> str:
    """`following` in the active lanes and `old` in the others."""
    form = print_mask(frame, mask, tile)
    match form:
        case Everywhere():
            return following
        case Uniform(condition):
            return f"({condition}) ? {following} : {old}"
        case Leading(active):
            return f"mf_keep({active}, {following}, {old})"
        case Scattered(condition):
            lanes = frame.lanes(tile)
            name = f"mask{frame.actives_made}"
            frame.actives_made += 1
            frame.line(f"int32_t {name}_lanes[{lanes}];")
            _print_lane_loop(frame, tile, Everywhere(), f"{name}_lanes[{tile}] = -({condition});")
            return f"mf_select(mf_load<{lanes}>({name}_lanes), {following}, {old})"


def data_name(buffer: BufferName) -> str:
    """The variable that points at a buffer's first element."""
    return f"{buffer}_data"


def data_pointer(buffer: BufferName, element: str) -> str:
    return data_name(buffer) if element == "0" else f"{data_name(buffer)} + {element}"
