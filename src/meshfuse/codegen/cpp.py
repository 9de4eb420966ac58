"""Print a kernel as C++: the prelude, then one function that runs the grid over OpenMP threads.

A value over a tile axis is a tile of the prelude, one over none is a scalar, a carry is a variable
outside its loop. An output may be the same memory as an input, so nothing is marked restrict.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import singledispatch
from importlib.resources import files

from meshfuse.base.dtypes import DataType, compute_dtype, is_floating
from meshfuse.base.errors import InvariantError, ScheduleError
from meshfuse.codegen.cpp_access import data_name, keep_masked, print_load, print_store
from meshfuse.codegen.cpp_frame import CppFrame, Printed, Tile, index_text, symbol_named
from meshfuse.codegen.cpp_ops import (
    SCALAR_EMITTERS,
    SCALAR_TYPES,
    STORAGE_TYPES,
    reduction_functor,
    round_value,
    spread,
    value_type,
)
from meshfuse.codegen.source import KernelSource
from meshfuse.expr import as_expr, coefficient_of, substitute
from meshfuse.kernel.nodes import (
    Carry,
    Combine,
    Compute,
    Convert,
    For,
    Kernel,
    KernelOperand,
    Load,
    Reduce,
    Size,
    Store,
    ValueName,
    WelfordReduce,
    WelfordStep,
)

PRELUDE = (files("meshfuse.codegen") / "cpp_prelude.hpp").read_text(encoding="utf-8")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def print_cpp(kernel: Kernel) -> KernelSource:
    """The translation unit of a kernel.

    Raises ScheduleError for a tile that C++ kernels cannot have: a value over two tile axes
    (code tile-rank), a number of lanes that is no power of two (tile-size).
    """
    if not _IDENTIFIER.fullmatch(kernel.name):
        raise InvariantError(f"kernel name {kernel.name!r} is no identifier")
    for axis in kernel.tiles:
        if axis.size < 1 or axis.size & (axis.size - 1):
            raise ScheduleError(
                "tile-size",
                kernel.name,
                str(axis.name),
                f"has {axis.size} lanes",
                "A C++ kernel has tiles of a power of two.",
            )
    entry = f"meshfuse_{kernel.name}"
    frame = CppFrame(kernel)
    with frame.block(
        f'extern "C" void {entry}(void** buffers, const double* floats, '
        "const int64_t* integers, int threads)"
    ):
        _print_arguments(frame)
        _print_grid(frame)
    text = f"{PRELUDE}\n" + "\n".join(frame.lines) + "\n"
    return KernelSource(entry, text, kernel)


def _print_arguments(frame: CppFrame) -> None:
    kernel = frame.kernel
    for position, buffer in enumerate(kernel.buffers):
        element = STORAGE_TYPES[buffer.dtype] if buffer.written else _read_only(buffer.dtype)
        frame.line(f"{element}* const {data_name(buffer.name)} = ({element}*)buffers[{position}];")
    floats = integers = 0
    for parameter in kernel.scalars:
        dtype = parameter.dtype
        if is_floating(dtype):
            text = round_value(f"({SCALAR_TYPES[dtype]})floats[{floats}]", dtype)
            floats += 1
        else:
            text = f"({SCALAR_TYPES[dtype]})integers[{integers}]"
            integers += 1
        frame.define(parameter.name, text, dtype, None)
    for offset, name in enumerate(kernel.sizes):
        frame.line(f"const int64_t {name} = integers[{integers + offset}];")


def _read_only(dtype: DataType) -> str:
    return f"const {STORAGE_TYPES[dtype]}"


def _print_grid(frame: CppFrame) -> None:
    grid = frame.kernel.grid
    for axis in grid:
        frame.line(f"const int64_t {axis.name}_extent = {index_text(axis.extent)};")
    if grid:
        collapse = f"collapse({len(grid)}) " if len(grid) > 1 else ""
        frame.lines.append(
            f"#pragma omp parallel for {collapse}schedule(static) num_threads(threads) "
            "if (threads > 1)"
        )
    heads = [f"for (int64_t {a.name} = 0; {a.name} < {a.name}_extent; ++{a.name})" for a in grid]
    for head in heads[:-1]:
        frame.line(head)
    with frame.block(heads[-1] if heads else ""):
        for axis in frame.kernel.tiles:
            if axis.size == 1:
                frame.line(f"const int64_t {axis.name} = 0;")
        print_block(frame, frame.kernel.body)


def print_block(frame: CppFrame, body: Sequence[object]) -> None:
    for statement in body:
        print_statement(statement, frame)


@singledispatch
def print_statement(statement: object, frame: CppFrame) -> None:
    """Append the lines of one statement."""
    raise InvariantError(f"no C++ for {type(statement).__name__}")


@print_statement.register
def _(statement: Load, frame: CppFrame) -> None:
    print_load(frame, statement)


@print_statement.register
def _(statement: Store, frame: CppFrame) -> None:
    print_store(frame, statement)


@print_statement.register
def _(statement: Size, frame: CppFrame) -> None:
    tile = frame.tile_of(statement.out, statement.value)
    if tile is None:
        frame.define(statement.out, index_text(statement.value), DataType.Int, None)
        return
    lanes = frame.lanes(tile)
    symbol = symbol_named(statement.value, tile)
    step = None if symbol is None else coefficient_of(statement.value, symbol)
    if symbol is None or step is None:
        name = f"{statement.out}_lanes"
        frame.line(f"int64_t {name}[{lanes}];")
        lane = f"{name}[{tile}] = {index_text(statement.value)};"
        frame.line(f"for (int64_t {tile} = 0; {tile} < {lanes}; ++{tile}) {lane}")
        frame.define(statement.out, f"mf_load<{lanes}>({name})", DataType.Int, tile)
        return
    first = index_text(substitute(statement.value, {symbol: 0}))
    steps = spread(index_text(as_expr(step)), DataType.Int, lanes)
    text = f"{spread(first, DataType.Int, lanes)} + mf_lanes<int64_t, {lanes}>(0) * {steps}"
    frame.define(statement.out, text, DataType.Int, tile)


@print_statement.register
def _(statement: Compute, frame: CppFrame) -> None:
    args = [frame.operand(arg) for arg in statement.args]
    alike = args[1:] if statement.function == "where" else args
    dtype = _common_type(statement.out, alike)
    tile = frame.join(statement.out, *(arg.tile for arg in args))
    texts = [frame.widened(arg, tile) for arg in args]
    text = SCALAR_EMITTERS[statement.function](texts, dtype)
    frame.define(statement.out, round_value(text, statement.dtype), statement.dtype, tile)


def _common_type(out: ValueName, operands: Sequence[Printed]) -> DataType:
    """The type operands compute in. Raises InvariantError if they differ."""
    types = list(dict.fromkeys(compute_dtype(operand.dtype) for operand in operands))
    if len(types) != 1:
        raise InvariantError(f"{out} has operands of mixed types: {types}")
    return types[0]


@print_statement.register
def _(statement: Convert, frame: CppFrame) -> None:
    src = frame.operand(statement.src)
    text = frame.converted(src, statement.dtype, src.tile)
    frame.define(statement.out, text, statement.dtype, src.tile)


@print_statement.register
def _(statement: Combine, frame: CppFrame) -> None:
    accumulator = frame.operand(statement.accumulator)
    src = frame.operand(statement.src)
    dtype = _common_type(statement.out, (accumulator, src))
    mask_tile = frame.tile_of_mask(statement.out, statement.mask)
    tile = frame.join(statement.out, accumulator.tile, src.tile, mask_tile)
    old = frame.widened(accumulator, tile)
    functor = reduction_functor(statement.function, dtype)
    combined = f"{functor}{{}}({old}, {frame.widened(src, tile)})"
    combined = round_value(combined, accumulator.dtype)
    text = keep_masked(frame, statement.mask, tile, combined, old)
    frame.define(statement.out, text, accumulator.dtype, tile)


@print_statement.register
def _(statement: Reduce, frame: CppFrame) -> None:
    src = frame.operand(statement.src)
    tile = frame.join(statement.out, src.tile, *statement.tiles)
    if tile is None or tile not in statement.tiles:
        frame.define(statement.out, src.text, src.dtype, src.tile)
        return
    functor = reduction_functor(statement.function, compute_dtype(src.dtype))
    text = f"mf_reduce({functor}{{}}, {frame.widened(src, tile)})"
    if src.dtype is DataType.Bool:
        text = f"{text} != 0"
    frame.define(statement.out, round_value(text, src.dtype), src.dtype, None)


@print_statement.register
def _(statement: WelfordStep, frame: CppFrame) -> None:
    old = [frame.operand(v) for v in (statement.old_mean, statement.old_m2, statement.old_count)]
    parts = (statement.src, statement.src_m2, statement.src_count)
    src = [frame.operand(part) for part in parts if part is not None]
    _common_type(statement.mean, (old[0], old[1], *src[:2]))
    mask_tile = frame.tile_of_mask(statement.mean, statement.mask)
    tile = frame.join(statement.mean, mask_tile, *(v.tile for v in (*old, *src)))
    step = f"{statement.mean}_step"
    before = _moments(frame, old, tile)
    if len(src) == 1:
        call = f"mf_welford_step({before}, {frame.widened(src[0], tile)})"
    else:
        call = f"mf_welford_merge({before}, {_moments(frame, src, tile)})"
    frame.line(f"const auto {step} = {call};")
    outs = (statement.mean, statement.m2, statement.count)
    for out, part, value in zip(outs, ("mean", "m2", "count"), old, strict=True):
        following = round_value(f"{step}.{part}", value.dtype)
        kept = keep_masked(frame, statement.mask, tile, following, frame.widened(value, tile))
        frame.define(out, kept, value.dtype, tile)


@print_statement.register
def _(statement: WelfordReduce, frame: CppFrame) -> None:
    src = [frame.operand(v) for v in (statement.src_mean, statement.src_m2, statement.src_count)]
    _common_type(statement.mean, src[:2])
    tile = frame.join(statement.mean, *(v.tile for v in src), *statement.tiles)
    if tile is not None and tile not in statement.tiles:
        raise ScheduleError(
            "welford-tile",
            statement.mean,
            str(tile),
            "is combined over axes of one lane only",
            "Leave out a WelfordReduce over such axes.",
        )
    total = f"{statement.mean}_total"
    frame.line(f"const auto {total} = mf_welford_reduce({_moments(frame, src, tile)});")
    outs = (statement.mean, statement.m2, statement.count)
    for out, part, value in zip(outs, ("mean", "m2", "count"), src, strict=True):
        frame.define(out, round_value(f"{total}.{part}", value.dtype), value.dtype, None)


def _moments(frame: CppFrame, values: Sequence[Printed], tile: Tile) -> str:
    lanes = frame.lanes(tile)
    types = f"{value_type(values[0].dtype, lanes)}, {value_type(values[2].dtype, lanes)}"
    parts = ", ".join(frame.widened(value, tile) for value in values)
    return f"mf_moments<{types}>{{{parts}}}"


@print_statement.register
def _(statement: For, frame: CppFrame) -> None:
    for carry in statement.carries:
        tile = frame.join(carry.name, *carry.tiles)
        initial = _carried(frame, carry, carry.initial, tile)
        frame.line(f"{value_type(carry.dtype, frame.lanes(tile))} {carry.name} = {initial};")
        frame.values[carry.name] = Printed(carry.name, carry.dtype, tile)
    k = statement.variable
    with frame.block(f"for (int64_t {k} = 0; {k} < {index_text(statement.trip)}; ++{k})"):
        print_block(frame, statement.body)
        following = [
            _carried(frame, carry, carry.following, frame.values[carry.name].tile)
            for carry in statement.carries
        ]
        names = {carry.name for carry in statement.carries}
        for position, carry in enumerate(statement.carries):
            if carry.following in names:  # the others must not see it change
                frame.line(f"const auto {carry.name}_following = {following[position]};")
                following[position] = f"{carry.name}_following"
        for carry, text in zip(statement.carries, following, strict=True):
            frame.line(f"{carry.name} = {text};")


def _carried(frame: CppFrame, carry: Carry, operand: KernelOperand, tile: Tile) -> str:
    """What a carry that varies over `tile` takes from `operand`."""
    value = frame.operand(operand)
    if value.dtype is not carry.dtype:
        raise InvariantError(f"carry {carry.name} of {carry.dtype} takes {value.dtype}")
    if value.tile not in (tile, None):
        raise InvariantError(
            f"carry {carry.name} varies over {carry.tiles}, what it takes over {value.tile}"
        )
    return frame.widened(value, tile)
