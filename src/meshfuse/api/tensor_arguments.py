"""The three ways to describe an input tensor, brought to one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, final

from meshfuse.api.recording import Call
from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import UserTypeError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.orders import compute_tensor_descriptor

_INT64_LIMIT = 1 << 63
_SHAPE_NAMES = ("shape", "contiguity", "dtype", "is_cpu", "stride_order")
_STRIDE_NAMES = ("sizes", "strides", "dtype", "static_sizes", "is_cpu")


@final
@frozen_dataclass
class TensorArguments:
    """Arguments of `define_tensor` by shape, of the right Python types; `ir` checks their values.

    `shape`: -1 symbolic, 1 broadcast, others static. `contiguity`: one flag for all axes, or one an
    axis, slowest first, None for a broadcast axis. `stride_order`: the place of each axis counted
    from the fastest, 0; () is row-major.
    """

    shape: tuple[int, ...]
    contiguity: bool | tuple[bool | None, ...]
    dtype: DataType
    is_cpu: bool
    stride_order: tuple[int, ...]

    def to_call(self) -> Call:
        """The call of `define_tensor` that says the same."""
        keywords: dict[str, object] = {
            "shape": self.shape,
            "contiguity": self.contiguity,
            "dtype": self.dtype,
            "is_cpu": self.is_cpu,
        }
        row_major = tuple(reversed(range(len(self.shape))))
        if self.stride_order and self.stride_order != row_major:
            keywords["stride_order"] = self.stride_order
        return Call("fd.define_tensor", keywords=keywords)


def read_tensor_arguments(
    arguments: Sequence[object], keywords: Mapping[str, object]
) -> TensorArguments:
    """The arguments of a `define_tensor` call, given by sizes and strides or by shape."""
    call = Call("fd.define_tensor", tuple(arguments), keywords)
    second = arguments[1] if len(arguments) > 1 else None
    by_strides = "sizes" in keywords or "strides" in keywords or _is_list_of_ints(second)
    names = _STRIDE_NAMES if by_strides else _SHAPE_NAMES
    given = dict(zip(names, arguments, strict=False)) | dict(keywords)
    repeated = [name for name in names[: len(arguments)] if name in keywords]
    unknown = [name for name in keywords if name not in names]
    if repeated or unknown or len(arguments) > len(names) or names[0] not in given:
        raise UserTypeError(
            f"{call}: takes (shape, contiguity=False, dtype=DataType.Float, is_cpu=False, "
            "stride_order=[]) or (sizes, strides, dtype=DataType.Float, static_sizes=False, "
            "is_cpu=False)"
        )
    return _from_strides(call, given) if by_strides else _from_shape(call, given)


def _from_shape(call: Call, given: Mapping[str, object]) -> TensorArguments:
    return TensorArguments(
        _read_ints(call, "shape", given["shape"]),
        _read_contiguity(call, given.get("contiguity", False)),
        _read_dtype(call, given),
        _read_flag(call, given, "is_cpu"),
        _read_ints(call, "stride_order", given.get("stride_order", ())),
    )


def _from_strides(call: Call, given: Mapping[str, object]) -> TensorArguments:
    sizes = _read_ints(call, "sizes", given["sizes"])
    if "strides" not in given:
        raise UserTypeError(f"{call}: sizes come with strides")
    strides = _read_ints(call, "strides", given["strides"])
    static = _read_flag(call, given, "static_sizes")
    contiguity, stride_order = compute_tensor_descriptor(sizes, strides)
    shape = sizes if static else tuple(size if size == 1 else -1 for size in sizes)
    return TensorArguments(
        shape, contiguity, _read_dtype(call, given), _read_flag(call, given, "is_cpu"), stride_order
    )


def _read_contiguity(call: Call, value: object) -> bool | tuple[bool | None, ...]:
    if isinstance(value, bool):
        return value
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UserTypeError(
            f"{call}: contiguity is a bool or a list of bools and Nones, got {value!r}"
        )
    return tuple(value)


def _read_ints(call: Call, name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UserTypeError(f"{call}: {name} is a list of ints, got {value!r}")
    for item in value:
        if not isinstance(item, int) or isinstance(item, bool):
            raise UserTypeError(f"{call}: {name} is a list of ints, got {item!r} among them")
        if not -_INT64_LIMIT <= item < _INT64_LIMIT:
            raise UserTypeError(f"{call}: {name} holds {item}, which is no 64-bit integer")
    return tuple(value)


def _read_dtype(call: Call, given: Mapping[str, object]) -> DataType:
    dtype = given.get("dtype", DataType.Float)
    if not isinstance(dtype, DataType):
        raise UserTypeError(f"{call}: dtype must be a DataType, got {dtype!r}")
    if dtype is DataType.Null:
        raise UserTypeError(f"{call}: a tensor has elements: DataType.Null is for `no dtype given`")
    return dtype


def _read_flag(call: Call, given: Mapping[str, object], name: str) -> bool:
    value: Any = given.get(name, False)
    if not isinstance(value, bool):
        raise UserTypeError(f"{call}: {name} must be True or False, got {value!r}")
    return value


def _is_list_of_ints(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(type(item) is int for item in cast(Sequence[object], value))
    )
