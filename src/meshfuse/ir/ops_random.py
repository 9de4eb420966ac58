"""Expressions that make random numbers, and where these come from.

A number is a function of a seed, an offset and the global index of its element: how a program is
cut, scheduled or sharded changes none.
"""

from __future__ import annotations

from typing import Annotated, Final, final

from meshfuse.base.dtypes import DataType, is_floating
from meshfuse.base.errors import UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.text import OpNames, Out
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.describe import describe_call
from meshfuse.ir.infer import Result, infer, tensor_shape
from meshfuse.ir.ops import LibraryExpr, Operand
from meshfuse.ir.program import Program

DISTRIBUTIONS: Final = ("uniform", "normal")


@final
@frozen_dataclass
class RandomSource(LibraryExpr):
    """The state of torch's generator of the device, which moves on by `draws` at each call.

    `seed` and `offset` are Int; a seed beyond int64 wraps. A program has at most one, in front of
    all that draws: its draws have the offsets `offset`, `offset` + 1, ... in the order of
    definition. All ranks of a program must have the same state.
    """

    seed: Out[ScalarName]
    offset: Out[ScalarName]
    draws: int

    @property
    def outs(self) -> tuple[ScalarName, ...]:
        return (self.seed, self.offset)

    @property
    def ins(self) -> tuple[Operand, ...]:
        return ()


@final
@frozen_dataclass
class Random(LibraryExpr):
    """Numbers of a row of `DISTRIBUTIONS`, in the type and shape of `out`.

    uniform: from `first` on and below `second`, each number that the type has between the two.
    normal: of mean `first` and standard deviation `second`. They are those of `seed` at
    `offset` + `draw`.
    """

    out: Out[TensorName]
    distribution: Annotated[str, OpNames(DISTRIBUTIONS)]
    first: Operand
    second: Operand
    seed: Operand
    offset: Operand
    draw: int = 0

    @property
    def outs(self) -> tuple[TensorName, ...]:
        return (self.out,)

    @property
    def ins(self) -> tuple[Operand, ...]:
        return (self.first, self.second, self.seed, self.offset)


@infer.register
def _(expr: RandomSource, program: Program) -> tuple[Result, ...]:
    return (Result(DataType.Int, (), is_tensor=False),) * 2


@infer.register
def _(expr: Random, program: Program) -> tuple[Result, ...]:
    """Type and axes are what the definition of `out` says."""
    dtype = program.tensor(expr.out).dtype
    if not is_floating(dtype):
        call = describe_call(program, expr.distribution, expr.ins, dtype=dtype.value)
        raise UserError(f"{call}: Random distributions only create floating point types!")
    return (Result(dtype, tensor_shape(program, expr.out)),)
