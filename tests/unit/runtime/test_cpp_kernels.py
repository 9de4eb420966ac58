"""Compiled C++ kernels against the evaluator and against torch."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

import hand_written_kernels as hand
from meshfuse.base.dtypes import DataType, Scalar
from meshfuse.codegen.cpp import print_cpp
from meshfuse.expr import as_expr
from meshfuse.kernel.nodes import (
    Bound,
    BufferName,
    Carry,
    Combine,
    Compute,
    For,
    GridAxis,
    IndexName,
    Kernel,
    Load,
    Mask,
    Reduce,
    ScalarParameter,
    Size,
    Statement,
    Store,
    TileAxis,
    WelfordReduce,
    WelfordStep,
)
from meshfuse.runtime.compile import KernelCompiler
from meshfuse.runtime.evaluate_kernel import evaluate_kernel
from meshfuse.runtime.torch_types import to_torch_dtype

INF = float("inf")
NAN = float("nan")
FLOATS = (DataType.Float, DataType.Double, DataType.Half, DataType.BFloat16)
NUMBERS = (*FLOATS, DataType.Int, DataType.Int32)
SPECIALS = [0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 1e-40, -1e-40, 3e38, 88.7, -104.0]

Check = Callable[..., list[torch.Tensor]]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def check(compiler: KernelCompiler) -> Check:
    """`check(kernel, inputs, outputs)`: run the kernel and its evaluator, compare, return outputs.

    The tensors of `outputs` are poisoned copies for each, and must agree where a kernel stores and
    where it does not. Exact unless `tolerance` is given.
    """

    def run(
        kernel: Kernel,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        scalars: Sequence[Scalar] = (),
        tolerance: float = 0.0,
        threads: int = 1,
        **sizes: int,
    ) -> list[torch.Tensor]:
        values = dict(zip((p.name for p in kernel.scalars), scalars, strict=True))
        written = [t.clone() for t in outputs]
        compiler.compile_source(print_cpp(kernel))([*inputs, *written], values, sizes, threads)
        expected = [t.clone() for t in outputs]
        tensors = dict(zip((b.name for b in kernel.buffers), [*inputs, *expected], strict=True))
        evaluate_kernel(kernel, tensors, values, dict.fromkeys(kernel.sizes, 0) | sizes)
        for ours, theirs in zip(written, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
        return written

    return run


def numbers(dtype: DataType, *shape: int) -> torch.Tensor:
    if dtype in FLOATS:
        return (torch.randn(*shape) * 3).to(to_torch_dtype(dtype))
    if dtype is DataType.Bool:
        return torch.rand(*shape) < 0.5
    return torch.randint(-50, 50, shape).to(to_torch_dtype(dtype))


def poison(dtype: DataType, *shape: int) -> torch.Tensor:
    return torch.full(shape, 1, dtype=to_torch_dtype(dtype))


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 37])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_pointwise_with_masked_tails(check: Check, dtype: DataType, n: int) -> None:
    for function in ("add", "sub", "mul"):
        x, y = numbers(dtype, n), numbers(dtype, n)
        (out,) = check(hand.binary(function, dtype), [x, y], [poison(dtype, n)], columns=n)
        assert torch.equal(out, getattr(torch, function)(x, y))


@pytest.mark.parametrize("dtype", NUMBERS)
def test_neg_relu_lt_where_of_each_type(check: Check, dtype: DataType) -> None:
    n = 41
    x, y = numbers(dtype, n), numbers(dtype, n)
    if dtype in FLOATS:
        x[:5] = torch.tensor([NAN, INF, -INF, -0.0, 0.0])
    check(hand.unary("neg", dtype), [x], [poison(dtype, n)], columns=n)
    check(hand.unary("relu", dtype), [x], [poison(dtype, n)], columns=n)
    lt = hand.binary("lt", dtype, DataType.Bool)
    check(lt, [x, y], [poison(DataType.Bool, n)], columns=n)
    args = (hand.value("x0"), hand.value("x1"), hand.value("x2"))
    where = hand.pointwise(
        (Compute(hand.value("out"), "where", dtype, args),), [DataType.Bool, dtype, dtype], dtype
    )
    check(where, [numbers(DataType.Bool, n), x, y], [poison(dtype, n)], columns=n)


@pytest.mark.parametrize("function", ["add", "mul", "lt", "relu"])
def test_functions_of_bool(check: Check, function: str) -> None:
    x, y, out = numbers(DataType.Bool, 45), numbers(DataType.Bool, 45), poison(DataType.Bool, 45)
    if function == "relu":
        check(hand.unary(function, DataType.Bool), [x], [out], columns=45)
    else:
        check(hand.binary(function, DataType.Bool), [x, y], [out], columns=45)


@pytest.mark.parametrize("source", [*NUMBERS, DataType.Bool])
@pytest.mark.parametrize("target", [*NUMBERS, DataType.Bool])
def test_conversions(check: Check, source: DataType, target: DataType) -> None:
    x = numbers(source, 50)
    (out,) = check(hand.conversion(source, target), [x], [poison(target, 50)], columns=50)
    assert torch.equal(out, x.to(to_torch_dtype(target)))


@pytest.mark.parametrize("dtype", [DataType.Int, DataType.Int32])
def test_integers_wrap_and_divide_towards_zero(check: Check, dtype: DataType) -> None:
    limits = torch.iinfo(to_torch_dtype(dtype))
    low, high = limits.min, limits.max
    x = torch.tensor([7, -7, 7, -7, 5, low, high, low, high], dtype=to_torch_dtype(dtype))
    y = torch.tensor([2, 2, -2, -2, 0, -1, 1, 1, high], dtype=to_torch_dtype(dtype))
    n = len(x)
    for function in ("add", "sub", "mul", "div"):
        check(hand.binary(function, dtype), [x, y], [poison(dtype, n)], columns=n)
    (out,) = check(hand.binary("div", dtype), [x, y], [poison(dtype, n)], columns=n)
    assert out.tolist() == [3, -3, -3, 3, 0, low, high, low, 1]


def test_int64_is_not_cut_to_32_bits(check: Check) -> None:
    x = torch.tensor([2**40 + 1, -(2**40)] * 10)
    check(
        hand.binary("mul", DataType.Int), [x, x], [torch.zeros(20, dtype=torch.int64)], columns=20
    )


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.BFloat16, DataType.Bool])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_strided_inputs(check: Check, dtype: DataType, step: int) -> None:
    n = 37
    x = numbers(dtype, n * step)[::step]
    kernel = hand.pointwise((), [dtype], dtype, strided=True)
    store = kernel.body[-1]
    assert isinstance(store, Store)
    kernel = replace(kernel, body=(kernel.body[0], replace(store, value=hand.value("x0"))))
    (out,) = check(kernel, [x], [poison(dtype, n)], columns=n)
    assert torch.equal(out, x)


@pytest.mark.parametrize("dtype", [*NUMBERS, DataType.Bool])
def test_an_expanded_input_fills_all_lanes(check: Check, dtype: DataType) -> None:
    kernel = hand.unary("relu", dtype)
    expanded = hand.buffer("t0", dtype, [hand.COLUMNS], [0])
    kernel = replace(kernel, buffers=(expanded, kernel.buffers[1]))
    assert "mf_load_same<16>(t0_data" in print_cpp(kernel).text
    x = numbers(dtype, 1).abs() if dtype is not DataType.Bool else torch.tensor([True])
    (out,) = check(kernel, [x.expand(21)], [poison(dtype, 21)], columns=21)
    assert torch.equal(out, x.expand(21))


def test_a_strided_output_keeps_what_lies_between(check: Check) -> None:
    kernel = hand.unary("neg", DataType.Float)
    load, compute, store = kernel.body
    assert isinstance(store, Store)
    output = hand.buffer("t9", DataType.Float, [40], [1], written=True)
    spaced = replace(store, index=(2 * (hand.GRID * hand.TILE + hand.LANE),))
    kernel = replace(kernel, buffers=(kernel.buffers[0], output), body=(load, compute, spaced))
    x = torch.randn(19)
    (out,) = check(kernel, [x], [torch.ones(40)], columns=19)
    assert torch.equal(out[1::2], torch.ones(20))
    assert torch.equal(out[:38:2], -x)


SCATTERED: dict[str, Mask] = {
    "every third lane": (Bound(hand.LANE % 3, as_expr(1)),),
    "trailing lanes": (Bound(-hand.LANE, as_expr(-4)),),
    "two bounds": (*hand.below(hand.LANE, hand.COLUMNS), *hand.below(2 * hand.LANE, 21)),
    "none, from the grid": (*hand.below(hand.LANE, 12), *hand.below(hand.GRID, 0)),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_masks_of_other_shapes(check: Check, name: str) -> None:
    mask = SCATTERED[name]
    kernel = hand.unary("neg", DataType.BFloat16)
    load, compute, store = kernel.body
    assert isinstance(load, Load)
    assert isinstance(store, Store)
    index = (hand.LANE,)
    body = (
        replace(load, index=index, mask=mask),
        compute,
        Combine(hand.value("sum"), "sum", hand.value("x0"), hand.value("out"), mask),
        replace(store, index=index, mask=mask, value=hand.value("sum")),
    )
    kernel = replace(kernel, body=body)
    x = numbers(DataType.BFloat16, 16)
    check(kernel, [x], [poison(DataType.BFloat16, 16)], columns=9)


def test_an_address_that_is_not_affine_in_the_lane(check: Check) -> None:
    kernel = hand.unary("neg", DataType.Float)
    load, compute, store = kernel.body
    assert isinstance(load, Load)
    position = hand.GRID * hand.TILE + hand.LANE
    folded = replace(load, index=(position // 3,))
    check(
        replace(kernel, body=(folded, compute, store)),
        [torch.randn(40)],
        [torch.zeros(40)],
        columns=40,
    )


@pytest.mark.parametrize("tile", [1, 2, 4, 8, 32, 64, 128])
@pytest.mark.parametrize("dtype", [*NUMBERS, DataType.Bool])
def test_tiles_of_each_size(check: Check, tile: int, dtype: DataType) -> None:
    lane = hand.symbol("n0", low=0, high=tile - 1)
    index = (hand.GRID * tile + lane,)
    mask = hand.below(index[0], hand.COLUMNS)
    kernel = hand.binary("add", dtype)
    body: tuple[Statement, ...] = (
        Load(hand.value("x0"), BufferName("t0"), index, mask),
        Load(hand.value("x1"), BufferName("t1"), index, mask),
        Compute(hand.value("less"), "lt", DataType.Bool, (hand.value("x0"), hand.value("x1"))),
        Compute(
            hand.value("out"),
            "where",
            dtype,
            (hand.value("less"), hand.value("x0"), hand.value("x1")),
        ),
        Store(BufferName("t9"), index, hand.value("out"), mask),
    )
    kernel = replace(
        kernel,
        grid=(GridAxis(IndexName("g0"), hand.ceildiv(hand.COLUMNS, tile)),),
        tiles=(TileAxis(hand.tile("n0"), tile),),
        body=body,
    )
    n = 131
    x, y = numbers(dtype, n), numbers(dtype, n)
    (out,) = check(kernel, [x, y], [poison(dtype, n)], columns=n)
    assert torch.equal(out, torch.minimum(x, y))


@pytest.mark.parametrize("columns", [0, 1, 16, 75])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_row_and_column_sums(check: Check, dtype: DataType, columns: int) -> None:
    x = numbers(dtype, 5, columns)
    initial = 0.0 if dtype in FLOATS else 0
    exact = dtype not in FLOATS
    tolerance = 0.0 if exact else 1e-4 if dtype in (DataType.Float, DataType.Double) else 0.1
    rows = hand.row_reduction("sum", dtype, initial)
    check(rows, [x], [poison(dtype, 5)], rows=5, columns=columns, tolerance=tolerance)
    strips = hand.column_reduction("sum", dtype, initial)
    check(strips, [x], [poison(dtype, columns)], rows=5, columns=columns, tolerance=tolerance)


@pytest.mark.parametrize("columns", [0, 1, 16, 75])
@pytest.mark.parametrize("dtype", [*NUMBERS, DataType.Bool])
def test_row_maximum(check: Check, dtype: DataType, columns: int) -> None:
    x = numbers(dtype, 70, columns)
    lowest: Scalar = False
    if dtype in FLOATS:
        lowest = -INF
        for row in range(columns):  # a NaN in each place that lanes and tails can have
            x[row % 70, row] = NAN
        x[-1] = -INF
    elif dtype is not DataType.Bool:
        lowest = torch.iinfo(x.dtype).min
    kernel = hand.row_reduction("max", dtype, lowest)
    check(kernel, [x], [poison(dtype, 70)], rows=70, columns=columns)


@pytest.mark.parametrize("columns", [0, 1, 3, 16, 100])
@pytest.mark.parametrize("dtype", [DataType.Float, DataType.Double])
def test_welford(check: Check, dtype: DataType, columns: int) -> None:
    x = numbers(dtype, 6, columns) + 100
    outputs = [poison(kind, 6) for kind in (dtype, dtype, DataType.Int)]
    mean, m2, count = check(
        hand.row_welford(dtype), [x], outputs, rows=6, columns=columns, tolerance=1e-4
    )
    exact = x.double()
    assert torch.equal(count, torch.full((6,), columns))
    torch.testing.assert_close(mean.double(), exact.mean(1), rtol=1e-6, atol=0, equal_nan=True)
    deviations = ((exact - exact.mean(1, keepdim=True)) ** 2).sum(1)
    torch.testing.assert_close(m2.double(), deviations, rtol=1e-5, atol=0)


def test_welford_without_tiles(check: Check) -> None:
    kernel = hand.row_welford()
    loop, total, *stores = kernel.body
    assert isinstance(loop, For)
    assert isinstance(total, WelfordReduce)
    load, step = loop.body
    assert isinstance(load, Load)
    assert isinstance(step, WelfordStep)
    scalars = replace(
        loop,
        trip=hand.COLUMNS,
        carries=tuple(replace(carry, tiles=()) for carry in loop.carries),
        body=(
            replace(load, index=(hand.GRID, hand.STEP), mask=()),
            replace(step, mask=hand.below(hand.STEP, 5)),
        ),
    )
    kernel = replace(kernel, tiles=(), body=(scalars, replace(total, tiles=()), *stores))
    outputs = [torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.int64)]
    mean, _, _ = check(kernel, [torch.randn(3, 8)], outputs, rows=3, columns=8, tolerance=1e-5)
    assert not mean.isnan().any()


def test_nested_loops_make_one_reduction(check: Check) -> None:
    """An inner loop that starts from the outer loop's carry; carries that swap places."""
    half = hand.symbol("k1", low=0, high=1)
    load = Load(hand.value("x"), BufferName("t0"), (hand.GRID, 2 * hand.STEP + half))
    add = Combine(hand.value("inner_next"), "sum", hand.value("inner"), hand.value("x"))
    carry = Carry(
        hand.value("inner"), DataType.Float, hand.value("outer"), hand.value("inner_next")
    )
    inner = For(IndexName("k1"), as_expr(2), (carry,), (load, add))
    zero, one = hand.literal(0.0), hand.literal(1.0)
    carries = (
        Carry(hand.value("outer"), DataType.Float, zero, hand.value("inner")),
        Carry(hand.value("a"), DataType.Float, zero, hand.value("b")),
        Carry(hand.value("b"), DataType.Float, one, hand.value("a")),
    )
    outer = For(IndexName("k0"), as_expr(3), carries, (inner,))
    total = Compute(
        hand.value("total"), "sub", DataType.Float, (hand.value("outer"), hand.value("a"))
    )
    kernel = replace(
        hand.row_reduction("sum", DataType.Float, 0.0),
        tiles=(),
        body=(outer, total, Store(BufferName("t1"), (hand.GRID,), hand.value("total"))),
    )
    x = torch.randn(4, 6)
    (out,) = check(kernel, [x], [torch.zeros(4)], rows=4, columns=6, tolerance=1e-5)
    torch.testing.assert_close(out, x.sum(1) - 1)


