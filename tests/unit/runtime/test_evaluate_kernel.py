"""The evaluator of tile programs against torch, and what it refuses."""

from dataclasses import replace

import pytest
import torch

import hand_written_kernels as hand
from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import InvariantError
from meshfuse.ir.pointwise import REDUCTION_FUNCTIONS, SCALAR_FUNCTIONS
from meshfuse.kernel.nodes import (
    STATEMENTS,
    BufferName,
    Compute,
    IndexName,
    Kernel,
    ScalarParameter,
    Size,
    TileAxis,
)
from meshfuse.runtime.evaluate_kernel import (
    REDUCTION_EVALUATORS,
    evaluate_kernel,
    run_statement,
)
from meshfuse.runtime.torch_functions import TORCH_FUNCTIONS

INF = float("inf")
NAN = float("nan")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def evaluate(kernel: Kernel, tensors: list[torch.Tensor], **sizes: int) -> None:
    names = [b.name for b in kernel.buffers]
    sizes = dict.fromkeys(kernel.sizes, 0) | sizes
    evaluate_kernel(kernel, dict(zip(names, tensors, strict=True)), {}, sizes)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a, nan=7e7), torch.nan_to_num(b, nan=7e7))


def test_every_statement_and_function_has_a_meaning() -> None:
    assert [
        s for s in STATEMENTS if run_statement.dispatch(s) is run_statement.dispatch(object)
    ] == []
    assert TORCH_FUNCTIONS.keys() == SCALAR_FUNCTIONS.keys()
    assert REDUCTION_EVALUATORS.keys() == REDUCTION_FUNCTIONS.keys()


@pytest.mark.parametrize("n", [0, 1, 16, 37])
def test_pointwise_masks_the_tail(n: int) -> None:
    x, y, out = torch.randn(n), torch.randn(n), torch.zeros(n)
    evaluate(hand.binary("add", DataType.Float), [x, y, out], columns=n)
    assert torch.equal(out, x + y)


def test_bfloat16_is_rounded_where_it_is_made() -> None:
    x, y = torch.randn(2, 100).to(torch.bfloat16)
    out = torch.zeros(100, dtype=torch.bfloat16)
    evaluate(hand.binary("mul", DataType.BFloat16), [x, y, out], columns=100)
    assert torch.equal(out, x * y)


@pytest.mark.parametrize("columns", [0, 5, 33])
def test_row_maximum_propagates_nan(columns: int) -> None:
    x, out = torch.randn(3, columns), torch.zeros(3)
    if columns:
        x[1, columns // 2] = NAN
    evaluate(hand.row_reduction("max", DataType.Float, -INF), [x, out], rows=3, columns=columns)
    assert same(out, x.amax(1) if columns else torch.full((3,), -INF))


def test_column_sum() -> None:
    x, out = torch.randn(9, 21, dtype=torch.float64), torch.zeros(21, dtype=torch.float64)
    evaluate(hand.column_reduction("sum", DataType.Double, 0.0), [x, out], rows=9, columns=21)
    torch.testing.assert_close(out, x.sum(0))


@pytest.mark.parametrize("columns", [0, 1, 3, 70])
def test_welford(columns: int) -> None:
    x = torch.randn(4, columns) + 100
    mean, m2, count = torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    evaluate(hand.row_welford(), [x, mean, m2, count], rows=4, columns=columns)
    assert torch.equal(count, torch.full((4,), columns))
    torch.testing.assert_close(mean, x.mean(1), equal_nan=True)
    exact = x.double()
    expected = ((exact - exact.mean(1, keepdim=True)) ** 2).sum(1)
    # A mean near 100 is known to 4e-6 at best, and so is each deviation of about 1.
    torch.testing.assert_close(m2.double(), expected, rtol=1e-5, atol=0)


def test_integers_divide_towards_zero_and_never_trap() -> None:
    lowest = torch.iinfo(torch.int64).min
    x = torch.tensor([7, -7, 7, -7, 5, lowest])
    y = torch.tensor([2, 2, -2, -2, 0, -1])
    out = torch.zeros(6, dtype=torch.int64)
    evaluate(hand.binary("div", DataType.Int), [x, y, out], columns=6)
    assert out.tolist() == [3, -3, -3, 3, 0, lowest]


def test_two_tile_axes_broadcast_by_name() -> None:
    rows = IndexName("m0")
    kernel = hand.pointwise((), [DataType.Float], DataType.Float)
    row = hand.symbol("m0", low=0, high=3)
    store = replace(
        kernel.body[-1],
        buffer=BufferName("t9"),
        index=(row, hand.LANE),
        value=hand.value("x0"),
        mask=hand.below(hand.LANE, hand.COLUMNS),
    )
    kernel = replace(
        kernel,
        buffers=(
            kernel.buffers[0],
            hand.buffer("t9", DataType.Float, [4, hand.COLUMNS], [hand.COLUMNS, 1], written=True),
        ),
        tiles=(TileAxis(rows, 4), *kernel.tiles),
        body=(*kernel.body[:-1], store),
    )
    x, out = torch.randn(10), torch.zeros(4, 10)
    evaluate(kernel, [x, out], columns=10)
    assert torch.equal(out, x.expand(4, 10))


def test_scalars_and_sizes_are_values() -> None:
    body = (
        Size(hand.value("position"), hand.GRID * hand.TILE + hand.LANE),
        Compute(hand.value("out"), "add", DataType.Int, (hand.value("position"), hand.value("c0"))),
    )
    kernel = hand.pointwise(body, [], DataType.Int)
    kernel = replace(kernel, scalars=(ScalarParameter(hand.value("c0"), DataType.Int),))
    out = torch.zeros(20, dtype=torch.int64)
    evaluate_kernel(kernel, {BufferName("t9"): out}, {hand.value("c0"): 100}, {"columns": 20})
    assert torch.equal(out, torch.arange(100, 120))


def test_an_access_outside_a_buffer_is_refused() -> None:
    kernel = hand.unary("neg", DataType.Float)
    with pytest.raises(InvariantError, match="t0 is accessed outside its axis 0 of extent 10"):
        evaluate(kernel, [torch.zeros(10), torch.zeros(11)], columns=11)


def test_mixed_operand_types_are_refused() -> None:
    body = (
        Compute(hand.value("out"), "add", DataType.Float, (hand.value("x0"), hand.value("x1"))),
    )
    kernel = hand.pointwise(body, [DataType.Float, DataType.Double], DataType.Float)
    with pytest.raises(InvariantError, match="out = add of mixed types"):
        evaluate(kernel, [torch.zeros(4), torch.zeros(4).double(), torch.zeros(4)], columns=4)
