"""What a caller passes: flat, checked against the program's inputs, and as a signature."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast, final

import torch

from meshfuse.base.dtypes import C_NAMES, DataType, Scalar, dtype_of_value, is_floating
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.orders import contiguity_in_order, memory_order
from meshfuse.expr import IntExpr, const, const_value
from meshfuse.facts.holdings import held_count, shape_outside
from meshfuse.facts.layout import layout_of
from meshfuse.facts.sharding import Sharding, describe, local_extent, sharding_of
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.program import Program
from meshfuse.passes.finalize_multidevice import check_tensor
from meshfuse.runtime.torch_types import DATA_TYPES, from_torch_dtype, to_torch_dtype

Argument = torch.Tensor | Scalar

# What the caller passes, as code depends on it.


@final
@frozen_dataclass
class TensorSignature:
    """`order` lists the dims slowest first, `contiguity` a flag for each (base/orders.py)."""

    dtype: DataType
    device: str
    order: tuple[int, ...]
    contiguity: tuple[bool | None, ...]
    ones: tuple[bool, ...]


@final
@frozen_dataclass
class ScalarSignature:
    dtype: DataType


@final
@frozen_dataclass
class Signature:
    """What generated code may depend on of the arguments: no sizes but 1, no values."""

    arguments: tuple[TensorSignature | ScalarSignature, ...]


def signature_of(inputs: Sequence[Argument]) -> Signature:
    """The signature of checked inputs."""
    return Signature(tuple(_argument_signature(value) for value in inputs))


def _argument_signature(value: Argument) -> TensorSignature | ScalarSignature:
    if not isinstance(value, torch.Tensor):
        return ScalarSignature(dtype_of_value(value))
    sizes, strides = value.shape, value.stride()
    order = memory_order(sizes, strides)
    return TensorSignature(
        from_torch_dtype(value.dtype),
        str(value.device),
        order,
        contiguity_in_order(sizes, strides, order),
        tuple(size == 1 for size in sizes),
    )


def list_inputs(inputs: object) -> Sequence[object]:
    """The inputs of one call as a list or tuple. UserTypeError where they are no list of any kind.

    A tensor is none: its rows would be taken for inputs.
    """
    if isinstance(inputs, list | tuple):
        return cast(Sequence[object], inputs)
    if isinstance(inputs, torch.Tensor | str) or not isinstance(inputs, Iterable):
        raise UserTypeError(
            f"inputs are {inputs!r}, {type(inputs).__name__}; accepted is a list of tensors and "
            "numbers, one for each input of the program"
        )
    return tuple(cast(Iterable[object], inputs))


def flatten_inputs(inputs: Iterable[object]) -> list[Argument | complex]:
    """Tensors and numbers out of nested lists and tuples.

    Raises UserTypeError where `inputs` are no list, UserError for anything else among them.
    """
    flat: list[Argument | complex] = []
    for value in list_inputs(inputs):
        if isinstance(value, list | tuple):
            flat += flatten_inputs(value)
        elif isinstance(value, torch.Tensor | bool | int | float | complex):
            flat.append(value)
        else:
            raise UserError(
                f"input {len(flat)} is {type(value).__name__} {value!r}; accepted are tensors, "
                "bool, int, float, and lists or tuples of them"
            )
    return flat


# What the program expects.


@final
@frozen_dataclass
class ExpectedTensor:
    """A tensor input on this rank.

    `extents` are global, `local_extents` the largest part of a rank by `sharding`. `order` and
    `contiguity` are the promised memory layout, slowest axis first. `is_updated`: an output is
    written into it.
    """

    name: TensorName
    dtype: DataType
    extents: tuple[IntExpr, ...]
    local_extents: tuple[IntExpr, ...]
    sharding: Sharding
    order: tuple[int, ...]
    contiguity: tuple[bool | None, ...]
    is_cpu: bool
    is_updated: bool

    def is_on(self, rank: int) -> bool:
        """Whether `rank` holds a part."""
        return self.sharding.mesh is None or rank in self.sharding.mesh.ids

    def local_size(self, axis: int, rank: int) -> int | None:
        """What `rank`, one of the mesh, holds of an axis; None where only a call says it."""
        mesh, digits = self.sharding.mesh, self.sharding.axes[axis]
        owners = () if mesh is None else mesh.parallel_types()
        places = {
            owner: const(mesh.coordinate(rank, owner) or 0) for owner in owners if mesh is not None
        }
        return const_value(held_count(digits, self.extents[axis], places))

    def __str__(self) -> str:
        return f"{self.name} {C_NAMES[self.dtype]}[{', '.join(map(str, self.extents))}]"


@final
@frozen_dataclass
class ExpectedScalar:
    name: ScalarName
    dtype: DataType

    def __str__(self) -> str:
        letter = "d" if is_floating(self.dtype) else "b" if self.dtype is DataType.Bool else "i"
        return letter + self.name.removeprefix("c")


Expected = ExpectedTensor | ExpectedScalar


def expected_inputs(program: Program) -> tuple[Expected, ...]:
    """What each input must be, in call order."""
    return tuple(
        _expected_tensor(program, TensorName(name))
        if name in program.fusion.tensors
        else ExpectedScalar(ScalarName(name), program.fusion.scalars[ScalarName(name)].dtype)
        for name in program.fusion.inputs
    )


def _expected_tensor(program: Program, name: TensorName) -> ExpectedTensor:
    if program.schedule(name).mesh is None:
        check_tensor(program, name)  # mesh axes without a mesh make no local extents
    definition, sharding = program.tensor(name), sharding_of(program, name)
    layout = layout_of(program, name)
    return ExpectedTensor(
        name,
        definition.dtype,
        tuple(axis.extent for axis in definition.tensor_axes),
        tuple(local_extent(digits) for digits in sharding.axes),
        sharding,
        layout.order,
        layout.contiguity,
        definition.is_cpu,
        any(output.alias == name for output in program.fusion.outputs),
    )


def declared_signature(expected: Sequence[Expected], device: str) -> Signature:
    """The signature of inputs that promise no more than was declared of them."""
    return Signature(tuple(_declared(want, device) for want in expected))


def _declared(want: Expected, device: str) -> TensorSignature | ScalarSignature:
    if isinstance(want, ExpectedScalar):
        return ScalarSignature(want.dtype)
    ones = tuple(const_value(extent) == 1 for extent in want.local_extents)
    place = "cpu" if want.is_cpu else device
    return TensorSignature(want.dtype, place, want.order, want.contiguity, ones)


# Checking one against the other.


def check_arguments(
    expected: Sequence[Expected],
    inputs: Sequence[Argument | complex],
    device: torch.device | None = None,
    rank: int = 0,
) -> tuple[list[Argument], torch.device]:
    """The inputs of a rank, scalars converted to the types expected, and the device the program
    runs on.

    In place of a tensor of a mesh without this rank any empty one is taken. Without tensors the
    device is `device`, else the current GPU where there is one, else the CPU. Raises UserError
    naming the input, what was expected and what was found.
    """
    if len(inputs) != len(expected):
        names = ", ".join(map(str, expected))
        raise UserError(f"expected {len(expected)} inputs ({names}), but got {len(inputs)}")
    bound: list[Argument] = []
    for position, (want, value) in enumerate(zip(expected, inputs, strict=True)):
        if isinstance(want, ExpectedScalar):
            bound.append(_check_scalar(position, want, value))
        elif want.is_on(rank):
            bound.append(_check_tensor(position, want, value, rank))
        else:
            bound.append(_check_empty(position, want, value, rank))
    where = _common_device(expected, bound, device, rank)
    for position, want in enumerate(expected):
        if isinstance(want, ExpectedTensor) and not want.is_on(rank):
            bound[position] = _empty(want, where)
    return bound, where


def _check_empty(
    position: int, want: ExpectedTensor, value: Argument | complex, rank: int
) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 0:
        return value
    found = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise UserError(
        f"Expected input {position}, {want}, to be an empty tensor on rank {rank}, which is not in "
        f"{want.sharding.mesh}, but got {found}"
    )


def _empty(want: ExpectedTensor, device: torch.device) -> torch.Tensor:
    """What stands for a tensor of other ranks, whatever empty tensor was passed."""
    where = torch.device("cpu") if want.is_cpu else device
    return torch.empty(
        shape_outside(len(want.extents)), dtype=to_torch_dtype(want.dtype), device=where
    )


def _check_scalar(position: int, want: ExpectedScalar, value: Argument | complex) -> Scalar:
    if isinstance(value, torch.Tensor):
        raise UserError(
            f"Expected input {position}, {want}, to be a scalar but got {_type_name(value)} tensor "
            f"of rank {value.dim()}"
        )
    if isinstance(value, complex):
        shown, fits = f"({value.real:g},{value.imag:g})", False
    else:
        shown, fits = str(value), _fits(dtype_of_value(value), want.dtype)
    if not fits or isinstance(value, complex):
        raise UserError(
            f"Expected input {position}, {want}: Scalar value {shown} is not compatible with the "
            f"expected data type: {C_NAMES[want.dtype]}."
        )
    if not _holds(want.dtype, value):
        raise UserError(
            f"Expected input {position}, {want}: {shown} does not fit into {C_NAMES[want.dtype]}"
        )
    return float(value) if is_floating(want.dtype) else value


def _holds(dtype: DataType, value: Scalar) -> bool:
    """Whether an int is not too large for the type; a float rounds, to infinity if need be."""
    if isinstance(value, float):
        return True
    if is_floating(dtype):
        return abs(value) < 1 << sys.float_info.max_exp
    limit = 1 << (31 if dtype is DataType.Int32 else 63)
    return -limit <= value < limit


def _fits(found: DataType, wanted: DataType) -> bool:
    """bool is accepted as an integer, and either as a float."""
    if is_floating(wanted):
        return True
    return found is DataType.Bool or (found is DataType.Int and wanted is not DataType.Bool)


def _check_tensor(
    position: int, want: ExpectedTensor, value: Argument | complex, on_rank: int
) -> torch.Tensor:
    call = f"Expected input {position}, {want}, to be"
    if not isinstance(value, torch.Tensor):
        raise UserError(f"{call} an at::Tensor but got scalar {value}")
    _check_memory(call, want, value)
    rank = len(want.extents)
    if value.dim() != rank:
        raise UserError(
            f"{call} bound to a tensor of rank {rank}, but got a tensor of rank {value.dim()}"
        )
    if DATA_TYPES.get(value.dtype) is not want.dtype:
        raise UserError(
            f"{call} bound to a tensor of dtype {C_NAMES[want.dtype]}, "
            f"but got a tensor of dtype {_type_name(value)}"
        )
    if want.is_cpu and value.device.type != "cpu":
        raise UserError(
            f"{call} bound to a CPU or meta scalar tensor, but got one on device {value.device}"
        )
    _check_sizes(call, want, value, on_rank)
    _check_contiguity(call, want, value)
    return value


def _check_memory(call: str, want: ExpectedTensor, value: torch.Tensor) -> None:
    """Whether the values lie in memory of the tensor's own, at its strides."""
    kind: Any = type(value)
    plain: Any = torch.Tensor
    if kind.__torch_dispatch__ is not plain.__torch_dispatch__:
        raise UserError(
            f"{call} a tensor that holds its own memory, but got a {kind.__name__}, which stands "
            "for others; pass the plain tensor that it wraps, as a DTensor's to_local()"
        )
    if value.layout is not torch.strided:
        raise UserError(f"{call} a dense tensor, but its layout is {value.layout}; pass to_dense()")
    if value.is_neg():
        raise UserError(
            f"{call} a tensor whose memory holds its values, but got a view that torch negates "
            "when it reads it, of a conjugate's imaginary part; pass resolve_neg() of it"
        )
    if want.is_updated and value.numel() and 0 in _strides_that_count(value):
        raise UserError(
            f"{call} a tensor whose elements lie apart, as an output is written into it, but got "
            f"strides {list(value.stride())} for shape {list(value.shape)}; pass a clone"
        )


