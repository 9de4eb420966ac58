"""The meaning of a tile program: run it with torch, one grid point after the other.

This is the oracle that printers are tested against, not a way to compute fast. A value is a tensor
with one dimension per tile axis of the kernel, of size 1 where the value does not vary. What a
kernel must never do (read or write outside a buffer, use an undefined value, mix element types)
raises InvariantError here.

Where torch raises, a kernel cannot, for its idle lanes hold zeros: an integer divided by zero is 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import final

import torch

from meshfuse.base.dtypes import DataType, Scalar
from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr.nodes import Add, Const, FloorDiv, IntExpr, Max, Min, Mod, Mul, Symbol
from meshfuse.ir.ops import Literal
from meshfuse.kernel.nodes import (
    Buffer,
    BufferName,
    Carry,
    Combine,
    Compute,
    Convert,
    For,
    IndexName,
    Kernel,
    KernelOperand,
    Load,
    Mask,
    Reduce,
    Size,
    Store,
    ValueName,
    WelfordReduce,
    WelfordStep,
)
from meshfuse.runtime.torch_functions import TORCH_FUNCTIONS
from meshfuse.runtime.torch_types import held_torch_dtype, round_to_dtype, to_torch_dtype

IndexValue = int | torch.Tensor
Moments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(mean, m2, count)"""


@final
@frozen_dataclass
class Value:
    """`lanes` holds the value in the type that kernels compute `dtype` in."""

    lanes: torch.Tensor
    dtype: DataType


@final
@dataclass(slots=True, eq=False, repr=False)
class Frame:
    """What one grid point sees: mutable, because statements define values in turn."""

    kernel: Kernel
    buffers: Mapping[BufferName, torch.Tensor]
    values: dict[ValueName, Value]
    indices: dict[str, IndexValue]

    @property
    def rank(self) -> int:
        return len(self.kernel.tiles)

    def dimension(self, tile: IndexName) -> int:
        """The dimension of `Value.lanes` that `tile` runs along."""
        return next(d for d, axis in enumerate(self.kernel.tiles) if axis.name == tile)

    def declaration(self, buffer: BufferName) -> Buffer:
        return next(b for b in self.kernel.buffers if b.name == buffer)

    def index(self, e: IntExpr) -> torch.Tensor:
        """The lanes of an index expression, int64."""
        value = evaluate_index(e, self.indices)
        if isinstance(value, torch.Tensor):
            return value
        return torch.full((1,) * self.rank, value, dtype=torch.int64)

    def mask(self, mask: Mask) -> torch.Tensor:
        """The lanes where all bounds hold."""
        holds = torch.ones((1,) * self.rank, dtype=torch.bool)
        for bound in mask:
            holds = holds & (self.index(bound.index) < self.index(bound.limit))
        return holds

    def operand(self, operand: KernelOperand) -> Value:
        if isinstance(operand, Literal):
            return self.constant(operand.value, operand.dtype)
        if operand not in self.values:
            raise InvariantError(f"kernel {self.kernel.name}: {operand} is used but not defined")
        return self.values[operand]

    def constant(self, value: Scalar, dtype: DataType) -> Value:
        lanes = torch.full((1,) * self.rank, value, dtype=held_torch_dtype(dtype))
        return Value(round_to_dtype(lanes, dtype), dtype)

    def define(self, name: ValueName, lanes: torch.Tensor, dtype: DataType) -> None:
        self.values[name] = Value(round_to_dtype(lanes, dtype), dtype)

    def expand(self, lanes: torch.Tensor, tiles: Sequence[IndexName]) -> torch.Tensor:
        """`lanes` repeated to the full size of each axis of `tiles`."""
        shape = list(lanes.shape)
        for tile in tiles:
            d = self.dimension(tile)
            shape[d] = self.kernel.tiles[d].size
        return lanes.expand(shape)


