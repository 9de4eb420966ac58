"""The expressions that pick, place or number elements, through torch.

Where ranks share an axis along which an expression works, `Environment.held` says which of its
indices this one has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from meshfuse.base.dtypes import Scalar
from meshfuse.base.errors import UserError
from meshfuse.expr import evaluate as evaluate_int
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops_indexing import (
    Cat,
    IndexSelect,
    Iota,
    Pad,
    Scan,
    Slice,
    TakeAlongAxis,
    TopK,
)
from meshfuse.runtime.evaluate_ops import Environment, Value, evaluate
from meshfuse.runtime.torch_types import to_torch_dtype


def _indices(runs: Sequence[range], device: torch.device) -> torch.Tensor:
    """The indices of some runs, in one tensor."""
    parts = [torch.arange(r.start, r.stop, r.step, device=device) for r in runs]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


def _own_part(whole: torch.Tensor, out: TensorName, axis: int, env: Environment) -> torch.Tensor:
    """What this rank is to have of an axis that was computed whole."""
    runs = env.held(out, axis)
    return whole if runs is None else whole.index_select(axis, _indices(runs, whole.device))


# Placing.


@evaluate.register
def _(expr: Slice, env: Environment) -> tuple[Value, ...]:
    result = env.tensor(expr.src)
    for axis, start in enumerate(expr.starts):
        if env.held(expr.src, axis) is not None:
            continue  # ranks share only what stays as it was
        first, size = evaluate_int(start, env.sizes), env.whole_sizes(expr.out)[axis]
        if first < 0 or first + size > result.shape[axis]:
            raise UserError(
                f"slice {expr.out} of {expr.src}: [{first}, {first + size}) lies beyond axis "
                f"{axis}, of size {result.shape[axis]}"
            )
        result = _own_part(result.narrow(axis, first, size), expr.out, axis, env)
    return (result.clone(memory_format=torch.contiguous_format),)


@evaluate.register
def _(expr: Pad, env: Environment) -> tuple[Value, ...]:
    result = env.tensor(expr.src)
    value = env.scalar(expr.value)
    for axis, shift in enumerate(expr.before):
        if env.held(expr.src, axis) is not None:
            continue
        before, size = evaluate_int(shift, env.sizes), env.whole_sizes(expr.out)[axis]
        padded = _pad_axis(result, axis, before, size, value)
        result = _own_part(padded, expr.out, axis, env)
    return (result.clone(memory_format=torch.contiguous_format),)


def _pad_axis(src: torch.Tensor, axis: int, before: int, size: int, value: Scalar) -> torch.Tensor:
    """`src` from index `before` on in an axis of `size` elements; what is outside is cut off."""
    shape = list(src.shape)
    if before == 0 and size == shape[axis]:
        return src
    first, stop = max(before, 0), min(before + shape[axis], size)
    shape[axis] = size
    result = src.new_full(shape, value)
    if first < stop:
        kept = src.narrow(axis, first - before, stop - first)
        result.narrow(axis, first, stop - first).copy_(kept)
    return result


@evaluate.register
def _(expr: Cat, env: Environment) -> tuple[Value, ...]:
    joined = torch.cat([env.tensor(name) for name in expr.args], expr.axis)
    return (_own_part(joined, expr.out, expr.axis, env),)


@evaluate.register
def _(expr: Iota, env: Environment) -> tuple[Value, ...]:
    """Floats are computed in float64, integers in int64."""
    dtype = to_torch_dtype(env.dtypes[expr.out])
    exact = torch.float64 if dtype.is_floating_point else torch.int64
    runs = env.held(expr.out, 0)
    runs = (range(env.whole_sizes(expr.out)[0]),) if runs is None else runs
    steps = _indices(runs, env.device).to(exact)
    start, step = env.scalar(expr.start), env.scalar(expr.step)
    return ((steps * step + start).to(dtype),)


# Indexing.


def _places(
    index: torch.Tensor, runs: Sequence[range] | None, count: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where the elements at global `index` lie among `count` held ones, and whether they do.

    What is not held is at place 0. Without runs all of it is, at its index.
    """
    if runs is None:
        return index, None
    if len(runs) == 1 and runs[0].step == 1:
        places = index - runs[0].start
        is_held = (places >= 0) & (places < count)
    else:
        held = _indices(runs, index.device)
        places = torch.searchsorted(held, index.contiguous())
        found = held[places.clamp(max=max(count - 1, 0))] if count else index - 1
        is_held = found == index
    return torch.where(is_held, places, 0), is_held