def _strides_that_count(value: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]


def _check_sizes(call: str, want: ExpectedTensor, value: torch.Tensor, rank: int) -> None:
    wanted = [want.local_size(axis, rank) for axis in range(len(want.extents))]
    for axis, size in enumerate(wanted):
        if size is None or size == value.shape[axis]:
            continue
        part = ""
        if any(digit.owner is not None for digits in want.sharding.axes for digit in digits):
            shape = ", ".join("?" if n is None else str(n) for n in wanted)
            part = f" (rank {rank} holds [{shape}] of it, sharded as {describe(want.sharding)})"
        raise UserError(
            f"{call} of size {size} on axis {axis}{part}, "
            f"but got a tensor of shape {list(value.shape)}"
        )


def _check_contiguity(call: str, want: ExpectedTensor, value: torch.Tensor) -> None:
    """Whether the strides keep the declaration's promises. Axes of size 1 may have any stride."""
    if value.numel() == 0:
        return
    wanted = 1
    for axis, flag in zip(reversed(want.order), reversed(want.contiguity), strict=True):
        size, stride = value.shape[axis], value.stride(axis)
        if size == 1:
            continue
        if flag is None and stride != 0:
            raise UserError(
                f"{call} expanded (stride 0) on axis {axis}, but got stride {stride} "
                f"(strides {list(value.stride())}, shape {list(value.shape)})"
            )
        if flag and stride != wanted:
            raise UserError(
                f"{call} contiguous on axis {axis} as its contiguity says, with stride {wanted}, "
                f"but got stride {stride} (strides {list(value.stride())}, shape "
                f"{list(value.shape)}); pass a contiguous copy or declare the axis contiguity=False"
            )
        if flag is not None:
            wanted = size * stride