def evaluate_kernel(
    kernel: Kernel,
    buffers: Mapping[BufferName, torch.Tensor],
    scalars: Mapping[ValueName, Scalar],
    sizes: Mapping[str, int],
) -> None:
    """Run every grid point in order, writing the written buffers in place.

    `sizes` gives every symbol of `kernel.sizes`. Buffers are indexed axis by axis, so the strides
    are those of the tensors themselves. Raises InvariantError for a kernel that breaks the rules.
    """
    for buffer in kernel.buffers:
        if buffers[buffer.name].dtype != to_torch_dtype(buffer.dtype):
            raise InvariantError(
                f"kernel {kernel.name}: buffer {buffer.name} is {buffer.dtype}, "
                f"its tensor {buffers[buffer.name].dtype}"
            )
    extents: dict[str, IndexValue] = {name: sizes[name] for name in kernel.sizes}
    lanes = _tile_lanes(kernel)
    grid = [range(_uniform(axis.extent, extents)) for axis in kernel.grid]
    for point in itertools.product(*grid):
        position = {axis.name: i for axis, i in zip(kernel.grid, point, strict=True)}
        frame = Frame(kernel, buffers, {}, {**extents, **lanes, **position})
        for parameter in kernel.scalars:
            value = frame.constant(scalars[parameter.name], parameter.dtype)
            frame.values[parameter.name] = value
        run_block(kernel.body, frame)


def _tile_lanes(kernel: Kernel) -> dict[str, IndexValue]:
    """0..size-1 along each tile axis's own dimension."""
    lanes: dict[str, IndexValue] = {}
    for d, axis in enumerate(kernel.tiles):
        shape = [1] * len(kernel.tiles)
        shape[d] = axis.size
        lanes[axis.name] = torch.arange(axis.size).reshape(shape)
    return lanes


def _uniform(e: IntExpr, indices: Mapping[str, IndexValue]) -> int:
    """The value of an expression that may not vary over lanes."""
    value = evaluate_index(e, indices)
    if isinstance(value, torch.Tensor):
        raise InvariantError(f"extent {e} varies over the lanes of a tile")
    return value


@singledispatch
def evaluate_index(e: IntExpr, indices: Mapping[str, IndexValue]) -> IndexValue:
    """The value of an index expression, a tensor if it varies over a tile axis."""
    raise InvariantError(f"no lanes for {type(e).__name__}")


@evaluate_index.register
def _(e: Const, indices: Mapping[str, IndexValue]) -> IndexValue:
    return e.value


@evaluate_index.register
def _(e: Symbol, indices: Mapping[str, IndexValue]) -> IndexValue:
    if e.name not in indices:
        raise InvariantError(f"symbol {e.name} is no size, grid axis, loop variable or tile axis")
    return indices[e.name]


@evaluate_index.register
def _(e: Add, indices: Mapping[str, IndexValue]) -> IndexValue:
    total: IndexValue = e.constant
    for term, coefficient in e.terms:
        total = total + coefficient * evaluate_index(term, indices)
    return total


@evaluate_index.register
def _(e: Mul, indices: Mapping[str, IndexValue]) -> IndexValue:
    product: IndexValue = e.coefficient
    for factor in e.factors:
        product = product * evaluate_index(factor, indices)
    return product


@evaluate_index.register
def _(e: FloorDiv, indices: Mapping[str, IndexValue]) -> IndexValue:
    return evaluate_index(e.numerator, indices) // evaluate_index(e.denominator, indices)


@evaluate_index.register
def _(e: Mod, indices: Mapping[str, IndexValue]) -> IndexValue:
    return evaluate_index(e.numerator, indices) % evaluate_index(e.denominator, indices)


@evaluate_index.register
def _(e: Min, indices: Mapping[str, IndexValue]) -> IndexValue:
    return _fold_extremum(e.operands, indices, torch.minimum, min)


@evaluate_index.register
def _(e: Max, indices: Mapping[str, IndexValue]) -> IndexValue:
    return _fold_extremum(e.operands, indices, torch.maximum, max)


def _fold_extremum(
    operands: Sequence[IntExpr],
    indices: Mapping[str, IndexValue],
    of_tensors: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    of_ints: Callable[[int, int], int],
) -> IndexValue:
    first, *rest = (evaluate_index(operand, indices) for operand in operands)
    for value in rest:
        if isinstance(first, int) and isinstance(value, int):
            first = of_ints(first, value)
        else:
            first = of_tensors(torch.as_tensor(first), torch.as_tensor(value))
    return first


def run_block(body: Sequence[object], frame: Frame) -> None:
    for statement in body:
        run_statement(statement, frame)


@singledispatch
def run_statement(statement: object, frame: Frame) -> None:
    """Run one statement: define its outputs in `frame`, or write a buffer."""
    raise InvariantError(f"no evaluation of {type(statement).__name__}")


@run_statement.register
def _(statement: Load, frame: Frame) -> None:
    buffer = frame.declaration(statement.buffer)
    tensor, index, mask = _access(frame, statement.buffer, statement.index, statement.mask)
    lanes = torch.zeros(mask.shape, dtype=tensor.dtype)
    lanes[mask] = tensor[tuple(i[mask] for i in index)]
    frame.define(statement.out, lanes, buffer.dtype)


