"""Numbers rounded to an element type."""

from __future__ import annotations

import math

from meshfuse.base.dtypes import DataType
from meshfuse.base.rounding import round_number


def test_16_bits_round_to_nearest_even_and_overflow_to_infinity() -> None:
    assert round_number(1 + 2**-8, DataType.BFloat16) == 1.0
    assert round_number(1 + 3 * 2**-8, DataType.BFloat16) == 1 + 2**-6
    assert round_number(1 + 2**-11, DataType.Half) == 1.0
    assert round_number(3.4e38, DataType.BFloat16) == math.inf
    assert round_number(-70000.0, DataType.Half) == -math.inf


def test_half_rounds_once() -> None:
    """By way of float32 this would be a tie, and go down."""
    assert round_number(1 + 2**-11 + 2**-40, DataType.Half) == 1 + 2**-10
