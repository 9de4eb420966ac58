"""Evaluate a part of a reduction that rfactor took apart, as its definition says.

The root axes are cut by the steps that lead to the logical ones, then those of these that are
reduced are reduced. Places past the end of a cut axis take no part. Slow and plain: kernels are
compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from meshfuse.expr import evaluate
from meshfuse.facts.axis_map import axis_pairs
from meshfuse.ir.axes import AxisKind, AxisName, TensorName
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.ops import Expr, Reduction, Welford
from meshfuse.ir.pointwise import REDUCTION_FUNCTIONS
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Merge, Split
from meshfuse.runtime.torch_types import to_torch_dtype

Reducer = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]


def evaluate_part(
    program: Program,
    expr: Expr,
    values: Mapping[TensorName, torch.Tensor],
    sizes: Mapping[str, int],
    reducers: Mapping[str, Reducer],
) -> tuple[torch.Tensor, ...]:
    """The values of the outputs of a part (ir/rfactor.py). `reducers`: by name of the reduction."""
    definition = program.tensor(TensorName(expr.outs[0]))
    dims = tuple(
        place for place, axis in enumerate(definition.logical) if axis.kind is AxisKind.reduction
    )
    terms, there = _cut_terms(_terms(program, expr, values), definition, sizes)
    if isinstance(expr, Welford):
        results = _moments(terms, there, dims)
    else:
        function = expr.function if isinstance(expr, Reduction) else "sum"
        filled = torch.where(there, terms, _identity(function, terms.dtype))
        results = (reducers[function](filled, dims),)
    outs = zip(results, expr.outs, strict=True)
    return tuple(
        result.to(to_torch_dtype(program.tensor(TensorName(out)).dtype)) for result, out in outs
    )


def _terms(program: Program, expr: Expr, values: Mapping[TensorName, torch.Tensor]) -> torch.Tensor:
    """What is reduced, one dim per root axis: the operand, or the products of two."""
    rank = len(program.tensor(TensorName(expr.outs[0])).root)
    product: torch.Tensor | None = None
    for position, places in axis_pairs(expr, program).items():
        value = values[TensorName(str(expr.ins[position]))]
        placed = [place for place in places if place is not None]
        order = sorted(range(len(placed)), key=placed.__getitem__)
        shape = [1] * rank
        for dim in order:
            shape[placed[dim]] = value.shape[dim]
        aligned = value.permute(order).reshape(shape)
        product = aligned if product is None else product * aligned
        if isinstance(expr, Welford):
            break
    if product is None:
        raise TypeError(f"{expr} reads no tensor")
    return product


def _cut_terms(
    terms: torch.Tensor, definition: TensorDef, sizes: Mapping[str, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`terms` with one dim per logical axis, and which of them exist."""
    names = [axis.name for axis in definition.root]
    there = torch.ones(terms.shape, dtype=torch.bool)
    for step in definition.root_steps:
        match step:
            case Split(source, outer, inner):
                dim, factor = names.index(source), evaluate(step.factor, dict(sizes))
                terms, there = (
                    _split(x, dim, factor, inner_split=step.inner_split) for x in (terms, there)
                )
                names[dim : dim + 1] = [outer, inner]
            case Merge(outer, inner, out):
                terms, there = (_merge(x, names, outer, inner) for x in (terms, there))
                names[names.index(outer)] = out
                names.remove(inner)
            case _:
                raise TypeError(f"{step} defines no axes")
    return terms, there


def _split(x: torch.Tensor, dim: int, factor: int, *, inner_split: bool) -> torch.Tensor:
    size = x.shape[dim]
    other = -(-size // factor)
    outer, inner = (other, factor) if inner_split else (factor, other)
    missing = list(x.shape)
    missing[dim] = outer * inner - size
    return torch.cat([x, x.new_zeros(missing)], dim).unflatten(dim, (outer, inner))


def _merge(
    x: torch.Tensor, names: list[AxisName], outer: AxisName, inner: AxisName
) -> torch.Tensor:
    source, target = names.index(inner), names.index(outer)
    beside = target + 1 if source > target else target
    first = beside - 1 if source > target else target - 1
    x = x.movedim(source, beside)
    return x.reshape(*x.shape[:first], x.shape[first] * x.shape[first + 1], *x.shape[first + 2 :])


def _identity(function: str, dtype: torch.dtype) -> torch.Tensor:
    """What does not change a reduction."""
    identity = REDUCTION_FUNCTIONS[function].identity
    if not isinstance(identity, str):
        return torch.tensor(identity, dtype=dtype)
    lowest = identity == "lowest"
    if dtype.is_floating_point:
        return torch.tensor(float("-inf" if lowest else "inf"), dtype=dtype)
    if dtype == torch.bool:
        return torch.tensor(not lowest)
    limits = torch.iinfo(dtype)
    return torch.tensor(limits.min if lowest else limits.max, dtype=dtype)


def _moments(
    terms: torch.Tensor, there: torch.Tensor, dims: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, m2 and count of the terms that exist."""
    count = there.sum(dims, keepdim=True)
    mean = torch.where(there, terms, 0).sum(dims, keepdim=True) / count
    m2 = torch.where(there, (terms - mean).square(), 0).sum(dims)
    return mean.squeeze(dims), m2, count.squeeze(dims)


def combine_moments(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], dims: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, m2 and count of all that `parts` are the moments of. Chan, Golub and LeVeque (1979)."""
    mean, m2, count = parts
    known = torch.where(count == 0, 0, mean)
    total = count.sum(dims, keepdim=True)
    joint = (known * count).sum(dims, keepdim=True) / total
    between = count * (known - joint).square()
    return joint.squeeze(dims), (m2 + between).sum(dims), total.squeeze(dims)
