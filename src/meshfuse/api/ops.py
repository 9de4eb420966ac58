"""`fd.ops`: the operations of a program.

Pointwise operations take TensorViews, Vals and Python scalars, by position; the others have named
arguments. Dims count tensor axes, and negative ones count from the last. An operation refuses what
it cannot do when it is called, with an error that restates the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, final, overload

from meshfuse.api.attention_operations import AttentionOperations
from meshfuse.api.constants import constant
from meshfuse.api.operation_calls import (
    ScalarValue,
    require,
    sequence,
    sizes_argument,
    tensor_argument,
)
from meshfuse.api.recording import Call, Recording
from meshfuse.api.tensor_view import (
    TensorView,
    Val,
    Value,
    apply_function,
    recording_of,
    scalar,
    size_of,
    tensor_view,
    to_scalar_operand,
)
from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import Unsupported, UserTypeError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.ir import build
from meshfuse.ir.ops import Literal
from meshfuse.ir.pointwise import SCALAR_FUNCTIONS
from meshfuse.ir.program import Program


@final
@frozen_dataclass
class UnaryFunction:
    """A pointwise function of one operand: a TensorView gives a TensorView, a scalar a Val."""

    name: str
    recording: Recording | None

    @overload
    def __call__(self, x: TensorView, /) -> TensorView: ...
    @overload
    def __call__(self, x: ScalarValue, /) -> Val: ...
    def __call__(self, x: Value, /) -> TensorView | Val:
        return apply_function(self.name, (x,), self.recording)


@final
@frozen_dataclass
class BinaryFunction:
    """A pointwise function of two operands: any TensorView among them gives a TensorView.

    Operands of lower rank get leading broadcast axes; axes of static extent 1 stretch.
    """

    name: str
    recording: Recording | None

    @overload
    def __call__(self, a: TensorView, b: Value, /) -> TensorView: ...
    @overload
    def __call__(self, a: Value, b: TensorView, /) -> TensorView: ...
    @overload
    def __call__(self, a: ScalarValue, b: ScalarValue, /) -> Val: ...
    def __call__(self, a: Value, b: Value, /) -> TensorView | Val:
        return apply_function(self.name, (a, b), self.recording)


@final
@frozen_dataclass
class TernaryFunction:
    """A pointwise function of three operands: any TensorView among them gives a TensorView."""

    name: str
    recording: Recording | None

    @overload
    def __call__(self, a: TensorView, b: Value, c: Value, /) -> TensorView: ...
    @overload
    def __call__(self, a: Value, b: TensorView, c: Value, /) -> TensorView: ...
    @overload
    def __call__(self, a: Value, b: Value, c: TensorView, /) -> TensorView: ...
    @overload
    def __call__(self, a: ScalarValue, b: ScalarValue, c: ScalarValue, /) -> Val: ...
    def __call__(self, a: Value, b: Value, c: Value, /) -> TensorView | Val:
        return apply_function(self.name, (a, b, c), self.recording)


@final
class Operations(AttentionOperations):
    """The operations: `fd.ops` is bound to `fd`, `meshfuse.ops` to what its operands belong to."""

    def __init__(self, recording: Recording | None = None) -> None:
        super().__init__(recording)
        self.abs = UnaryFunction("abs", recording)
        self.neg = UnaryFunction("neg", recording)
        self.exp = UnaryFunction("exp", recording)
        self.log = UnaryFunction("log", recording)
        self.sqrt = UnaryFunction("sqrt", recording)
        self.rsqrt = UnaryFunction("rsqrt", recording)
        self.reciprocal = UnaryFunction("reciprocal", recording)
        self.sin = UnaryFunction("sin", recording)
        self.cos = UnaryFunction("cos", recording)
        self.tanh = UnaryFunction("tanh", recording)
        self.erf = UnaryFunction("erf", recording)
        self.sigmoid = UnaryFunction("sigmoid", recording)
        self.relu = UnaryFunction("relu", recording)
        self.silu = UnaryFunction("silu", recording)
        self.gelu = UnaryFunction("gelu", recording)
        self.add = BinaryFunction("add", recording)
        self.sub = BinaryFunction("sub", recording)
        self.mul = BinaryFunction("mul", recording)
        self.div = BinaryFunction("div", recording)
        self.pow = BinaryFunction("pow", recording)
        self.maximum = BinaryFunction("maximum", recording)
        self.minimum = BinaryFunction("minimum", recording)
        self.eq = BinaryFunction("eq", recording)
        self.ne = BinaryFunction("ne", recording)
        self.lt = BinaryFunction("lt", recording)
        self.le = BinaryFunction("le", recording)
        self.gt = BinaryFunction("gt", recording)
        self.ge = BinaryFunction("ge", recording)
        self.where = TernaryFunction("where", recording)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"fd.ops has no operation {name!r}; it has {', '.join(dir(self))}")

    def __dir__(self) -> list[str]:
        methods = {name for cls in type(self).__mro__ for name in vars(cls)} - set(dir(object))
        return sorted([*SCALAR_FUNCTIONS, *(name for name in methods if name[0] != "_")])

    # Copies and casts.

    @overload
    def set(self, x: TensorView, /) -> TensorView: ...
    @overload
    def set(self, x: ScalarValue, /) -> Val: ...
    def set(self, x: Value, /) -> TensorView | Val:
        """A copy. With different shardings on the two sides it is a communication."""
        call = Call("fd.ops.set", (x,))
        if isinstance(x, TensorView):
            return self._tensor(call, x, lambda program: build.set_(program, x.name))
        recording = self._recording_of(call, x)
        return scalar(recording, to_scalar_operand(call, x))

    @overload
    def cast(self, arg: TensorView, dtype: DataType) -> TensorView: ...
    @overload
    def cast(self, arg: ScalarValue, dtype: DataType) -> Val: ...
    def cast(self, arg: Value, dtype: DataType) -> TensorView | Val:
        """Convert to `dtype`: floats round to nearest even, float to integer truncates."""
        call = Call("fd.ops.cast", (arg,), {"dtype": dtype})
        if not isinstance(dtype, DataType):
            raise UserTypeError(f"{call}: dtype must be a DataType, got {type(dtype).__name__}")
        if isinstance(arg, TensorView):
            return self._tensor(call, arg, lambda program: build.cast(program, arg.name, dtype))
        recording = self._recording_of(call, arg)
        operand = to_scalar_operand(call, arg)
        if not isinstance(operand, Literal):
            raise Unsupported(f"{call}: only tensors and constants can be cast")
        return scalar(recording, constant(operand.value, dtype, call))

    # Axes.

    def broadcast(self, arg: TensorView, is_broadcast_dim: Sequence[bool]) -> TensorView:
        """Insert axes of extent 1 at the true entries; the false ones are the axes of `arg`."""
        call = Call("fd.ops.broadcast", (arg,), {"is_broadcast_dim": is_broadcast_dim})
        flags = sequence(call, "is_broadcast_dim", is_broadcast_dim, bool)
        return self._tensor(call, arg, lambda program: build.broadcast(program, arg.name, flags))

    def broadcast_in_dim(
        self, arg: TensorView, shape: Sequence[int | Val], broadcast_dims: Sequence[int]
    ) -> TensorView:
        """Axis k of `arg` becomes axis `broadcast_dims[k]` of `shape`; the rest repeats."""
        call = Call(
            "fd.ops.broadcast_in_dim", (arg,), {"shape": shape, "broadcast_dims": broadcast_dims}
        )
        sizes = sizes_argument(call, arg, shape)
        dims = sequence(call, "broadcast_dims", broadcast_dims, int)
        return self._tensor(
            call, arg, lambda program: build.broadcast_in_dim(program, arg.name, sizes, dims)
        )

    def expand(self, arg: TensorView, shape: Sequence[int | Val]) -> TensorView:
        """Repeat axes of extent 1 to `shape`; -1 keeps an axis, more sizes add leading axes.

        Sizes that are known only when the program runs are compared then.
        """
        call = Call("fd.ops.expand", (arg,), {"shape": shape})
        sizes = sizes_argument(call, arg, shape)
        return self._tensor(call, arg, lambda program: build.expand(program, arg.name, sizes))

    def permute(self, arg: TensorView, dims: Sequence[int]) -> TensorView:
        """Axis k of the result is axis `dims[k]` of `arg`."""
        call = Call("fd.ops.permute", (arg,), {"dims": dims})
        order = sequence(call, "dims", dims, int)
        return self._tensor(call, arg, lambda program: build.permute(program, arg.name, order))

    def reshape(self, arg: TensorView, new_shape: Sequence[int | Val]) -> TensorView:
        """The same elements, in row-major order, under other axes; one size may be -1.

        Of an input it is a view, where the input's layout allows one. Numbers of elements that are
        known only when the program runs are compared then.
        """
        call = Call("fd.ops.reshape", (arg,), {"new_shape": new_shape})
        sizes = sizes_argument(call, arg, new_shape)
        return self._tensor(call, arg, lambda program: build.reshape(program, arg.name, sizes))

    def squeeze(
        self, arg: TensorView, dims: Sequence[int], squeeze_expanded: bool = False
    ) -> TensorView:
        """Drop axes `dims`, which must have static extent 1.

        With `squeeze_expanded` also those that `expand` repeats.
        """
        keywords: dict[str, Any] = {"dims": dims}
        keywords |= {"squeeze_expanded": True} if squeeze_expanded else {}
        call = Call("fd.ops.squeeze", (arg,), keywords)
        axes = sequence(call, "dims", dims, int)
        return self._tensor(
            call, arg, lambda program: build.squeeze(program, arg.name, axes, squeeze_expanded)
        )

    def size(self, arg: TensorView, dim: int) -> Val:
        """Global extent of axis `dim`."""
        call = Call("fd.ops.size", (arg, dim))
        self._recording_of(call, tensor_argument(call, arg))
        return size_of(call, arg, dim)

    def shape(self, arg: TensorView, /) -> list[Val]:
        """Global extents of all axes."""
        call = Call("fd.ops.shape", (arg,))
        self._recording_of(call, tensor_argument(call, arg))
        return arg.shape()

    # Reductions.

    def sum(
        self,
        arg: TensorView,
        dims: int | Sequence[int] | None = None,
        keepdim: bool = False,
        dtype: DataType = DataType.Null,
        *,
        dim: int | None = None,
    ) -> TensorView:
        """Sum over `dims` (or the one `dim`; all axes if neither). Bool and Int32 give Int.

        `dtype` converts before summing. 16-bit floats stay 16-bit, accumulated in float32.
        """
        return self._reduce("sum", arg, dims, dim, keepdim, dtype)

    def prod(
        self,
        arg: TensorView,
        dims: int | Sequence[int] | None = None,
        keepdim: bool = False,
        dtype: DataType = DataType.Null,
        *,
        dim: int | None = None,
    ) -> TensorView:
        """Product over `dims`, with types and arguments as those of `sum`; 1 of nothing."""
        return self._reduce("prod", arg, dims, dim, keepdim, dtype)

    def max(
        self,
        arg: TensorView,
        dims: int | Sequence[int] | None = None,
        keepdim: bool = False,
        dtype: DataType = DataType.Null,
        *,
        dim: int | None = None,
    ) -> TensorView:
        """Largest value over `dims` (or the one `dim`; all axes if neither); NaN wins.

        `dtype` must stay Null. Of nothing: the lowest value, -inf for floats.
        """
        return self._reduce("max", arg, dims, dim, keepdim, dtype)

    def min(
        self,
        arg: TensorView,
        dims: int | Sequence[int] | None = None,
        keepdim: bool = False,
        dtype: DataType = DataType.Null,
        *,
        dim: int | None = None,
    ) -> TensorView:
        """Smallest value over `dims` (or the one `dim`; all axes if neither); NaN wins.

        `dtype` must stay Null. Of nothing: the highest value, +inf for floats.
        """
        return self._reduce("min", arg, dims, dim, keepdim, dtype)

    def mean(
        self,
        arg: TensorView,
        dims: int | Sequence[int] | None = None,
        keepdim: bool = False,
        *,
        dim: int | None = None,
    ) -> TensorView:
        """Mean over `dims` (or the one `dim`; all axes if neither), in Float or Double."""
        keywords: dict[str, Any] = {"dims": dims, "dim": dim}
        keywords |= {} if keepdim is False else {"keepdim": keepdim}
        call, axes = _reduced("mean", arg, keywords)
        require(call, "keepdim", keepdim, bool)
        return self._tensor(call, arg, lambda program: build.mean(program, arg.name, axes, keepdim))

    def var(
        self, arg: TensorView, dims: Sequence[int], correction: int = 1, keepdim: bool = False
    ) -> TensorView:
        """Variance over `dims`: squared deviations over the number of elements - `correction`."""
        return self._statistics("var", arg, dims, correction, keepdim)[0]

    def var_mean(
        self, arg: TensorView, dims: Sequence[int], correction: int = 1, keepdim: bool = False
    ) -> tuple[TensorView, TensorView]:
        """Variance and mean over `dims`, in this order, in one sweep (Welford's)."""
        variance, mean = self._statistics("var_mean", arg, dims, correction, keepdim)
        return variance, mean

    def welford(
        self, arg: TensorView, dims: Sequence[int]
    ) -> tuple[TensorView, TensorView, TensorView]:
        """Mean, sum of squared deviations (m2) and number of elements (Int) over `dims`."""
        call = Call("fd.ops.welford", (arg,), {"dims": dims})
        axes = sequence(call, "dims", dims, int)
        recording = self._recording_of(call, tensor_argument(call, arg))

        def define(program: Program) -> tuple[Program, tuple[str, str, str]]:
            program, *names = build.welford(program, arg.name, axes)
            return program, (names[0], names[1], names[2])

        mean, m2, count = recording.define(call, define)
        return (
            tensor_view(recording, mean),
            tensor_view(recording, m2),
            tensor_view(recording, count),
        )

    def _statistics(
        self, function: str, arg: TensorView, dims: Sequence[int], correction: int, keepdim: bool
    ) -> list[TensorView]:
        """Variance and, for var_mean, mean."""
        keywords: dict[str, Any] = {"dims": dims}
        if type(correction) is not int or correction != 1:
            keywords["correction"] = correction
        keywords |= {} if keepdim is False else {"keepdim": keepdim}
        call = Call(f"fd.ops.{function}", (arg,), keywords)
        axes = sequence(call, "dims", dims, int)
        require(call, "correction", correction, int)
        require(call, "keepdim", keepdim, bool)
        recording = self._recording_of(call, tensor_argument(call, arg))

        def define(program: Program) -> tuple[Program, tuple[str, ...]]:
            program, variance, mean = build.var_mean(program, arg.name, axes, correction, keepdim)
            return program, (variance, mean) if function == "var_mean" else (variance,)

        return [tensor_view(recording, name) for name in recording.define(call, define)]

    def _reduce(
        self,
        function: str,
        arg: TensorView,
        dims: int | Sequence[int] | None,
        dim: int | None,
        keepdim: bool,
        dtype: DataType,
    ) -> TensorView:
        keywords: dict[str, Any] = {"dims": dims, "dim": dim}
        keywords |= {} if keepdim is False else {"keepdim": keepdim}
        keywords |= {"dtype": dtype} if dtype is not DataType.Null else {}
        call, axes = _reduced(function, arg, keywords)
        require(call, "keepdim", keepdim, bool)
        require(call, "dtype", dtype, DataType)
        return self._tensor(
            call,
            arg,
            lambda program: build.reduction(
                program, function, arg.name, axes, keepdim, _dtype_or_none(dtype)
            ),
        )

    # Contractions.

    def linear(
        self, arg1: TensorView, arg2: TensorView, bias: TensorView | None = None
    ) -> TensorView:
        """[*batch, k] times weight [*d, n, k] transposed, plus bias [*d, n]: [*d, *batch, n]."""
        operands = (arg1, arg2) if bias is None else (arg1, arg2, bias)
        call = Call("fd.ops.linear", (arg1, arg2), {} if bias is None else {"bias": bias})
        for operand in operands:
            self._recording_of(call, tensor_argument(call, operand))
        recording_of(call, operands)
        bias_name = None if bias is None else bias.name
        return self._tensor(
            call, arg1, lambda program: build.linear(program, arg1.name, arg2.name, bias_name)
        )

    def matmul(self, arg1: TensorView, arg2: TensorView) -> TensorView:
        """torch.matmul of operands of the same element type."""
        call = Call("fd.ops.matmul", (arg1, arg2))
        for operand in (arg1, arg2):
            self._recording_of(call, tensor_argument(call, operand))
        recording_of(call, (arg1, arg2))
        return self._tensor(call, arg1, lambda program: build.matmul(program, arg1.name, arg2.name))


def _reduced(
    function: str, arg: TensorView, keywords: dict[str, Any]
) -> tuple[Call, tuple[int, ...] | None]:
    """The call of a reduction, and the dims that it reduces; None are all."""
    given = {name: value for name, value in keywords.items() if value is not None}
    call = Call(f"fd.ops.{function}", (arg,), given)
    if "dims" in given and "dim" in given:
        raise UserTypeError(f"{call}: takes dims or dim, not both")
    tensor_argument(call, arg)
    wanted = given.get("dims", given.get("dim"))
    match wanted:
        case None:
            return call, None
        case int() if not isinstance(wanted, bool):
            return call, (wanted,)
        case _:
            return call, sequence(call, "dims", wanted, int)


def _dtype_or_none(dtype: DataType) -> DataType | None:
    return None if dtype is DataType.Null else dtype