def _type_name(tensor: torch.Tensor) -> str:
    dtype = DATA_TYPES.get(tensor.dtype)
    return str(tensor.dtype) if dtype is None else C_NAMES[dtype]


def _common_device(
    expected: Sequence[Expected],
    inputs: Sequence[Argument],
    device: torch.device | None,
    rank: int,
) -> torch.device:
    """The one device of all inputs, CPU scalars of a GPU program and empty ones aside.

    Where the rank holds no input, the empty ones say: all ranks' tensors lie on one kind of device.
    """
    found: dict[torch.device, str] = {}
    empty: list[torch.device] = []
    for position, (want, value) in enumerate(zip(expected, inputs, strict=True)):
        if not isinstance(value, torch.Tensor) or not isinstance(want, ExpectedTensor):
            continue
        if not want.is_cpu and want.is_on(rank):
            found.setdefault(value.device, f"input {position}, {want}, lies on {value.device}")
        elif not want.is_cpu:
            empty.append(value.device)
    if len(found) > 1:
        raise UserError(f"inputs must lie on one device, but {'; '.join(found.values())}")
    if not found:
        return device or next(iter(empty), None) or default_device()
    (only,) = found
    if device is not None and device != only:
        raise UserError(
            f"execute(device={device}): {found[only]}; move the inputs there, or leave device out"
        )
    return only


def default_device() -> torch.device:
    """Where a program runs that reads no tensor: the current GPU where there is one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
