"""Element types as torch names them."""

from __future__ import annotations

import torch

from meshfuse.base.dtypes import DataType, Scalar, compute_dtype
from meshfuse.base.errors import UserTypeError

TORCH_TYPES: dict[DataType, torch.dtype] = {
    DataType.Double: torch.float64,
    DataType.Float: torch.float32,
    DataType.Half: torch.float16,
    DataType.BFloat16: torch.bfloat16,
    DataType.Int: torch.int64,
    DataType.Int32: torch.int32,
    DataType.Bool: torch.bool,
}

DATA_TYPES: dict[torch.dtype, DataType] = {theirs: ours for ours, theirs in TORCH_TYPES.items()}


def to_torch_dtype(dtype: DataType) -> torch.dtype:
    """The torch type of tensors that hold `dtype`. Raises UserTypeError for Null."""
    try:
        return TORCH_TYPES[dtype]
    except KeyError:
        raise UserTypeError(f"{dtype} has no torch type") from None


def from_torch_dtype(dtype: torch.dtype) -> DataType:
    """The element type of a torch tensor. Raises UserTypeError for types that no kernel handles."""
    try:
        return DATA_TYPES[dtype]
    except KeyError:
        known = ", ".join(str(theirs) for theirs in DATA_TYPES)
        raise UserTypeError(f"{dtype} is not supported; supported are {known}") from None


def held_torch_dtype(dtype: DataType) -> torch.dtype:
    """The type in which a kernel keeps a value of `dtype`: 16-bit floats live in float32."""
    return to_torch_dtype(compute_dtype(dtype))


def round_to_dtype(held: torch.Tensor, dtype: DataType) -> torch.Tensor:
    """`held` in the type that a kernel keeps `dtype` in, with no more precision than `dtype` has.

    Floats round to nearest even, through float32 on the way to 16 bits; float to integer truncates.
    """
    keep = held_torch_dtype(dtype)
    stored = to_torch_dtype(dtype)
    return held.to(keep) if stored == keep else held.to(keep).to(stored).to(keep)


def item_of(tensor: torch.Tensor) -> Scalar:
    """The Python number of a tensor with one element."""
    return tensor.item()