def _check_index(index: torch.Tensor, low: int, size: int, call: str) -> None:
    """On a GPU the host would have to wait for it: there torch's own checks are all."""
    if index.device.type != "cpu" or not index.numel():
        return
    smallest, largest = index.aminmax()
    if smallest < low or largest >= size:
        wrong = smallest if smallest < low else largest
        raise UserError(f"{call}: index {wrong} must lie in [{low}, {size})")


@evaluate.register
def _(expr: IndexSelect, env: Environment) -> tuple[Value, ...]:
    src, index = env.tensor(expr.src), env.tensor(expr.index).long()
    axis, size = expr.axis, evaluate_int(expr.size, env.sizes)
    _check_index(index, 0, size, f"index_select {expr.out} from {expr.src}")
    places, is_held = _places(index.reshape(-1), env.held(expr.src, axis), src.shape[axis])
    shape = (*src.shape[:axis], *index.shape, *src.shape[axis + 1 :])
    if not src.shape[axis]:
        return (src.new_zeros(shape),)
    taken = src.index_select(axis, places)
    if is_held is not None:
        along = [-1 if k == axis else 1 for k in range(src.dim())]
        taken = torch.where(is_held.view(along), taken, taken.new_zeros(()))
    return (taken.reshape(shape),)


@evaluate.register
def _(expr: TakeAlongAxis, env: Environment) -> tuple[Value, ...]:
    src, index = env.tensor(expr.src), env.tensor(expr.index).long()
    axis, size = expr.axis, evaluate_int(expr.size, env.sizes)
    _check_index(index, -size, size, f"take_along_axis {expr.out} from {expr.src}")
    index = torch.where(index < 0, index + size, index)
    places, is_held = _places(index, env.held(expr.src, axis), src.shape[axis])
    kept = torch.broadcast_shapes(*(_with_one(x.shape, axis) for x in (src, index)))
    shape = (*kept[:axis], index.shape[axis], *kept[axis + 1 :])
    if not src.shape[axis]:
        return (src.new_zeros(shape),)
    rows = src.expand(*kept[:axis], src.shape[axis], *kept[axis + 1 :])
    taken = rows.gather(axis, places.expand(shape))
    return (taken if is_held is None else torch.where(is_held, taken, taken.new_zeros(())),)


def _with_one(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], 1, *shape[axis + 1 :])


# Along an axis.


def _running_sum(src: torch.Tensor, axis: int) -> torch.Tensor:
    """torch has none of bool."""
    if src.dtype == torch.bool:
        return src.cumsum(axis) > 0
    return src.cumsum(axis, dtype=src.dtype)


def _running_product(src: torch.Tensor, axis: int) -> torch.Tensor:
    if src.dtype == torch.bool:
        return src.cumprod(axis) > 0
    return src.cumprod(axis, dtype=src.dtype)


_SCANS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "cumsum": _running_sum,
    "cumprod": _running_product,
    "cummax": lambda src, axis: src.cummax(axis).values,
    "cummin": lambda src, axis: src.cummin(axis).values,
}


@evaluate.register
def _(expr: Scan, env: Environment) -> tuple[Value, ...]:
    result = _SCANS[expr.function](env.tensor(expr.src), expr.axis)
    return (_own_part(result, expr.out, expr.axis, env),)


@evaluate.register
def _(expr: TopK, env: Environment) -> tuple[Value, ...]:
    src, k = env.tensor(expr.src), evaluate_int(expr.k, env.sizes)
    size = src.shape[expr.axis]
    if not 0 <= k <= size:
        raise UserError(f"topk {expr.values} of {expr.src}: k={k} must lie in [0, {size}]")
    is_bool = src.dtype == torch.bool
    ranked = src.to(torch.uint8) if is_bool else src  # torch ranks no bool
    values, indices = ranked.topk(k, expr.axis, expr.largest, expr.sorted)
    values = values.to(torch.bool) if is_bool else values
    results = zip((values, indices), expr.outs, strict=True)
    return tuple(_own_part(value, out, expr.axis, env) for value, out in results)
