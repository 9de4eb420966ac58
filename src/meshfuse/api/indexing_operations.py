"""Operations of `fd.ops` that pick, place or number elements along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meshfuse.api.constants import constant
from meshfuse.api.operation_calls import (
    BoundOperations,
    ScalarValue,
    require,
    sequence,
    size_argument,
    sizes_argument,
    tensor_argument,
)
from meshfuse.api.recording import Call
from meshfuse.api.tensor_view import TensorView, Val, recording_of, tensor_view, to_scalar_operand
from meshfuse.base.dtypes import DataType, is_floating, is_integral
from meshfuse.base.errors import Unsupported, UserError, UserTypeError
from meshfuse.expr.nodes import Const
from meshfuse.ir import build
from meshfuse.ir.ops import Literal
from meshfuse.ir.ops_indexing import ScalarOperand
from meshfuse.ir.program import Program


class IndexingOperations(BoundOperations):
    """Abstract. Torch runs these operations; what is around them fuses as ever."""

    def slice(
        self,
        arg: TensorView,
        start_indices: Sequence[int | Val],
        end_indices: Sequence[int | Val],
        strides: Sequence[int | Val] | None = None,
        manual_normalization: bool = False,
    ) -> TensorView:
        """Elements start to end - 1 of each axis; strides are 1.

        Starts and ends beyond the axis count as its extent; with `manual_normalization` they must
        lie within.
        """
        keywords: dict[str, Any] = {"start_indices": start_indices, "end_indices": end_indices}
        keywords |= {} if strides is None else {"strides": strides}
        flag = manual_normalization
        keywords |= {} if flag is False else {"manual_normalization": flag}
        call = Call("fd.ops.slice", (arg,), keywords)
        require(call, "manual_normalization", flag, bool)
        starts = sizes_argument(call, arg, start_indices)
        stops = sizes_argument(call, arg, end_indices)
        steps = None if strides is None else sizes_argument(call, arg, strides)
        return self._tensor(
            call,
            arg,
            lambda program: build.slice_(program, arg.name, starts, stops, steps, flag),
        )

    def pad(
        self,
        arg: TensorView,
        pad_widths: Sequence[int | Val],
        value: ScalarValue | None = None,
    ) -> TensorView:
        """Add `value` (by default 0) around `arg`: widths before and after the last axis first.

        Negative widths cut off. `value` must be a bool, an integer or a float as `arg` is.
        """
        given = {} if value is None else {"value": value}
        call = Call("fd.ops.pad", (arg,), {"pad_widths": pad_widths, **given})
        widths = sizes_argument(call, arg, pad_widths)
        wanted = arg.dtype()
        if value is None:
            value = False if wanted is DataType.Bool else 0.0 if is_floating(wanted) else 0
        recording_of(call, (arg, value))
        filling = _of_kind(call, "value", value, wanted)
        return self._tensor(
            call, arg, lambda program: build.pad(program, arg.name, widths, filling)
        )

    def cat(
        self, tensors: Sequence[TensorView], dim: int = 0, manual_padding: bool = False
    ) -> TensorView:
        """The tensors one after the other along axis `dim`.

        With `manual_padding` each is the result of a `pad` that put it in its place.
        """
        keywords: dict[str, Any] = {} if type(dim) is int and dim == 0 else {"dim": dim}
        keywords |= {} if manual_padding is False else {"manual_padding": manual_padding}
        call = Call("fd.ops.cat", (tensors,), keywords)
        require(call, "manual_padding", manual_padding, bool)
        operands = sequence(call, "tensors", tensors, TensorView)
        if not operands:
            raise UserError(f"{call}: No input tensor given")
        names = [operand.name for operand in operands]
        recording_of(call, operands, self._recording)
        return self._tensor(
            call, operands[0], lambda program: build.cat(program, names, dim, manual_padding)
        )

    def index_select(self, arg: TensorView, index: TensorView, dim: int) -> TensorView:
        """Elements `index` of axis `dim`. An index without axes leaves one of size 1.

        On a mesh that shards axis `dim`, each rank takes what it holds.
        """
        call = Call("fd.ops.index_select", (arg, index, dim))
        recording_of(call, (tensor_argument(call, arg), tensor_argument(call, index)))
        return self._tensor(
            call, arg, lambda program: build.index_select(program, arg.name, index.name, dim)
        )

    def take_along_axis(self, arg: TensorView, index: TensorView, dim: int) -> TensorView:
        """For each element of `index`, which counts along axis `dim`, that element of `arg`.

        Other axes have equal sizes, or 1 on one side. Negative indices count from the end.
        """
        call = Call("fd.ops.take_along_axis", (arg, index, dim))
        recording_of(call, (tensor_argument(call, arg), tensor_argument(call, index)))
        return self._tensor(
            call, arg, lambda program: build.take_along_axis(program, arg.name, index.name, dim)
        )

    def embedding_fwd(
        self,
        input: TensorView,
        weight: TensorView,
        padding_idx: int | Val | None = None,
        max_norm: float | Val | None = None,
        norm_type: float | Val | None = None,
        scale_grad_by_freq: bool | Val | None = None,
        sparse: bool | Val | None = None,
    ) -> TensorView:
        """Rows `input` of `weight` [v, e]: [*input, e].

        Rows whose `norm_type`-norm (by default 2) is over `max_norm` are scaled to it, in the
        result only. The others matter to gradients alone. `weight` may be sharded on either axis.
        """
        options = {
            "padding_idx": padding_idx,
            "max_norm": max_norm,
            "norm_type": norm_type,
            "scale_grad_by_freq": scale_grad_by_freq,
            "sparse": sparse,
        }
        given = {name: value for name, value in options.items() if value is not None}
        call = Call("fd.ops.embedding_fwd", (input, weight), given)
        recording_of(call, (tensor_argument(call, input), tensor_argument(call, weight)))
        _check_padding_index(call, padding_idx, weight)
        for name in ("scale_grad_by_freq", "sparse"):
            _option(call, name, options[name], bool)
        limit = _option(call, "max_norm", max_norm, float)
        norm = _option(call, "norm_type", norm_type, float)
        return self._tensor(
            call,
            input,
            lambda program: build.embedding(
                program, input.name, weight.name, limit, 2.0 if norm is None else norm
            ),
        )

    def cumsum(self, arg: TensorView, dim: int, init: ScalarValue | None = None) -> TensorView:
        """Sums of the elements up to each along axis `dim`, on top of `init`; the type stays."""
        return self._scan("cumsum", arg, dim, init)

    def cumprod(self, arg: TensorView, dim: int, init: ScalarValue | None = None) -> TensorView:
        """Products of the elements up to each along axis `dim`, times `init`; the type stays."""
        return self._scan("cumprod", arg, dim, init)

    def cummax(self, arg: TensorView, dim: int, init: ScalarValue | None = None) -> TensorView:
        """The largest of `init` and the elements up to each along axis `dim`; NaN wins."""
        return self._scan("cummax", arg, dim, init)

    def cummin(self, arg: TensorView, dim: int, init: ScalarValue | None = None) -> TensorView:
        """The smallest of `init` and the elements up to each along axis `dim`; NaN wins."""
        return self._scan("cummin", arg, dim, init)

    def _scan(
        self, function: str, arg: TensorView, dim: int, init: ScalarValue | None
    ) -> TensorView:
        given = {} if init is None else {"init": init}
        call = Call(f"fd.ops.{function}", (arg, dim), given)
        recording_of(call, (tensor_argument(call, arg), init))
        first = None if init is None else _of_kind(call, "init", init, arg.dtype())
        return self._tensor(
            call, arg, lambda program: build.scan(program, function, arg.name, dim, first)
        )

    def iota(
        self,
        length: int | Val,
        start: ScalarValue | None = None,
        step: ScalarValue | None = None,
        dtype: DataType = DataType.Int,
    ) -> TensorView:
        """start, start + step, ..., in `dtype`; by default 0, 1, ...

        `start` and `step` are integers or floats as `dtype` is.
        """
        given: dict[str, Any] = {"start": start, "step": step}
        keywords = {name: value for name, value in given.items() if value is not None}
        keywords |= {} if dtype is DataType.Int else {"dtype": dtype}
        call = Call("fd.ops.iota", (length,), keywords)
        require(call, "dtype", dtype, DataType)
        recording = recording_of(call, (length, start, step), self._recording)
        if dtype in (DataType.Bool, DataType.Null):
            raise UserError(f"{call}: dtype must be an integer or floating type")
        if not _is_integer(length):
            raise UserError(f"{call}: length must be an integer, got {length!r}")
        one = 1.0 if is_floating(dtype) else 1
        first = _of_kind(call, "start", one - one if start is None else start, dtype)
        stride = _of_kind(call, "step", one if step is None else step, dtype)
        for name, operand in (("start", first), ("step", stride)):
            if isinstance(operand, Literal) and not math.isfinite(operand.value):
                raise UserError(f"{call}: {name} must be finite")
        if isinstance(stride, Literal) and not stride.value:
            raise UserError(f"{call}: step must not be 0")
        size = size_argument(call, length)

        def define(program: Program) -> tuple[Program, tuple[str]]:
            program, name = build.iota(program, size, first, stride, dtype)
            return program, (name,)

        return tensor_view(recording, recording.define(call, define)[0])

    def topk(
        self,
        arg: TensorView,
        k: int | Val,
        dim: int = -1,
        largest: bool = True,
        sorted: bool = False,
    ) -> tuple[TensorView, TensorView]:
        """The k largest (or smallest) elements along axis `dim`, and their indices (Int).

        In order if `sorted`. NaN is larger than all else.
        """
        keywords: dict[str, Any] = {} if type(dim) is int and dim == -1 else {"dim": dim}
        keywords |= {} if largest is True else {"largest": largest}
        keywords |= {} if sorted is False else {"sorted": sorted}
        call = Call("fd.ops.topk", (arg, k), keywords)
        require(call, "largest", largest, bool)
        require(call, "sorted", sorted, bool)
        recording = self._recording_of(call, tensor_argument(call, arg))
        recording_of(call, (arg, k))
        count = size_argument(call, k)

        def define(program: Program) -> tuple[Program, tuple[str, str]]:
            program, values, indices = build.topk(program, arg.name, count, dim, largest, sorted)
            return program, (values, indices)

        values, indices = recording.define(call, define)
        return tensor_view(recording, values), tensor_view(recording, indices)


def _is_integer(value: object) -> bool:
    if isinstance(value, Val):
        return is_integral(value.dtype())
    return isinstance(value, int) and not isinstance(value, bool)


def _of_kind(call: Call, name: str, value: object, dtype: DataType) -> ScalarOperand:
    """A scalar that is a bool, an integer or a float as `dtype` is, a constant of that type."""
    operand = to_scalar_operand(call, value)
    if isinstance(value, Val):
        own = value.dtype()
    else:
        own = operand.dtype if isinstance(operand, Literal) else DataType.Int
    if (is_floating(own), is_integral(own)) != (is_floating(dtype), is_integral(dtype)):
        raise UserError(f"{call}: {name} must be a scalar of {dtype!r}'s kind, got {value!r}")
    return constant(operand.value, dtype, call) if isinstance(operand, Literal) else operand


def _check_padding_index(call: Call, value: object, weight: TensorView) -> None:
    index = _option(call, "padding_idx", value, int)
    rows = weight.size(0).operand if weight.ndim else None
    if index is not None and isinstance(rows, Const) and not -rows.value <= index < rows.value:
        raise UserError(f"{call}: padding_idx must lie in [{-rows.value}, {rows.value})")


def _option(call: Call, name: str, value: object, wanted: type) -> Any:
    """An optional constant, as a Python scalar or a constant Val."""
    if isinstance(value, Val):
        if value.is_symbolic():
            raise Unsupported(f"{call}: {name} must be a constant")
        operand = value.operand
        value = operand.value if isinstance(operand, Literal | Const) else None
    if value is None:
        return None
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise UserTypeError(f"{call}: {name} must be a {wanted.__name__}, got {value!r}")
    return value
