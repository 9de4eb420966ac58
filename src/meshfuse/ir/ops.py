"""The expressions of the IR. Each defines its outputs from its inputs; all of them are names.

`Out` fields print left of the equals sign, `OpNames` ones are the printed name, the rest are
arguments. Adding an op: its class and prose here, then one registration in each interpretation
(infer, axis pairs, sharding rule, evaluate, lower); the layer test names what is missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, final

from meshfuse.base.dtypes import DataType, Scalar
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.text import OpNames, Out, Rest
from meshfuse.expr.nodes import IntExpr
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.pointwise import REDUCTION_FUNCTIONS, SCALAR_FUNCTIONS


@final
@frozen_dataclass
class Literal:
    """A constant operand with its element type."""

    value: Scalar
    dtype: DataType


Operand = TensorName | ScalarName | Literal | IntExpr
"""What a pointwise expression reads. An IntExpr is an integer in the program's (global) sizes."""


class Expr(ABC):
    """Abstract. Concrete expressions are final frozen dataclasses."""

    __slots__ = ()

    @property
    @abstractmethod
    def outs(self) -> tuple[TensorName | ScalarName, ...]:
        """The names this expression defines, in order."""

    @property
    @abstractmethod
    def ins(self) -> tuple[Operand, ...]:
        """The operands this expression reads, in order."""


class UnaryExpr(Expr):
    """Abstract: one tensor in, one tensor out, in fields `out` and `src`."""

    __slots__ = ()
    out: TensorName
    src: TensorName

    @property
    def outs(self) -> tuple[TensorName, ...]:
        return (self.out,)

    @property
    def ins(self) -> tuple[Operand, ...]:
        return (self.src,)


class LibraryExpr(Expr):
    """Abstract: has no form inside a kernel. Each is a segment of its own, which torch runs."""

    __slots__ = ()


@final
@frozen_dataclass
class Pointwise(Expr):
    """Apply a row of `SCALAR_FUNCTIONS` element by element.

    All tensor operands have the rank of `out`; a broadcast axis stretches. 16-bit floats compute in
    float32 and round once, on the way out. With scalar operands only, `out` is a scalar.
    """

    out: Out[TensorName | ScalarName]
    function: Annotated[str, OpNames(SCALAR_FUNCTIONS)]
    args: Rest[tuple[Operand, ...]]

    @property
    def outs(self) -> tuple[TensorName | ScalarName, ...]:
        return (self.out,)

    @property
    def ins(self) -> tuple[Operand, ...]:
        return self.args


@final
@frozen_dataclass
class Cast(UnaryExpr):
    """Convert each element to the type of `out`: to nearest even, or to an integer towards 0."""

    out: Out[TensorName]
    src: TensorName


@final
@frozen_dataclass
class Set(UnaryExpr):
    """Copy. With different shardings on the two sides it is a redistribution."""

    out: Out[TensorName]
    src: TensorName


@final
@frozen_dataclass
class Broadcast(UnaryExpr):
    """Insert a broadcast axis where `inserted` is true; the false entries are the axes of `src`."""

    out: Out[TensorName]
    src: TensorName
    inserted: tuple[bool, ...]


@final
@frozen_dataclass
class Expand(UnaryExpr):
    """Repeat along axes that are broadcast in `src` and iteration in `out`.

    The other axes have the sizes that `out` says: a run checks that those are what `src` has.
    """

    out: Out[TensorName]
    src: TensorName


@final
@frozen_dataclass
class Permute(UnaryExpr):
    """Axis k of `out` is axis `dims[k]` of `src`."""

    out: Out[TensorName]
    src: TensorName
    dims: tuple[int, ...]


@final
@frozen_dataclass
class Squeeze(UnaryExpr):
    """Drop axes `dims` of `src`, which are broadcast, or whose size a run finds to be 1."""

    out: Out[TensorName]
    src: TensorName
    dims: tuple[int, ...]


@final
@frozen_dataclass
class Reshape(UnaryExpr):
    """The elements of `src`, in row-major order, under other axes; none is broadcast.

    The root axes of `out` are those of `src`; its root steps merge and split them, exactly, into
    its logical axes. A run checks that both have as many elements.
    """

    out: Out[TensorName]
    src: TensorName


@final
@frozen_dataclass
class Reduction(UnaryExpr):
    """Reduce tensor axes `axes` of `src` by a row of `REDUCTION_FUNCTIONS`.

    `out` keeps them among its (root) axes, in place, with kind reduction. Floats of 16 bits
    accumulate in float32.
    """

    out: Out[TensorName]
    function: Annotated[str, OpNames(REDUCTION_FUNCTIONS)]
    src: TensorName
    axes: tuple[int, ...]


@final
@frozen_dataclass
class Welford(Expr):
    """Mean, sum of squared deviations (m2) and count over tensor axes `axes` of `src`.

    Welford, Technometrics 4 (1962); partial results combine as in Chan, Golub and LeVeque (1979).
    The outputs keep the reduced axes as a Reduction's do; `count` is int64. With `src_m2` and
    `src_count`, `src` holds the means of parts, and the moments of all of them are combined.
    """

    mean: Out[TensorName]
    m2: Out[TensorName]
    count: Out[TensorName]
    src: TensorName
    axes: tuple[int, ...]
    src_m2: TensorName | None = None
    src_count: TensorName | None = None

    @property
    def outs(self) -> tuple[TensorName, ...]:
        return (self.mean, self.m2, self.count)

    @property
    def ins(self) -> tuple[Operand, ...]:
        if self.src_m2 is None or self.src_count is None:
            return (self.src,)
        return (self.src, self.src_m2, self.src_count)


@final
@frozen_dataclass
class MatMul(LibraryExpr):
    """torch.matmul of equal element types, both of rank >= 1.

    Batch axes broadcast; a rank-1 operand has no m (or n) axis. The contracted axis is the last
    axis of `out`, kind reduction.
    """

    out: Out[TensorName]
    a: TensorName
    b: TensorName

    @property
    def outs(self) -> tuple[TensorName, ...]:
        return (self.out,)

    @property
    def ins(self) -> tuple[Operand, ...]:
        return (self.a, self.b)


@final
@frozen_dataclass
class Linear(LibraryExpr):
    """src [*batch, k] by weight [*d, n, k], plus bias [*d, n]: out [*d, *batch, n, reduced k].

    The leading axes d of a weight of rank > 2 are batch axes of the weight alone.
    """

    out: Out[TensorName]
    src: TensorName
    weight: TensorName
    bias: TensorName | None = None

    @property
    def outs(self) -> tuple[TensorName, ...]:
        return (self.out,)

    @property
    def ins(self) -> tuple[Operand, ...]:
        return (self.src, self.weight) if self.bias is None else (self.src, self.weight, self.bias)
