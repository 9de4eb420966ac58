"""Scalars as a definition takes them: inputs, constants, and inputs in a row."""

from __future__ import annotations

from typing import Any

from meshfuse.api.constants import constant
from meshfuse.api.recording import Call, Recording
from meshfuse.api.tensor_view import Val, scalar
from meshfuse.base.dtypes import DataType, Scalar, dtype_of_value
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.ir import build
from meshfuse.ir.axes import ScalarName
from meshfuse.ir.program import Program

_LONGEST_VECTOR = 1 << 16


def as_input(built: tuple[Program, Any]) -> tuple[Program, tuple[str]]:
    """What was built, as the next input."""
    program, name = built
    return build.add_input(program, name), (name,)


def define_scalar(recording: Recording, value: Scalar | DataType | None, dtype: DataType) -> Val:
    """See FusionDefinition.define_scalar; a type may come in place of the value."""
    if isinstance(value, DataType):
        value, dtype = None, value
    keywords: dict[str, object] = {} if dtype is DataType.Null else {"dtype": dtype}
    call = Call("fd.define_scalar", () if value is None else (value,), keywords)
    if not isinstance(dtype, DataType):
        raise UserTypeError(f"{call}: dtype must be a DataType, got {dtype!r}")
    if value is not None:
        typed = dtype_of_value(value) if dtype is DataType.Null else dtype
        return scalar(recording, constant(value, typed, call))
    typed = DataType.Double if dtype is DataType.Null else dtype
    (name,) = recording.define(
        Call("fd.define_scalar", (None,), {"dtype": typed}),
        lambda program: as_input(build.define_scalar(program, typed)),
    )
    return scalar(recording, ScalarName(name))


def define_vector(recording: Recording, size: int) -> list[Val]:
    """See FusionDefinition.define_vector."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise UserTypeError(f"define_vector({size!r}): size must be an int, 0 or more")
    if size > _LONGEST_VECTOR:
        raise UserError(f"define_vector({size}): size must be at most {_LONGEST_VECTOR}")
    return [define_scalar(recording, None, DataType.Int) for _ in range(size)]