def test_scalars_sizes_and_literals(check: Check) -> None:
    position = hand.GRID * hand.TILE + hand.LANE
    names = [hand.value(n) for n in ("position", "folded", "a", "b", "c", "d", "out")]
    body = (
        Size(names[0], position * hand.COLUMNS + 3),
        Size(names[1], position // 3),
        Compute(names[2], "add", DataType.Int, (names[0], names[1])),
        Compute(names[3], "mul", DataType.Int, (names[2], hand.value("c0"))),
        Compute(names[4], "lt", DataType.Bool, (hand.literal(0.5), hand.value("c1"))),
        Compute(names[5], "where", DataType.Int, (hand.value("c2"), names[3], names[0])),
        Compute(names[6], "where", DataType.Int, (names[4], names[5], names[1])),
    )
    kernel = replace(
        hand.pointwise(body, [], DataType.Int),
        scalars=(
            ScalarParameter(hand.value("c0"), DataType.Int),
            ScalarParameter(hand.value("c1"), DataType.Float),
            ScalarParameter(hand.value("c2"), DataType.Bool),
        ),
    )
    out = torch.zeros(20, dtype=torch.int64)
    for scalars in ((2**40, 0.75, True), (3, 0.75, False), (3, 0.25, True)):
        check(kernel, [], [out], scalars=scalars, columns=20)


def test_a_reduction_of_what_does_not_vary_counts_its_lanes(check: Check) -> None:
    body = (
        Load(hand.value("x"), BufferName("t0"), (hand.GRID, as_expr(0))),
        Reduce(hand.value("total"), "sum", hand.value("x"), (hand.tile("n0"),)),
        Store(BufferName("t1"), (hand.GRID,), hand.value("total"), hand.below(hand.LANE, 1)),
    )
    kernel = replace(hand.row_reduction("sum", DataType.Float, 0.0), body=body)
    x = torch.randn(3, 2)
    (out,) = check(kernel, [x], [torch.zeros(3)], rows=3, columns=2)
    torch.testing.assert_close(out, 16 * x[:, 0])


def test_a_tensor_without_axes(check: Check) -> None:
    zero = as_expr(0)
    kernel = Kernel(
        "whole",
        (
            hand.buffer("t0", DataType.Float, [], []),
            hand.buffer("t1", DataType.Float, [], [], written=True),
        ),
        (),
        (),
        (),
        (),
        (
            Load(hand.value("x"), BufferName("t0"), ()),
            Compute(hand.value("y"), "neg", DataType.Float, (hand.value("x"),)),
            Store(BufferName("t1"), (), hand.value("y"), (Bound(zero, as_expr(1)),)),
        ),
    )
    (out,) = check(kernel, [torch.tensor(3.0)], [torch.tensor(0.0)])
    assert out.item() == -3


def test_threads_do_not_change_the_result(compiler: KernelCompiler) -> None:
    kernel = compiler.compile_source(print_cpp(hand.row_reduction("sum", DataType.Float, 0.0)))
    x = torch.randn(101, 333)
    one, two = torch.zeros(101), torch.zeros(101)
    sizes = {"rows": 101, "columns": 333}
    kernel([x, one], {}, sizes, 1)
    kernel([x, two], {}, sizes, 2)
    assert torch.equal(one, two)
    torch.testing.assert_close(one, x.sum(1), rtol=1e-4, atol=1e-4)


def test_two_grid_axes(check: Check) -> None:
    columns = hand.symbol("g1", low=0)
    kernel = Kernel(
        "transpose",
        (
            hand.buffer("t0", DataType.Float, [hand.ROWS, hand.COLUMNS], [1, hand.ROWS]),
            hand.buffer(
                "t1", DataType.Float, [hand.ROWS, hand.COLUMNS], [hand.COLUMNS, 1], written=True
            ),
        ),
        (),
        (IndexName("rows"), IndexName("columns")),
        (GridAxis(IndexName("g0"), hand.ROWS), GridAxis(IndexName("g1"), hand.COLUMNS)),
        (),
        (
            Load(hand.value("x"), BufferName("t0"), (hand.GRID, columns)),
            Store(BufferName("t1"), (hand.GRID, columns), hand.value("x")),
        ),
    )
    x = torch.randn(7, 5).t()
    (out,) = check(kernel, [x], [torch.zeros(5, 7)], rows=5, columns=7, threads=2)
    assert torch.equal(out, x)


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.Double])
@pytest.mark.parametrize("function", ["exp", "tanh", "erf", "rsqrt", "relu", "neg"])
def test_special_values(check: Check, function: str, dtype: DataType) -> None:
    x = torch.tensor(SPECIALS * 2, dtype=to_torch_dtype(dtype))
    (out,) = check(
        hand.unary(function, dtype), [x], [poison(dtype, len(x))], columns=len(x), tolerance=1e-6
    )
    theirs = SPECIAL_RESULTS.get(function)
    if theirs is not None:
        torch.testing.assert_close(
            out[: len(theirs)], torch.tensor(theirs).to(out), rtol=0, atol=0, equal_nan=True
        )
        assert torch.equal(torch.signbit(out[:2]), torch.tensor([False, theirs[1] <= 0]))


SPECIAL_RESULTS: dict[str, list[float]] = {
    "exp": [1.0, 1.0, INF, 0.0, NAN],
    "tanh": [0.0, -0.0, 1.0, -1.0, NAN],
    "erf": [0.0, -0.0, 1.0, -1.0, NAN],
    "rsqrt": [INF, -INF, 0.0, NAN, NAN, 1.0, NAN],
}
"""For the first entries of SPECIALS."""