@run_statement.register
def _(statement: Store, frame: Frame) -> None:
    buffer = frame.declaration(statement.buffer)
    if not buffer.written:
        raise InvariantError(f"store to {statement.buffer}, which is not marked written")
    tensor, index, mask = _access(frame, statement.buffer, statement.index, statement.mask)
    value = frame.operand(statement.value).lanes
    rounded = round_to_dtype(value, buffer.dtype).to(tensor.dtype)
    *index, mask, lanes = torch.broadcast_tensors(*index, mask, rounded)
    tensor[tuple(i[mask] for i in index)] = lanes[mask]


def _access(
    frame: Frame, buffer: BufferName, index: Sequence[IntExpr], mask: Mask
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The tensor, the index of each axis and the mask, the last two broadcast together.

    A tensor without axes appears with one, so that it has an index. No active lane lies outside.
    """
    tensor = frame.buffers[buffer]
    if tensor.dim() == 0 and not index:
        tensor, index = tensor.view(1), (Const(0),)
    *lanes, active = torch.broadcast_tensors(*(frame.index(e) for e in index), frame.mask(mask))
    for axis, (position, extent) in enumerate(zip(lanes, tensor.shape, strict=True)):
        inside = (position >= 0) & (position < extent)
        if not bool((inside | ~active).all()):
            raise InvariantError(
                f"kernel {frame.kernel.name}: {buffer} is accessed outside its axis {axis} of "
                f"extent {extent}: {index[axis]}"
            )
    return tensor, lanes, active


@run_statement.register
def _(statement: Size, frame: Frame) -> None:
    frame.define(statement.out, frame.index(statement.value), DataType.Int)


@run_statement.register
def _(statement: Compute, frame: Frame) -> None:
    args = [frame.operand(arg).lanes for arg in statement.args]
    alike = args[1:] if statement.function == "where" else args
    if len({lanes.dtype for lanes in alike}) != 1:
        types = ", ".join(str(lanes.dtype) for lanes in args)
        raise InvariantError(f"{statement.out} = {statement.function} of mixed types: {types}")
    lanes = TORCH_FUNCTIONS[statement.function](*args)
    frame.define(statement.out, lanes, statement.dtype)


@run_statement.register
def _(statement: Convert, frame: Frame) -> None:
    frame.define(statement.out, frame.operand(statement.src).lanes, statement.dtype)


@run_statement.register
def _(statement: Combine, frame: Frame) -> None:
    accumulator = frame.operand(statement.accumulator)
    src = frame.operand(statement.src)
    if src.lanes.dtype != accumulator.lanes.dtype:
        raise InvariantError(
            f"{statement.out} combines {src.dtype} into an accumulator of {accumulator.dtype}"
        )
    combined = REDUCTION_EVALUATORS[statement.function].combine(accumulator.lanes, src.lanes)
    kept = torch.where(frame.mask(statement.mask), combined, accumulator.lanes)
    frame.define(statement.out, kept, accumulator.dtype)


@run_statement.register
def _(statement: Reduce, frame: Frame) -> None:
    src = frame.operand(statement.src)
    dimensions = [frame.dimension(tile) for tile in statement.tiles]
    lanes = frame.expand(src.lanes, statement.tiles)
    reduced = REDUCTION_EVALUATORS[statement.function].reduce(lanes, dimensions)
    frame.define(statement.out, reduced, src.dtype)


@run_statement.register
def _(statement: WelfordStep, frame: Frame) -> None:
    mean, m2, count = (
        frame.operand(name) for name in (statement.old_mean, statement.old_m2, statement.old_count)
    )
    before = (mean.lanes, m2.lanes, count.lanes)
    src = frame.operand(statement.src).lanes
    if statement.src_m2 is None or statement.src_count is None:
        after = _step_moments(before, src)
    else:
        parts = (frame.operand(statement.src_m2).lanes, frame.operand(statement.src_count).lanes)
        after = merge_moments(before, (src, *parts))
    mask = frame.mask(statement.mask)
    outs = (statement.mean, statement.m2, statement.count)
    for out, old, following, value in zip(outs, before, after, (mean, m2, count), strict=True):
        frame.define(out, torch.where(mask, following, old), value.dtype)


def _step_moments(moments: Moments, src: torch.Tensor) -> Moments:
    """One element more. Welford (1962)."""
    mean, m2, count = moments
    old = torch.where(count == 0, torch.zeros_like(mean), mean)
    delta = src - old
    new_mean = old + delta / (count + 1)
    return new_mean, m2 + delta * (src - new_mean), count + 1


@run_statement.register
def _(statement: WelfordReduce, frame: Frame) -> None:
    src = [
        frame.operand(name) for name in (statement.src_mean, statement.src_m2, statement.src_count)
    ]
    lanes = torch.broadcast_tensors(*(frame.expand(v.lanes, statement.tiles) for v in src))
    mean, m2, count = lanes
    for tile in statement.tiles:
        mean, m2, count = _merge_lanes((mean, m2, count), frame.dimension(tile))
    nothing = torch.full_like(mean, float("nan"))
    frame.define(statement.mean, torch.where(count == 0, nothing, mean), src[0].dtype)
    frame.define(statement.m2, m2, src[1].dtype)
    frame.define(statement.count, count, src[2].dtype)


def _merge_lanes(moments: Moments, dimension: int) -> Moments:
    """Combine lanes i and i + half until one is left along `dimension`."""
    mean, m2, count = moments
    while (lanes := mean.shape[dimension]) > 1:
        half = (lanes + 1) // 2
        low = [t.narrow(dimension, 0, lanes - half) for t in (mean, m2, count)]
        high = [t.narrow(dimension, half, lanes - half) for t in (mean, m2, count)]
        rest = [t.narrow(dimension, lanes - half, 2 * half - lanes) for t in (mean, m2, count)]
        merged = merge_moments((low[0], low[1], low[2]), (high[0], high[1], high[2]))
        mean, m2, count = (torch.cat(pair, dimension) for pair in zip(merged, rest, strict=True))
    return mean, m2, count


def merge_moments(left: Moments, right: Moments) -> Moments:
    """Chan, Golub and LeVeque (1979). A side of count 0 has no say, whatever its mean and m2."""
    count = left[2] + right[2]
    weight = right[2] / count.clamp(min=1).to(left[0].dtype)
    delta = right[0] - left[0]
    mean = left[0] + delta * weight
    m2 = left[1] + right[1] + delta * delta * (left[2] * weight)
    for empty, other in ((left, right), (right, left)):
        mean = torch.where(empty[2] == 0, other[0], mean)
        m2 = torch.where(empty[2] == 0, other[1], m2)
    return mean, m2, count


@run_statement.register
def _(statement: For, frame: Frame) -> None:
    for carry in statement.carries:
        frame.values[carry.name] = _carried(carry, carry.initial, frame)
    for iteration in range(_uniform(statement.trip, frame.indices)):
        frame.indices[statement.variable] = iteration
        run_block(statement.body, frame)
        following = [_carried(carry, carry.following, frame) for carry in statement.carries]
        for carry, value in zip(statement.carries, following, strict=True):
            frame.values[carry.name] = value


def _carried(carry: Carry, operand: KernelOperand, frame: Frame) -> Value:
    """What `carry` takes from `operand`: of its type, and over its tile axes alone."""
    value = frame.operand(operand)
    if value.dtype != carry.dtype:
        raise InvariantError(f"carry {carry.name} of {carry.dtype} takes {value.dtype}")
    for d, axis in enumerate(frame.kernel.tiles):
        if axis.name not in carry.tiles and value.lanes.shape[d] > 1:
            raise InvariantError(
                f"carry {carry.name} varies over {carry.tiles}, what it takes over {axis.name}"
            )
    return Value(frame.expand(value.lanes, carry.tiles), carry.dtype)


@final
@frozen_dataclass
class ReductionEvaluator:
    """`combine(accumulator, src)` lane by lane; `reduce(lanes, dimensions)` keeps them, size 1."""

    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    reduce: Callable[[torch.Tensor, list[int]], torch.Tensor]


def _product(lanes: torch.Tensor, dimensions: list[int]) -> torch.Tensor:
    for dimension in dimensions:
        lanes = lanes.prod(dimension, keepdim=True, dtype=lanes.dtype)
    return lanes


REDUCTION_EVALUATORS: dict[str, ReductionEvaluator] = {
    "sum": ReductionEvaluator(torch.add, lambda t, dims: t.sum(dims, keepdim=True, dtype=t.dtype)),
    "prod": ReductionEvaluator(torch.mul, _product),
    "max": ReductionEvaluator(torch.maximum, lambda t, dims: t.amax(dims, keepdim=True)),
    "min": ReductionEvaluator(torch.minimum, lambda t, dims: t.amin(dims, keepdim=True)),
}
"""One entry per row of REDUCTION_FUNCTIONS."""
