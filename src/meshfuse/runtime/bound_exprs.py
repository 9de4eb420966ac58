"""Expressions bound for one set of sizes: closures that call torch on slots, and look up no names.

What `evaluate` computes, bit for bit. An expression that has no such form here is evaluated in an
Environment made for it at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatch
from operator import itemgetter
from typing import Any, final

import torch
from torch.nn import functional

from meshfuse.base.dtypes import DataType
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr
from meshfuse.expr import evaluate as evaluate_int
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.ops import (
    Broadcast,
    Cast,
    Expand,
    Expr,
    Linear,
    Literal,
    MatMul,
    Operand,
    Permute,
    Pointwise,
    Reduction,
    Reshape,
    Set,
    Squeeze,
)
from meshfuse.ir.pointwise import SCALAR_FUNCTIONS, ResultRule
from meshfuse.ir.terms import Terms
from meshfuse.runtime.contractions import (
    Operands,
    add_product,
    linear_operands,
    matmul_operands,
    write_product,
)
from meshfuse.runtime.evaluate_ops import (
    REDUCTIONS,
    Environment,
    Value,
    accumulation_type,
    computing_dtype,
    convert,
    evaluate,
)
from meshfuse.runtime.torch_functions import EXACT_FUNCTIONS, TORCH_FUNCTIONS
from meshfuse.runtime.torch_types import to_torch_dtype

Slots = Any
"""Where the values of one call are: what `Scope.slots` says is an index of it."""

Compute = Callable[[Slots], torch.Tensor]
"""Makes the one result of an expression."""


@final
@frozen_dataclass
class Apply:
    """A Compute that calls a function of torch on what lies in two slots. Who knows that calls it
    directly: in a small program on a GPU a frame counts."""

    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    first: int
    second: int

    def __call__(self, slots: Slots) -> torch.Tensor:
        return self.function(slots[self.first], slots[self.second])


Write = Callable[[Slots, torch.Tensor], object]
"""Leaves it in a tensor of its shape and type, or adds it to that."""

_HALVES = (DataType.Half, DataType.BFloat16)


@final
@frozen_dataclass
class Scope:
    """What expressions are bound with: where values will be, and all that is known of them.

    `env` has no values. The sizes of its symbols are those of all calls that use what is bound.
    """

    slots: Any
    env: Environment

    def torch_dtype(self, name: TensorName | ScalarName) -> torch.dtype:
        return to_torch_dtype(self.env.dtypes[name])

    def rank(self, name: TensorName) -> int:
        return len(self.env.shapes[name])

    def sizes(self, name: TensorName) -> list[int]:
        """The shape of a tensor on this rank."""
        return [evaluate_int(extent, self.env.sizes) for extent in self.env.shapes[name]]

    def read(self, name: TensorName | ScalarName) -> Callable[[Slots], Any]:
        return itemgetter(self.slots[name])


def bind_exprs(
    exprs: Sequence[Expr], scope: Scope, into: TensorName | None = None, *, is_added: bool = False
) -> Callable[[Slots], None]:
    """What runs expressions in order and leaves their results in their slots.

    With `into` there is one, whose result goes into the tensor in that slot, or `is_added` to it.
    """
    if into is not None:
        (expr,) = exprs
        return _bind_write(expr, scope, into, is_added=is_added)
    steps = [_bind_one(expr, scope) for expr in exprs]
    if len(steps) == 1:
        return steps[0]

    def run(slots: Slots) -> None:
        for step in steps:
            step(slots)

    return run


def _bind_one(expr: Expr, scope: Scope) -> Callable[[Slots], None]:
    compute = bind_expr(expr, scope)
    places = [scope.slots[name] for name in expr.outs]
    if compute is None:
        results_of = _bind_general(expr, scope)

        def run_general(slots: Slots) -> None:
            for place, value in zip(places, results_of(slots), strict=True):
                slots[place] = value

        return run_general
    (out,) = places

    def run(slots: Slots) -> None:
        slots[out] = compute(slots)

    return run


def _bind_write(
    expr: Expr, scope: Scope, into: TensorName, *, is_added: bool
) -> Callable[[Slots], None]:
    place = scope.slots[into]
    write = bind_added(expr, scope) if is_added else bind_into(expr, scope)

    def run(slots: Slots) -> None:
        write(slots, slots[place])

    return run


def _bind_general(expr: Expr, scope: Scope) -> Callable[[Slots], tuple[Value, ...]]:
    """`evaluate`, in an Environment that has what the expression reads."""
    env = scope.env
    reads = [(name, scope.slots[name]) for name in dict.fromkeys(expr.ins) if isinstance(name, str)]

    def run(slots: Slots) -> tuple[Value, ...]:
        values: dict[TensorName | ScalarName, Value] = {name: slots[i] for name, i in reads}
        own = Environment(
            env.dtypes, env.shapes, env.sizes, values, None, env.placed, env.rank, env.device
        )
        return evaluate(expr, own)

    return run


def _bind_result(expr: Expr, scope: Scope) -> Compute:
    """The one result of any expression, as a tensor that is not in a slot."""
    compute = bind_expr(expr, scope)
    if compute is not None:
        return compute
    results_of = _bind_general(expr, scope)

    def run(slots: Slots) -> torch.Tensor:
        (result,) = results_of(slots)
        assert isinstance(result, torch.Tensor)
        return result

    return run


# Results as new tensors.


@singledispatch
def bind_expr(expr: Expr, scope: Scope) -> Compute | None:
    """What makes the result; None for an expression that goes the general way."""
    return None


@bind_expr.register
def _(expr: Pointwise, scope: Scope) -> Compute | None:
    if expr.out not in scope.env.shapes:
        return None
    compute, made = _bind_function(expr, scope)
    wanted = scope.torch_dtype(expr.out)
    return compute if made == wanted else lambda slots: compute(slots).to(wanted)


def _bind_function(
    expr: Pointwise, scope: Scope
) -> tuple[Callable[..., torch.Tensor], torch.dtype]:
    """What applies the function to the operands, also with `out=`, and the type that this has."""
    function = TORCH_FUNCTIONS[expr.function]
    rule = SCALAR_FUNCTIONS[expr.function].rule
    dtype = _applied_dtype(expr, scope)
    is_chosen = rule is ResultRule.select
    operands = [
        _bind_operand(arg, DataType.Bool if is_chosen and k == 0 else dtype, scope)
        for k, arg in enumerate(expr.args)
    ]
    made = DataType.Bool if rule is ResultRule.comparison else dtype
    match operands:
        case [x]:
            return lambda slots, **out: function(x(slots), **out), to_torch_dtype(made)
        case [x, y]:
            return lambda slots, **out: function(x(slots), y(slots), **out), to_torch_dtype(made)
        case _:
            return (
                lambda slots, **out: function(*[x(slots) for x in operands], **out)
            ), to_torch_dtype(made)


def _applied_dtype(expr: Pointwise, scope: Scope) -> DataType:
    """The type of the operands: 16 bits are enough where nothing is rounded."""
    if expr.function in EXACT_FUNCTIONS:
        kinds = {scope.env.dtypes[x] if isinstance(x, str) else None for x in expr.args}
        tensors = [x for x in expr.args if x in scope.env.shapes]
        (only, *others) = kinds
        if only in _HALVES and not others and len(tensors) == len(expr.args):
            return only
    return computing_dtype(expr, scope.env)


def _bind_operand(arg: Operand, dtype: DataType, scope: Scope) -> Compute:
    """An operand in the type of the computation. Constants and sizes are converted here, once."""
    env = scope.env
    if isinstance(arg, Literal | IntExpr):
        constant = convert(arg, dtype, env)
        return lambda slots: constant
    place, own, target = scope.slots[arg], scope.torch_dtype(arg), to_torch_dtype(dtype)
    if arg not in env.shapes:
        return lambda slots: torch.tensor(slots[place], dtype=own).to(target)
    if own == target:
        return itemgetter(place)
    return lambda slots: slots[place].to(target)


@bind_expr.register
def _(expr: Cast, scope: Scope) -> Compute:
    src, dtype = scope.slots[expr.src], scope.torch_dtype(expr.out)
    return lambda slots: slots[src].to(dtype)


@bind_expr.register
def _(expr: Set, scope: Scope) -> Compute:
    src = scope.slots[expr.src]
    return lambda slots: slots[src].clone()


@bind_expr.register
def _(expr: Broadcast, scope: Scope) -> Compute:
    src = scope.slots[expr.src]
    dims = [dim for dim, inserted in enumerate(expr.inserted) if inserted]

    def broadcast(slots: Slots) -> torch.Tensor:
        result = slots[src]
        for dim in dims:
            result = result.unsqueeze(dim)
        return result

    return broadcast


@bind_expr.register
def _(expr: Expand, scope: Scope) -> Compute:
    src, sizes = scope.slots[expr.src], scope.sizes(expr.out)
    return lambda slots: slots[src].expand(sizes)


@bind_expr.register
def _(expr: Terms, scope: Scope) -> Compute:
    src, sizes = scope.slots[expr.src], scope.sizes(expr.out)
    return lambda slots: slots[src].unsqueeze(-1).expand(sizes)


@bind_expr.register
def _(expr: Permute, scope: Scope) -> Compute:
    src, dims = scope.slots[expr.src], expr.dims
    return lambda slots: slots[src].permute(dims)


@bind_expr.register
def _(expr: Squeeze, scope: Scope) -> Compute:
    src, dims = scope.slots[expr.src], expr.dims
    return lambda slots: slots[src].squeeze(dims)


@bind_expr.register
def _(expr: Reshape, scope: Scope) -> Compute:
    src, sizes = scope.slots[expr.src], scope.sizes(expr.out)
    return lambda slots: slots[src].reshape(sizes)


@bind_expr.register
def _(expr: Reduction, scope: Scope) -> Compute:
    src, axes, dtype = scope.slots[expr.src], expr.axes, scope.torch_dtype(expr.out)
    if not axes:
        return lambda slots: slots[src].clone().to(dtype)
    if expr.function == "sum":
        own = accumulation_type(scope.torch_dtype(expr.src))
        if own == dtype:
            return lambda slots: slots[src].sum(axes, dtype=own)
    reduce = REDUCTIONS[expr.function]
    return lambda slots: reduce(slots[src], axes).to(dtype)


@bind_expr.register
def _(expr: MatMul, scope: Scope) -> Compute:
    return Apply(torch.matmul, scope.slots[expr.a], scope.slots[expr.b])


@bind_expr.register
def _(expr: Linear, scope: Scope) -> Compute | None:
    if scope.rank(expr.weight) != 2:
        return None
    src, weight = scope.slots[expr.src], scope.slots[expr.weight]
    if expr.bias is None:
        return Apply(functional.linear, src, weight)
    bias = scope.slots[expr.bias]
    return lambda slots: functional.linear(slots[src], slots[weight], slots[bias])


# Results in tensors that exist.


@singledispatch
def bind_into(expr: Expr, scope: Scope) -> Write:
    """What writes the result. Torch has no form that writes this one: it makes a new tensor, which
    is copied."""
    compute = _bind_result(expr, scope)
    return lambda slots, out: out.copy_(compute(slots))


@bind_into.register(Cast)
@bind_into.register(Set)
def _(expr: Cast | Set, scope: Scope) -> Write:
    src = scope.slots[expr.src]
    return lambda slots, out: out.copy_(slots[src])


@bind_into.register
def _(expr: Pointwise, scope: Scope) -> Write:
    """Directly where the function makes the type that is wanted; rounding it is a copy."""
    compute, made = _bind_function(expr, scope)
    if made == scope.torch_dtype(expr.out):
        return lambda slots, out: compute(slots, out=out)
    return lambda slots, out: out.copy_(compute(slots))


@bind_into.register
def _(expr: Reduction, scope: Scope) -> Write:
    """Directly where torch accumulates in the type that is wanted, or nothing is rounded."""
    src, axes, dtype = scope.slots[expr.src], expr.axes, scope.torch_dtype(expr.out)
    own = scope.torch_dtype(expr.src)
    if not axes:
        return lambda slots, out: out.copy_(slots[src])
    if expr.function == "sum" and accumulation_type(own) == dtype:
        return lambda slots, out: torch.sum(slots[src], axes, dtype=dtype, out=out)
    if expr.function in ("max", "min") and own == dtype and 0 not in scope.sizes(expr.src):
        reduce = torch.amax if expr.function == "max" else torch.amin
        return lambda slots, out: reduce(slots[src], axes, out=out)
    reduce_anew = REDUCTIONS[expr.function]
    return lambda slots, out: out.copy_(reduce_anew(slots[src], axes))


@bind_into.register
def _(expr: MatMul, scope: Scope) -> Write:
    a, b = scope.slots[expr.a], scope.slots[expr.b]
    if scope.rank(expr.a) == scope.rank(expr.b) == 2:
        return lambda slots, out: torch.mm(slots[a], slots[b], out=out)

    def write(slots: Slots, out: torch.Tensor) -> None:
        operands = matmul_operands(slots[a], slots[b], out)
        if operands is not None:
            write_product(operands)
        elif out.is_contiguous():
            torch.matmul(slots[a], slots[b], out=out)
        else:  # more batch axes, and gaps between the results: torch 2.13 would copy, too
            out.copy_(torch.matmul(slots[a], slots[b]))

    return write


@bind_into.register
def _(expr: Linear, scope: Scope) -> Write:
    src, weight = scope.slots[expr.src], scope.slots[expr.weight]
    bias = None if expr.bias is None else scope.slots[expr.bias]
    if bias is None and scope.rank(expr.src) == scope.rank(expr.weight) == 2:
        return lambda slots, out: torch.mm(slots[src], slots[weight].mT, out=out)
    compute = _bind_result(expr, scope)

    def write(slots: Slots, out: torch.Tensor) -> None:
        operands = linear_operands(slots[src], slots[weight], out)
        if operands is None:  # weights in groups, or rows that no single step leads through
            out.copy_(compute(slots))
        else:
            write_product(operands, None if bias is None else slots[bias])

    return write


# Results added to tensors that exist.


@singledispatch
def bind_added(expr: Expr, scope: Scope) -> Write:
    """What adds the result. Torch makes it as a new tensor first, in its own type."""
    compute = _bind_result(expr, scope)
    return lambda slots, out: out.add_(compute(slots))


@bind_added.register(Set)
def _(expr: Set, scope: Scope) -> Write:
    src = scope.slots[expr.src]
    return lambda slots, out: out.add_(slots[src])


@bind_added.register(MatMul)
@bind_added.register(Linear)
def _(expr: MatMul | Linear, scope: Scope) -> Write:
    """In one step, of which the sum alone is rounded."""
    first, second = (scope.slots[name] for name in expr.ins[:2])
    find: Callable[..., Operands | None] = (
        matmul_operands if isinstance(expr, MatMul) else linear_operands
    )
    has_bias = isinstance(expr, Linear) and expr.bias is not None
    compute = _bind_result(expr, scope)

    def add(slots: Slots, out: torch.Tensor) -> None:
        operands = None if has_bias else find(slots[first], slots[second], out)
        if operands is None:
            out.add_(compute(slots))
        else:
            add_product(operands)

    return add
