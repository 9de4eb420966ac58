"""Scaled dot-product attention, as PyTorch has it, and its gradients.

    out = softmax(query @ key^T * scale + bias, where mask and causality allow) @ value

query [*batch, H, L, E], key [*batch, H, S, E], value [*batch, H, S, V], out [*batch, H, L, V], with
one or more batch axes. Sums are of float32, for float64 of float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from meshfuse.base.dtypes import DataType, is_floating
from meshfuse.base.errors import UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.text import Out
from meshfuse.expr import IntExpr, const
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.describe import describe_call
from meshfuse.ir.infer import (
    AxisShape,
    Result,
    infer,
    lookup_in,
    meet,
    meet_extents,
    operand_dtype,
    tensor_shape,
)
from meshfuse.ir.ops import LibraryExpr, Literal, Operand
from meshfuse.ir.program import Program

LEAST_RANK = 4
"""[N, H, L, E]."""


@final
@frozen_dataclass
class SdpfaFwd(LibraryExpr):
    """Attention, and what its gradients need.

    `logsumexp` [*batch, H, L], float32, is of the scores. `bias` and `mask` (Bool, true: keep) are
    [*batch, H, L, S] or stretch to it. `is_causal`: a query sees keys up to its own number. Without
    `scale` it is 1 / sqrt(E). A row that may see nothing is 0. Dropout drops weights by the numbers
    of `rng_seed` at `rng_offset` + `draw`: `seed` [2] and `offset` say which, 0 without dropout.
    """

    out: Out[TensorName]
    logsumexp: Out[TensorName]
    seed: Out[TensorName]
    offset: Out[TensorName]
    query: TensorName
    key: TensorName
    value: TensorName
    dropout_p: Operand
    is_causal: Operand
    scale: Operand | None = None
    bias: TensorName | None = None
    mask: TensorName | None = None
    rng_seed: Operand | None = None
    rng_offset: Operand | None = None
    draw: int = 0

    @property
    def outs(self) -> tuple[TensorName, ...]:
        return (self.out, self.logsumexp, self.seed, self.offset)

    @property
    def ins(self) -> tuple[Operand, ...]:
        optional = (self.bias, self.mask, self.scale, self.rng_seed, self.rng_offset)
        given = tuple(operand for operand in optional if operand is not None)
        return (self.query, self.key, self.value, self.dropout_p, self.is_causal, *given)


@final
@frozen_dataclass
class SdpfaBwd(LibraryExpr):
    """The gradients of attention without bias and mask, each like what it belongs to.

    The operands are those of the forward expression, and what it made.
    """

    grad_query: Out[TensorName]
    grad_key: Out[TensorName]
    grad_value: Out[TensorName]
    grad_out: TensorName
    query: TensorName
    key: TensorName
    value: TensorName
    out: TensorName
    logsumexp: TensorName
    dropout_p: Operand
    is_causal: Operand
    seed: TensorName
    offset: TensorName
    scale: Operand | None = None

    @property
    def outs(self) -> tuple[TensorName, ...]:
        return (self.grad_query, self.grad_key, self.grad_value)

    @property
    def ins(self) -> tuple[Operand, ...]:
        tensors = (self.grad_out, self.query, self.key, self.value, self.out, self.logsumexp)
        given = () if self.scale is None else (self.scale,)
        return (*tensors, self.dropout_p, self.is_causal, self.seed, self.offset, *given)


Attention = SdpfaFwd | SdpfaBwd


# What they define.


@infer.register
def _(expr: SdpfaFwd, program: Program) -> tuple[Result, ...]:
    call = _forward_call(expr, program)
    dtype = _check_tensors(call, program, [expr.query, expr.key, expr.value])
    _check_scalars(call, program, expr)
    rows = _check_axes(call, program, expr)
    _check_stretching(call, program, expr, dtype)
    value = tensor_shape(program, expr.value)
    return (
        Result(dtype, (*rows, value[-1])),
        Result(DataType.Float, rows),
        Result(DataType.Int, ((AxisKind.iteration, const(2)),)),
        Result(DataType.Int, ()),
    )


@infer.register
def _(expr: SdpfaBwd, program: Program) -> tuple[Result, ...]:
    tensors = [expr.grad_out, expr.query, expr.key, expr.value, expr.out]
    call = describe_call(program, "sdpfa_bwd", [*tensors, expr.logsumexp])
    dtype = _check_tensors(call, program, tensors)
    _check_scalars(call, program, expr)
    rows, value = _check_axes(call, program, expr), tensor_shape(program, expr.value)
    for tensor, wanted in (
        (expr.grad_out, (*rows, value[-1])),
        (expr.out, (*rows, value[-1])),
        (expr.logsumexp, rows),
    ):
        have = tensor_shape(program, tensor)
        if len(have) != len(wanted):
            raise UserError(f"{call}: {tensor} must have {len(wanted)} axes")
        for ours, theirs in zip(have, wanted, strict=True):
            meet_extents(call, ours[1], theirs[1])
    return tuple(
        Result(dtype, tensor_shape(program, tensor))
        for tensor in (expr.query, expr.key, expr.value)
    )


def _forward_call(expr: SdpfaFwd, program: Program) -> str:
    given = {"bias": expr.bias, "mask": expr.mask}
    named = {name: tensor for name, tensor in given.items() if tensor is not None}
    return describe_call(program, "sdpfa_fwd", [expr.query, expr.key, expr.value], **named)


def _check_tensors(call: str, program: Program, tensors: list[TensorName]) -> DataType:
    """One floating type, one rank."""
    dtypes = {program.tensor(tensor).dtype for tensor in tensors}
    if len(dtypes) > 1 or not all(map(is_floating, dtypes)):
        raise UserError(f"{call}: operands must have one floating type; cast them")
    ranks = {program.tensor(tensor).ndim for tensor in tensors}
    if len(ranks) > 1 or min(ranks) < LEAST_RANK:
        raise UserError(
            f"{call}: operands must have one rank, {LEAST_RANK} or more: [*batch, heads, sequence, "
            "features]"
        )
    return dtypes.pop()


def _check_scalars(call: str, program: Program, expr: Attention) -> None:
    lookup = lookup_in(program)
    reals = {"dropout_p": expr.dropout_p, "scale": expr.scale}
    for name, operand in reals.items():
        if operand is not None and operand_dtype(operand, lookup)[0] is DataType.Bool:
            raise UserError(f"{call}: {name} must be a real number")
    if isinstance(expr.dropout_p, Literal) and not 0 <= expr.dropout_p.value < 1:
        raise UserError(f"{call}: dropout_p must lie in [0, 1), got {expr.dropout_p.value}")
    if operand_dtype(expr.is_causal, lookup)[0] is not DataType.Bool:
        raise UserError(f"{call}: is_causal must be a Bool")


def _check_axes(call: str, program: Program, expr: Attention) -> tuple[AxisShape, ...]:
    """The axes [*batch, H, L]. Nothing stretches, and so every head has keys of its own."""
    query, key, value = (tensor_shape(program, t) for t in (expr.query, expr.key, expr.value))
    rows = [
        _equal(f"{call}: batch and heads of query, key and value", *axes)
        for axes in zip(query[:-2], key[:-2], value[:-2], strict=True)
    ]
    _equal(f"{call}: the sequences of key and value", key[-2], value[-2])
    _equal(f"{call}: the features of query and key", query[-1], key[-1])
    return (*rows, query[-2])


def _equal(what: str, *axes: AxisShape) -> AxisShape:
    """The axis that all are. Raises UserError where they differ."""
    meet_extents(what, *(extent for _, extent in axes))
    if len({kind for kind, _ in axes}) > 1:
        sizes = " and ".join(str(extent) for _, extent in axes)
        raise UserError(f"{what} must be equal, got {sizes}; expand what has size 1")
    return meet(what, *axes)


def _check_stretching(call: str, program: Program, expr: SdpfaFwd, dtype: DataType) -> None:
    """Bias and mask have the type and rank that they must, and fit the scores."""
    query, key = tensor_shape(program, expr.query), tensor_shape(program, expr.key)
    for name, tensor, wanted in (
        ("bias", expr.bias, dtype),
        ("mask", expr.mask, DataType.Bool),
    ):
        if tensor is None:
            continue
        axes = tensor_shape(program, tensor)
        if program.tensor(tensor).dtype is not wanted or len(axes) != len(query):
            raise UserError(f"{call}: {name} must be {wanted.value} of {len(query)} axes")
        for own, score in zip(axes, (*query[:-1], key[-2]), strict=True):
            if own[0] is not AxisKind.broadcast:
                meet_extents(call, own[1], score[1])


def attention_extents(
    program: Program, expr: Attention
) -> Iterator[tuple[TensorName, IntExpr, IntExpr]]:
    """What must be equal: a tensor, and the extents of an axis of its and of another operand's."""
    query, key, value = (tensor_shape(program, t) for t in (expr.query, expr.key, expr.value))
    for mine, keys, values in zip(query[:-2], key[:-2], value[:-2], strict=True):
        yield expr.key, mine[1], keys[1]
        yield expr.value, mine[1], values[1]
    yield expr.value, key[-2][1], value[-2][1]
    yield expr.key, query[-1][1], key[-1][1]
    rows = (*query[:-1], value[-1])
    others: list[tuple[TensorName | None, tuple[AxisShape, ...]]] = []
    if isinstance(expr, SdpfaFwd):
        others += [(expr.bias, (*query[:-1], key[-2])), (expr.mask, (*query[:-1], key[-2]))]
    else:
        others += [(expr.grad_out, rows), (expr.out, rows), (expr.logsumexp, rows[:-1])]
    for tensor, wanted in others:
        own = () if tensor is None else tensor_shape(program, tensor)
        for have, axis in zip(own, wanted, strict=False):
            if tensor is not None and have[0] is not AxisKind.broadcast:
                yield tensor, axis[1], have[1]
