"""Element types and their promotion: PyTorch's categories, with nvFuser's two differences."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

Scalar = bool | int | float


class DataType(Enum):
    """Element type of a tensor or scalar. The value is the name used in program text."""

    Double = "f64"
    Float = "f32"
    Half = "f16"
    BFloat16 = "bf16"
    Int = "i64"
    Int32 = "i32"
    Bool = "bool"
    Null = "null"

    def __repr__(self) -> str:
        return f"DataType.{self.name}"


ITEM_BYTES: dict[DataType, int] = {
    DataType.Double: 8,
    DataType.Float: 4,
    DataType.Half: 2,
    DataType.BFloat16: 2,
    DataType.Int: 8,
    DataType.Int32: 4,
    DataType.Bool: 1,
}

# Names as C-like kernels and nvFuser's messages spell them.
C_NAMES: dict[DataType, str] = {
    DataType.Double: "double",
    DataType.Float: "float",
    DataType.Half: "__half",
    DataType.BFloat16: "__bfloat",
    DataType.Int: "int64_t",
    DataType.Int32: "int",
    DataType.Bool: "bool",
}

_CATEGORY: dict[DataType, int] = {
    DataType.Bool: 0,
    DataType.Int32: 1,
    DataType.Int: 1,
    DataType.Half: 2,
    DataType.BFloat16: 2,
    DataType.Float: 2,
    DataType.Double: 2,
}
_WIDTH_ORDER = (
    DataType.Bool,
    DataType.Int32,
    DataType.Int,
    DataType.Half,
    DataType.Float,
    DataType.Double,
)
REDUCED_FLOATS = (DataType.Half, DataType.BFloat16)


def is_floating(dtype: DataType) -> bool:
    return _CATEGORY[dtype] == 2


def is_integral(dtype: DataType) -> bool:
    """True for integers; False for bool."""
    return _CATEGORY[dtype] == 1


def compute_dtype(dtype: DataType) -> DataType:
    """The type arithmetic runs in: 16-bit floats compute in float32."""
    return DataType.Float if dtype in REDUCED_FLOATS else dtype


def dtype_of_value(value: Scalar) -> DataType:
    """The type of a Python scalar: bool -> Bool, int -> Int, float -> Double."""
    if isinstance(value, bool):
        return DataType.Bool
    return DataType.Int if isinstance(value, int) else DataType.Double


def wider(a: DataType, b: DataType) -> DataType:
    """Ordinary promotion of two element types of equal standing."""
    if a == b:
        return a
    if {a, b} == {DataType.Half, DataType.BFloat16}:
        return DataType.Float
    order = [DataType.Half if d is DataType.BFloat16 else d for d in (a, b)]
    winner = max(range(2), key=lambda i: _WIDTH_ORDER.index(order[i]))
    return (a, b)[winner]


def promote(
    dimensioned: Sequence[DataType], zero_dim: Sequence[DataType], scalars: Sequence[DataType]
) -> DataType:
    """Promoted type of operands in three groups of falling priority.

    A lower group matters only when it raises the category; then both types are promoted together,
    so an Int tensor with a Double scalar gives Double (nvFuser's rule; torch would say float32). A
    lower group that raises bool to int gives its own type. The result is not yet widened from 16
    bits.
    """
    groups = [g for g in (dimensioned, zero_dim, scalars) if g]
    result = _join(groups[0])
    for group in groups[1:]:
        lower = _join(group)
        if _CATEGORY[lower] > _CATEGORY[result]:
            result = wider(result, lower)
    return result


def _join(group: Sequence[DataType]) -> DataType:
    result = group[0]
    for dtype in group[1:]:
        result = wider(result, dtype)
    return result
