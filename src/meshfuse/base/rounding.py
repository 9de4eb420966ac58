"""Python numbers as values of a floating element type."""

from __future__ import annotations

import math
import struct

from meshfuse.base.dtypes import DataType


def round_number(number: float, dtype: DataType) -> float:
    """`number` rounded to nearest even; what is too large becomes infinity, as in a conversion."""
    match dtype:
        case DataType.Float:
            return _through(number, "<f")
        case DataType.Half:
            return _through(number, "<e")
        case DataType.BFloat16:
            return _round_to_bfloat16(number)
        case _:
            return number


def _through(number: float, layout: str) -> float:
    try:
        return struct.unpack(layout, struct.pack(layout, number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


def _round_to_bfloat16(number: float) -> float:
    """The upper half of a float32, rounded to nearest even."""
    single = _through(number, "<f")
    if not math.isfinite(single):
        return single
    (bits,) = struct.unpack("<I", struct.pack("<f", single))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", rounded))[0]
