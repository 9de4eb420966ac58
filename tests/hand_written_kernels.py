"""Tile programs written by hand, for the tests of the evaluator and of the printers."""

from collections.abc import Sequence

from meshfuse.base.dtypes import DataType, Scalar
from meshfuse.expr import IntExpr, IntLike, as_expr, symbol
from meshfuse.ir.ops import Literal
from meshfuse.kernel.nodes import (
    Bound,
    Buffer,
    BufferName,
    Carry,
    Combine,
    Compute,
    Convert,
    For,
    GridAxis,
    IndexName,
    Kernel,
    KernelOperand,
    Load,
    Reduce,
    Statement,
    Store,
    TileAxis,
    ValueName,
    WelfordReduce,
    WelfordStep,
)

TILE = 16
ROWS = symbol("rows", low=0)
COLUMNS = symbol("columns", low=0)
GRID = symbol("g0", low=0)
STEP = symbol("k0", low=0)
LANE = symbol("n0", low=0, high=TILE - 1)


def value(name: str) -> ValueName:
    return ValueName(name)


def tile(name: str) -> IndexName:
    return IndexName(name)


def ceildiv(n: IntExpr, by: int) -> IntExpr:
    return (n + (by - 1)) // by


def literal(number: Scalar, dtype: DataType = DataType.Float) -> Literal:
    return Literal(number, dtype)


def buffer(
    name: str,
    dtype: DataType,
    shape: Sequence[IntLike],
    strides: Sequence[IntLike],
    *,
    written: bool = False,
) -> Buffer:
    return Buffer(
        BufferName(name),
        dtype,
        tuple(as_expr(e) for e in shape),
        tuple(as_expr(e) for e in strides),
        written,
    )


def stride_symbols(kernel_buffers: Sequence[Buffer]) -> list[IndexName]:
    """The names of all stride symbols, in order."""
    names = (repr(s) for b in kernel_buffers for s in b.strides)
    return [IndexName(n) for n in dict.fromkeys(names) if n.isidentifier()]


def below(index: IntExpr, limit: IntLike) -> tuple[Bound, ...]:
    return (Bound(index, as_expr(limit)),)


def pointwise(
    body: Sequence[Statement],
    inputs: Sequence[DataType],
    output: DataType,
    *,
    strided: bool = False,
) -> Kernel:
    """One-dimensional: `body` computes `out` from `x0`, `x1`, ... over `columns` elements.

    With `strided` the inputs have stride symbols, else they are contiguous.
    """
    index = GRID * TILE + LANE
    mask = below(index, COLUMNS)
    sources = tuple(
        buffer(f"t{i}", dtype, [COLUMNS], [symbol(f"s{i}") if strided else 1])
        for i, dtype in enumerate(inputs)
    )
    result = buffer("t9", output, [COLUMNS], [1], written=True)
    loads = tuple(Load(value(f"x{i}"), b.name, (index,), mask) for i, b in enumerate(sources))
    store = Store(result.name, (index,), value("out"), mask)
    buffers = (*sources, result)
    return Kernel(
        "pointwise",
        buffers,
        (),
        (IndexName("columns"), *stride_symbols(buffers)),
        (GridAxis(IndexName("g0"), ceildiv(COLUMNS, TILE)),),
        (TileAxis(tile("n0"), TILE),),
        (*loads, *body, store),
    )


def unary(function: str, dtype: DataType, result: DataType | None = None) -> Kernel:
    """out = function(x) of one element type."""
    result = result or dtype
    body = (Compute(value("out"), function, result, (value("x0"),)),)
    return pointwise(body, [dtype], result)


def binary(function: str, dtype: DataType, result: DataType | None = None) -> Kernel:
    """out = function(x, y) of one element type."""
    result = result or dtype
    body = (Compute(value("out"), function, result, (value("x0"), value("x1"))),)
    return pointwise(body, [dtype, dtype], result)


def conversion(source: DataType, target: DataType) -> Kernel:
    return pointwise((Convert(value("out"), target, value("x0")),), [source], target)


