"""How much work an expression is on one rank: arithmetic, and bytes read and written."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import singledispatch
from typing import final

from meshfuse.base.dtypes import ITEM_BYTES, DataType
from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Expr, Linear, Literal, MatMul, Pointwise, UnaryExpr, Welford
from meshfuse.ir.ops_attention import SdpfaBwd, SdpfaFwd
from meshfuse.ir.ops_indexing import Cat, IndexSelect, Iota, Pad, Scan, Slice, TakeAlongAxis, TopK
from meshfuse.ir.ops_random import Random, RandomSource


@final
@frozen_dataclass
class LocalTensor:
    """What a rank holds of a tensor."""

    shape: tuple[int, ...]
    dtype: DataType

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]


Tensors = Callable[[str], LocalTensor | None]
"""What a name stands for on the rank; None for a scalar."""


@final
@frozen_dataclass
class ExpressionWork:
    """Operations in contractions on elements of `dtype`, others, bytes read and written."""

    contraction_flops: int
    other_flops: int
    bytes: int
    dtype: DataType = DataType.Float


@singledispatch
def work_of(expr: Expr, tensors: Tensors) -> ExpressionWork:
    """The work of `expr`; each tensor is read or written once, an accumulator costs nothing.

    A multiplication and an addition are two operations. Any function of an element counts as one.
    """
    raise InvariantError(f"nobody knows how much work {type(expr).__name__} is")


@work_of.register(Pointwise)
@work_of.register(UnaryExpr)
@work_of.register(Welford)
@work_of.register(Pad)
@work_of.register(Cat)
@work_of.register(Scan)
@work_of.register(Iota)
@work_of.register(TopK)
@work_of.register(Random)
@work_of.register(RandomSource)
def _(expr: Expr, tensors: Tensors) -> ExpressionWork:
    """One operation for each element of the largest tensor."""
    found = [*_operands(expr, tensors), *_results(expr, tensors)]
    elements = max((tensor.elements for tensor in found), default=0)
    return ExpressionWork(0, elements, sum(tensor.bytes for tensor in found))


@work_of.register(Slice)
@work_of.register(IndexSelect)
@work_of.register(TakeAlongAxis)
def _(expr: Expr, tensors: Tensors) -> ExpressionWork:
    """Of `src`, the first operand, no more is read than `out` has."""
    written = sum(tensor.bytes for tensor in _results(expr, tensors))
    src, *others = _operands(expr, tensors)
    read = min(src.bytes, written) + sum(tensor.bytes for tensor in others)
    return ExpressionWork(0, 0, read + written)


@work_of.register
def _(expr: MatMul, tensors: Tensors) -> ExpressionWork:
    return _contraction(expr, _tensor(expr.a, tensors), tensors)


@work_of.register
def _(expr: Linear, tensors: Tensors) -> ExpressionWork:
    return _contraction(expr, _tensor(expr.src, tensors), tensors)


def _contraction(expr: MatMul | Linear, left: LocalTensor, tensors: Tensors) -> ExpressionWork:
    """The contracted axis is the last of the left operand, of which the rank may hold a part."""
    flops = 2 * _tensor(expr.out, tensors).elements * left.shape[-1]
    return ExpressionWork(flops, 0, _all_bytes(expr, tensors), left.dtype)


@work_of.register
def _(expr: SdpfaFwd, tensors: Tensors) -> ExpressionWork:
    """Two contractions: query with key, scores with value."""
    return _attention(expr, tensors, over_features=1, over_values=1)


@work_of.register
def _(expr: SdpfaBwd, tensors: Tensors) -> ExpressionWork:
    """Five: the scores anew, gradients of scores twice, of value and of weights."""
    return _attention(expr, tensors, over_features=3, over_values=2)


def _attention(
    expr: SdpfaFwd | SdpfaBwd, tensors: Tensors, *, over_features: int, over_values: int
) -> ExpressionWork:
    """Causal attention has half of the scores; there is one exponential for each."""
    query, key, value = (_tensor(name, tensors) for name in (expr.query, expr.key, expr.value))
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    if isinstance(expr.is_causal, Literal) and expr.is_causal.value:
        scores //= 2
    flops = 2 * scores * (over_features * query.shape[-1] + over_values * value.shape[-1])
    return ExpressionWork(flops, scores, _all_bytes(expr, tensors), query.dtype)


def _tensor(name: TensorName, tensors: Tensors) -> LocalTensor:
    found = tensors(name)
    if found is None:
        raise InvariantError(f"{name} is no tensor of this rank")
    return found


def _operands(expr: Expr, tensors: Tensors) -> list[LocalTensor]:
    names = dict.fromkeys(name for name in expr.ins if isinstance(name, str))
    return [tensor for name in names if (tensor := tensors(name)) is not None]


def _results(expr: Expr, tensors: Tensors) -> list[LocalTensor]:
    return [tensor for name in expr.outs if (tensor := tensors(name)) is not None]


def _all_bytes(expr: Expr, tensors: Tensors) -> int:
    return sum(tensor.bytes for tensor in (*_operands(expr, tensors), *_results(expr, tensors)))
