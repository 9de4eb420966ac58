"""The text of C++ kernels, and the kernels that the printer refuses."""

from dataclasses import replace

import pytest

import hand_written_kernels as hand
from golden_text import GoldenCheck
from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import InvariantError, ScheduleError
from meshfuse.codegen.cpp import PRELUDE, print_cpp
from meshfuse.kernel.nodes import (
    BufferName,
    Compute,
    IndexName,
    Kernel,
    Load,
    Store,
    TileAxis,
    WelfordReduce,
)


def body_of(kernel: Kernel) -> str:
    """The printed text without the prelude."""
    return print_cpp(kernel).text.removeprefix(PRELUDE).strip()


def test_golden_row_sum(golden: GoldenCheck) -> None:
    golden("cpp_row_sum", body_of(hand.row_reduction("sum", DataType.Float, 0.0)))


def test_golden_add_of_bfloat16(golden: GoldenCheck) -> None:
    golden("cpp_add_bf16", body_of(hand.binary("add", DataType.BFloat16)))


def test_the_prelude_includes_nothing() -> None:
    assert "#include" not in PRELUDE


def test_a_bound_that_always_holds_is_not_printed() -> None:
    kernel = hand.unary("neg", DataType.Float)
    load, compute, store = kernel.body
    assert isinstance(load, Load)
    always = hand.below(hand.LANE, hand.TILE)
    text = body_of(replace(kernel, body=(replace(load, mask=always), compute, store)))
    assert "mf_load<16>(t0_data + 16*g0)" in text


def test_a_tile_axis_of_one_lane_makes_scalars() -> None:
    kernel = hand.unary("neg", DataType.Float)
    text = body_of(replace(kernel, tiles=(TileAxis(hand.tile("n0"), 1),)))
    assert "const int64_t n0 = 0;" in text
    assert "const float out = -x0;" in text


def test_values_over_two_tile_axes_are_refused() -> None:
    kernel = hand.pointwise((), [DataType.Float], DataType.Float)
    other = hand.symbol("m0", low=0, high=3)
    load = Load(hand.value("x1"), BufferName("t0"), (other,))
    both = Compute(hand.value("out"), "add", DataType.Float, (hand.value("x0"), hand.value("x1")))
    kernel = replace(
        kernel,
        tiles=(*kernel.tiles, TileAxis(IndexName("m0"), 4)),
        body=(kernel.body[0], load, both, kernel.body[-1]),
    )
    with pytest.raises(ScheduleError, match=r"\[tile-rank\] out, axis m0: varies over") as refused:
        print_cpp(kernel)
    assert refused.value.code == "tile-rank"


def test_a_tile_that_is_no_power_of_two_is_refused() -> None:
    kernel = replace(hand.unary("neg", DataType.Float), tiles=(TileAxis(hand.tile("n0"), 12),))
    with pytest.raises(ScheduleError, match=r"\[tile-size\] pointwise, axis n0: has 12 lanes"):
        print_cpp(kernel)


def test_moments_are_not_combined_over_a_tile_of_one_lane() -> None:
    kernel = hand.row_welford()
    loop, reduce, *stores = kernel.body
    assert isinstance(reduce, WelfordReduce)
    one = hand.tile("m0")
    kernel = replace(
        kernel,
        tiles=(*kernel.tiles, TileAxis(one, 1)),
        body=(loop, replace(reduce, tiles=(one,)), *stores),
    )
    with pytest.raises(ScheduleError, match=r"\[welford-tile\] mean_2, axis n0") as refused:
        print_cpp(kernel)
    assert refused.value.hint == "Leave out a WelfordReduce over such axes."


def test_mixed_operand_types_are_refused() -> None:
    args = (hand.value("x0"), hand.literal(1.0, DataType.Double))
    body = (Compute(hand.value("out"), "add", DataType.Float, args),)
    with pytest.raises(InvariantError, match="out has operands of mixed types"):
        print_cpp(hand.pointwise(body, [DataType.Float], DataType.Float))


def test_an_undefined_value_is_refused() -> None:
    store = Store(BufferName("t9"), (hand.GRID,), hand.value("nothing"))
    kernel = replace(hand.pointwise((), [], DataType.Float), body=(store,))
    with pytest.raises(InvariantError, match="nothing is used but not defined"):
        print_cpp(kernel)