def row_reduction(function: str, dtype: DataType, initial: Scalar) -> Kernel:
    """[rows, columns] -> [rows]: one grid point a row, lanes over columns, then across lanes."""
    index = (GRID, STEP * TILE + LANE)
    mask = below(index[1], COLUMNS)
    acc = Carry(value("acc"), dtype, Literal(initial, dtype), value("next"), (tile("n0"),))
    body: tuple[Statement, ...] = (
        Load(value("x"), BufferName("t0"), index, mask),
        Combine(value("next"), function, value("acc"), value("x"), mask),
    )
    return Kernel(
        f"row_{function}",
        (
            buffer("t0", dtype, [ROWS, COLUMNS], [symbol("s0"), 1]),
            buffer("t1", dtype, [ROWS], [1], written=True),
        ),
        (),
        (IndexName("rows"), IndexName("columns"), IndexName("s0")),
        (GridAxis(IndexName("g0"), ROWS),),
        (TileAxis(tile("n0"), TILE),),
        (
            For(IndexName("k0"), ceildiv(COLUMNS, TILE), (acc,), body),
            Reduce(value("total"), function, value("acc"), (tile("n0"),)),
            Store(BufferName("t1"), (GRID,), value("total")),
        ),
    )


def column_reduction(function: str, dtype: DataType, initial: Scalar) -> Kernel:
    """[rows, columns] -> [columns]: one grid point a strip of columns, a loop over rows."""
    column = GRID * TILE + LANE
    mask = below(column, COLUMNS)
    acc = Carry(value("acc"), dtype, Literal(initial, dtype), value("next"), (tile("n0"),))
    body: tuple[Statement, ...] = (
        Load(value("x"), BufferName("t0"), (STEP, column), mask),
        Combine(value("next"), function, value("acc"), value("x")),
    )
    return Kernel(
        f"column_{function}",
        (
            buffer("t0", dtype, [ROWS, COLUMNS], [symbol("s0"), 1]),
            buffer("t1", dtype, [COLUMNS], [1], written=True),
        ),
        (),
        (IndexName("rows"), IndexName("columns"), IndexName("s0")),
        (GridAxis(IndexName("g0"), ceildiv(COLUMNS, TILE)),),
        (TileAxis(tile("n0"), TILE),),
        (
            For(IndexName("k0"), ROWS, (acc,), body),
            Store(BufferName("t1"), (column,), value("acc"), mask),
        ),
    )


def row_welford(dtype: DataType = DataType.Float) -> Kernel:
    """[rows, columns] -> mean, m2, count of each row."""
    index = (GRID, STEP * TILE + LANE)
    mask = below(index[1], COLUMNS)
    lanes = (tile("n0"),)
    mean, m2, count = value("mean"), value("m2"), value("count")
    totals = (value("mean_2"), value("m2_2"), value("count_2"))
    carries = (
        Carry(mean, dtype, Literal(0.0, dtype), value("mean_1"), lanes),
        Carry(m2, dtype, Literal(0.0, dtype), value("m2_1"), lanes),
        Carry(count, DataType.Int, Literal(0, DataType.Int), value("count_1"), lanes),
    )
    body: tuple[Statement, ...] = (
        Load(value("x"), BufferName("t0"), index, mask),
        WelfordStep(
            carries[0].following,
            carries[1].following,
            carries[2].following,
            mean,
            m2,
            count,
            value("x"),
            mask,
        ),
    )
    outputs: tuple[tuple[str, DataType, KernelOperand], ...] = (
        ("t1", dtype, totals[0]),
        ("t2", dtype, totals[1]),
        ("t3", DataType.Int, totals[2]),
    )
    return Kernel(
        "row_welford",
        (
            buffer("t0", dtype, [ROWS, COLUMNS], [symbol("s0"), 1]),
            *(buffer(name, kind, [ROWS], [1], written=True) for name, kind, _ in outputs),
        ),
        (),
        (IndexName("rows"), IndexName("columns"), IndexName("s0")),
        (GridAxis(IndexName("g0"), ROWS),),
        (TileAxis(tile("n0"), TILE),),
        (
            For(IndexName("k0"), ceildiv(COLUMNS, TILE), carries, body),
            WelfordReduce(*totals, mean, m2, count, lanes),
            *(Store(BufferName(name), (GRID,), operand) for name, _, operand in outputs),
        ),
    )
