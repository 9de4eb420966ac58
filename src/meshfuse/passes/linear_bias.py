"""Take the bias out of a linear whose contraction crosses ranks, so that it is added once."""

from __future__ import annotations

from dataclasses import replace

from meshfuse.facts.sharding import Digit, Sharding, sharding_of
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.infer import ONE, pointwise_dtypes, tensor_shape
from meshfuse.ir.ops import Broadcast, Cast, Expr, Linear, Pointwise
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import add_tensor, copy_axes, copy_tensor, fresh_axes, fresh_tensor_name
from meshfuse.ir.transforms import clear_reductions
from meshfuse.passes.apply_sharding import place_tensor


def separate_bias(program: Program, expr: Linear) -> tuple[Program, tuple[Expr, ...]]:
    """Write the bias as an addition of its own.

    T3 = linear(T0, T1, T2)
    ->  T4 = linear(T0, T1);  T5 = broadcast(T2);  T6 = add(T4, T5);  T3 = cast(T6)

    T4 takes over the reduced axes and the schedule of T3, which keeps its tensor axes with theirs.
    Without the cast where the addition already has the type of T3.
    """
    assert expr.bias is not None
    program, product = _twin(program, expr.out)
    program = clear_reductions(program, expr.out)
    program, bias, broadcast = _broadcast_bias(program, expr.bias, expr)
    _, dtype = pointwise_dtypes(program, "add", (product, bias))
    parts: list[Expr] = [Linear(product, expr.src, expr.weight), *broadcast]
    if dtype is program.tensor(expr.out).dtype:
        return program, (*parts, Pointwise(expr.out, "add", (product, bias)))
    program, total = copy_tensor(program, expr.out, dtype=dtype)
    return program, (*parts, Pointwise(total, "add", (product, bias)), Cast(expr.out, total))


def _twin(program: Program, tensor: TensorName) -> tuple[Program, TensorName]:
    """A tensor that nothing defines yet, with all axes of `tensor` and its loop nest."""
    definition, schedule = program.tensor(tensor), program.schedule(tensor)
    program, name = fresh_tensor_name(program)
    program, logical, copied = copy_axes(program, definition.logical, schedule)
    return add_tensor(program, name, replace(definition, logical=logical), copied), name


def _broadcast_bias(
    program: Program, bias: TensorName, expr: Linear
) -> tuple[Program, TensorName, tuple[Expr, ...]]:
    """bias [*d, n] -> [*d, 1, ..., 1, n], placed as the result's d and n are."""
    leading = program.tensor(bias).ndim - 1
    batch = program.tensor(expr.src).ndim - 1
    if batch == 0:
        return program, bias, ()
    inserted = (*[False] * leading, *[True] * batch, False)
    shape = [ONE] * len(inserted)
    for place, size in zip(_false_places(inserted), tensor_shape(program, bias), strict=True):
        shape[place] = size
    result = sharding_of(program, expr.out)
    axes = tuple(
        (Digit(extent),) if kind is AxisKind.broadcast else digits
        for (kind, extent), digits in zip(shape, result.axes, strict=True)
    )
    program, logical = fresh_axes(program, shape)
    definition = TensorDef(program.tensor(bias).dtype, logical)
    program, aligned = place_tensor(program, definition, Sharding(result.mesh, axes), {})
    return program, aligned, (Broadcast(aligned, bias, inserted),)


def _false_places(flags: tuple[bool, ...]) -> tuple[int, ...]:
    return tuple(place for place, flag in enumerate(flags) if not flag)
