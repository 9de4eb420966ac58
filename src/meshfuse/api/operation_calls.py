"""What the operations of `fd.ops` share: recording a call, and checking its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshfuse.api.recording import Call, Recording
from meshfuse.api.tensor_view import TensorView, Val, recording_of, tensor_view
from meshfuse.base.dtypes import DataType, Scalar
from meshfuse.base.errors import UserTypeError
from meshfuse.expr.nodes import IntExpr
from meshfuse.ir.axes import ScalarName
from meshfuse.ir.ops import Literal
from meshfuse.ir.program import Program

ScalarValue = Val | Scalar


class BoundOperations:
    """Abstract: operations of one definition, or of whichever their operands belong to."""

    def __init__(self, recording: Recording | None = None) -> None:
        self._recording = recording

    def _tensor(
        self, call: Call, arg: TensorView, verb: Callable[[Program], tuple[Program, str]]
    ) -> TensorView:
        recording = self._recording_of(call, tensor_argument(call, arg))

        def define(program: Program) -> tuple[Program, tuple[str]]:
            program, name = verb(program)
            return program, (name,)

        (name,) = recording.define(call, define)
        return tensor_view(recording, name)

    def _recording_of(self, call: Call, arg: object) -> Recording:
        return recording_of(call, (arg,), self._recording)


def tensor_argument(call: Call, arg: object) -> TensorView:
    if not isinstance(arg, TensorView):
        raise UserTypeError(f"{call}: takes a TensorView, got {type(arg).__name__}")
    return arg


def require(call: Call, name: str, value: object, wanted: type) -> None:
    """Refuse an argument of another type. Flags may not stand for numbers, nor numbers for them."""
    if type(value) is not wanted:
        raise UserTypeError(f"{call}: {name} must be a {wanted.__name__}, got {value!r}")


def sequence(call: Call, name: str, values: object, element: type) -> tuple[Any, ...]:
    """A list argument, checked for its element type. Flags may not stand for numbers."""
    wanted = f"{name} must be a list of {element.__name__}s"
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise UserTypeError(f"{call}: {wanted}, got {type(values).__name__}")
    for value in values:
        if type(value) is not element:
            raise UserTypeError(f"{call}: {wanted}, got {value!r} among them")
    return tuple(values)


def sizes_argument(
    call: Call, arg: TensorView, shape: object
) -> tuple[int | IntExpr | ScalarName, ...]:
    """The entries of a shape: ints, and integer Vals of the definition that `arg` belongs to."""
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes):
        raise UserTypeError(f"{call}: shape must be a list, got {type(shape).__name__}")
    recording_of(call, [tensor_argument(call, arg), *shape])
    return tuple(size_argument(call, size) for size in shape)


def size_argument(call: Call, size: object) -> int | IntExpr | ScalarName:
    """One entry of a shape: an int, or an integer Val."""
    match size:
        case int() if not isinstance(size, bool):
            return size
        case Val() if size.dtype() is DataType.Int:
            operand = size.operand
            return int(operand.value) if isinstance(operand, Literal) else operand
        case Val():
            raise UserTypeError(f"{call}: shape takes integers, got {size!r}")
        case _:
            raise UserTypeError(f"{call}: shape takes ints and Vals, got {type(size).__name__}")
