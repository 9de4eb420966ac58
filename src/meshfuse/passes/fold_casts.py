"""Casts of casts, and what nothing reads."""

from __future__ import annotations

from meshfuse.base.dtypes import DataType
from meshfuse.base.trace import Note
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Cast, Expr
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import redirect_uses, remove_dead, with_exprs

# Types that hold every value of the key, besides itself.
_HOLDS: dict[DataType, tuple[DataType, ...]] = {
    DataType.Bool: tuple(t for t in DataType if t not in (DataType.Bool, DataType.Null)),
    DataType.Int32: (DataType.Int, DataType.Double),
    DataType.Half: (DataType.Float, DataType.Double),
    DataType.BFloat16: (DataType.Float, DataType.Double),
    DataType.Float: (DataType.Double,),
}


def fold_casts(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Skip a cast that loses nothing on the way to another.

    T1: f32 = cast(T0: bf16);  T2: f16 = cast(T1)  ->  T2 = cast(T0)
    T1: f32 = cast(T0: bf16);  T2: bf16 = cast(T1)  ->  uses of T2 read T0

    Tensors that the user placed on a mesh, and outputs, keep their definition's place.
    """
    exprs: list[Expr] = []
    origins: dict[TensorName, TensorName] = {}
    same: list[tuple[TensorName, TensorName]] = []
    outputs = {output.tensor for output in program.fusion.outputs}
    for expr in program.fusion.exprs:
        if not isinstance(expr, Cast):
            exprs.append(expr)
            continue
        source = origins.get(expr.src, expr.src)
        exprs.append(Cast(expr.out, source))
        placed = program.schedule(expr.out).mesh is not None
        if not placed and holds(program.tensor(source).dtype, program.tensor(expr.out).dtype):
            origins[expr.out] = source
            if program.tensor(source).dtype is program.tensor(expr.out).dtype:
                if expr.out not in outputs:
                    same.append((expr.out, source))
    program = with_exprs(program, exprs)
    for cast, source in same:
        program = redirect_uses(program, cast, source)
    return program, ()


def remove_unread(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """Drop expressions that no output needs."""
    return remove_dead(program), ()


def holds(inner: DataType, outer: DataType) -> bool:
    """Whether every value of type `inner` is one of type `outer`: the cast loses nothing."""
    return inner is outer or outer in _HOLDS.get(inner, ())
