"""Promotion: torch's where tensors meet, nvFuser's where a scalar meets integers."""

from itertools import product

import pytest
import torch

from meshfuse.base.dtypes import (
    ITEM_BYTES,
    DataType,
    compute_dtype,
    dtype_of_value,
    is_floating,
    is_integral,
    promote,
    wider,
)

TORCH = {
    DataType.Bool: torch.bool,
    DataType.Int32: torch.int32,
    DataType.Int: torch.int64,
    DataType.Half: torch.float16,
    DataType.BFloat16: torch.bfloat16,
    DataType.Float: torch.float32,
    DataType.Double: torch.float64,
}
PAIRS = list(product(TORCH, TORCH))


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_tensors_promote_as_in_torch(a: DataType, b: DataType) -> None:
    wanted = torch.promote_types(TORCH[a], TORCH[b])
    assert TORCH[wider(a, b)] is wanted
    assert TORCH[promote([a, b], [], [])] is wanted
    assert TORCH[promote([], [a, b], [])] is wanted


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_a_0_dim_tensor_matters_as_in_torch(a: DataType, b: DataType) -> None:
    wanted = torch.result_type(torch.zeros(2, dtype=TORCH[a]), torch.zeros((), dtype=TORCH[b]))
    assert TORCH[promote([a], [b], [])] is wanted


B, I32, I64, H, BF, F, D = TORCH


@pytest.mark.parametrize(
    ("tensor", "with_bool", "with_int", "with_double"),
    [
        (B, B, I64, D),
        (I32, I32, I32, D),
        (I64, I64, I64, D),
        (H, H, H, H),
        (BF, BF, BF, BF),
        (F, F, F, F),
        (D, D, D, D),
    ],
)
def test_a_scalar_matters_where_it_raises_the_category(
    tensor: DataType, with_bool: DataType, with_int: DataType, with_double: DataType
) -> None:
    for scalar, wanted in ((B, with_bool), (I64, with_int), (D, with_double)):
        assert promote([tensor], [], [scalar]) is wanted
        assert promote([], [tensor], [scalar]) is wanted


def test_scalars_alone_promote_among_themselves() -> None:
    assert promote([], [], [I64, D]) is D
    assert promote([], [], [B, I64]) is I64


def test_each_lower_group_counts_in_turn() -> None:
    assert promote([B], [I32], [D]) is D
    assert promote([I64], [F], [D]) is F
    assert promote([B], [H], [D]) is H


def test_facts_of_types() -> None:
    assert [d for d in TORCH if is_floating(d)] == [H, BF, F, D]
    assert [d for d in TORCH if is_integral(d)] == [I32, I64]
    assert [compute_dtype(d) for d in (H, BF, F, D, I64, B)] == [F, F, F, D, I64, B]
    assert [dtype_of_value(v) for v in (True, 1, 1.0)] == [B, I64, D]
    for dtype, size in ITEM_BYTES.items():
        assert torch.empty(0, dtype=TORCH[dtype]).element_size() == size
