"""Interned integer expressions: the language of extents and indices.

Build with `symbol`, `const`, Python's operators and the functions below; compare with the `known_*`
functions, or with `is` for equal structure; print with `render`, read with `parse`.
"""

from meshfuse.expr.bounds import known_equal, known_less, known_less_equal, known_multiple
from meshfuse.expr.evaluation import (
    MissingSymbolError,
    coefficient_of,
    evaluate,
    free_symbols,
    substitute,
)
from meshfuse.expr.nodes import (
    Add,
    Algebra,
    Const,
    FloorDiv,
    IntExpr,
    IntLike,
    Max,
    Min,
    Mod,
    Mul,
    Symbol,
)
from meshfuse.expr.parser import parse
from meshfuse.expr.polynomial import linear
from meshfuse.expr.render import render
from meshfuse.expr.simplify import (
    add,
    as_expr,
    ceildiv,
    const,
    const_value,
    floordiv,
    is_const,
    maximum,
    minimum,
    mod,
    mul,
    symbol,
)

__all__ = [
    "Add",
    "Algebra",
    "Const",
    "FloorDiv",
    "IntExpr",
    "IntLike",
    "Max",
    "Min",
    "MissingSymbolError",
    "Mod",
    "Mul",
    "Symbol",
    "add",
    "as_expr",
    "ceildiv",
    "coefficient_of",
    "const",
    "const_value",
    "evaluate",
    "floordiv",
    "free_symbols",
    "is_const",
    "known_equal",
    "known_less",
    "known_less_equal",
    "known_multiple",
    "linear",
    "maximum",
    "minimum",
    "mod",
    "mul",
    "parse",
    "render",
    "substitute",
    "symbol",
]

IntExpr.algebra = Algebra(add, mul, floordiv, mod, render)
