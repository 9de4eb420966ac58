"""Verbs for what a Program starts and ends with: tensors and scalars, inputs, outputs, sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshfuse.base.dtypes import DataType, Scalar, dtype_of_value
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.base.orders import order_of_stride_order, wrap_dim, wrap_permutation
from meshfuse.expr import IntExpr, const, symbol
from meshfuse.ir.axes import AxisKind, ScalarName, TensorName
from meshfuse.ir.build_shape import set_
from meshfuse.ir.describe import describe, describe_call
from meshfuse.ir.fusion import Output, ScalarDef, TensorDef
from meshfuse.ir.infer import ONE, AxisShape
from meshfuse.ir.ops import Literal
from meshfuse.ir.program import Program, fresh_name
from meshfuse.ir.rewrite import fresh_scalar_name, new_tensor
from meshfuse.ir.schedule import Allocation

_INT64_LIMIT = 2**63


def define_tensor(
    program: Program,
    shape: Sequence[int],
    dtype: DataType = DataType.Float,
    contiguity: Sequence[bool | None] | bool = False,
    stride_order: Sequence[int] = (),
    is_cpu: bool = False,
) -> tuple[Program, TensorName]:
    """A tensor that nothing defines yet; `add_input` makes it an input.

    A size of -1 gives a fresh symbol `i<N>`, 1 a broadcast axis, any other is static. A list of
    contiguity flags goes from the slowest axis to the fastest; None is a broadcast axis or,
    elsewhere, an expanded one (stride 0). `is_cpu` marks a 0-dim CPU scalar of a GPU program.

    Raises UserError for a size below -1, flags or a stride order that do not fit the shape, and
    `is_cpu` with a shape; UserTypeError for what is no int64 and no flag.
    """
    call = f"define_tensor(shape={list(shape)}, contiguity={contiguity})"
    if is_cpu and shape:
        raise UserError(f"{call}: CPU non-scalar tensor is not supported!")
    axes: list[AxisShape] = []
    for position, size in enumerate(shape):
        _check_size(call, size, position)
        if size == -1:
            program, name = fresh_name(program, "i")
            axes.append((AxisKind.iteration, symbol(name)))
        else:
            axes.append(ONE if size == 1 else (AxisKind.iteration, const(size)))
    order = _allocation_order(call, stride_order, len(shape))
    flags = _contiguity_flags(call, contiguity, [shape[dim] for dim in order])
    program, name = new_tensor(program, dtype, axes)
    if is_cpu:
        program = _with_definition(program, name, replace(program.tensor(name), is_cpu=True))
    if not shape:
        return program, name
    logical = program.tensor(name).logical
    allocation = Allocation(tuple(logical[dim].name for dim in order), flags)
    schedule = replace(program.schedule(name), allocation=allocation)
    return program.with_schedule(name, schedule), name


def _check_size(call: str, size: object, position: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or abs(size) >= _INT64_LIMIT:
        raise UserTypeError(f"{call}: size {position} must be an int64, got {size!r}")
    if size < -1:
        raise UserError(
            f"{call}: size {position} is {size}; a size is -1 (known when run), 0 (empty), 1 "
            "(broadcast) or a larger number"
        )


def _allocation_order(call: str, stride_order: Sequence[int], rank: int) -> tuple[int, ...]:
    if not stride_order:
        return tuple(range(rank))
    call = f"{call} with stride_order={list(stride_order)}"
    return order_of_stride_order(wrap_permutation(stride_order, rank, call))


def _contiguity_flags(
    call: str, contiguity: Sequence[bool | None] | bool, sizes: Sequence[int]
) -> tuple[bool | None, ...]:
    """Flags for sizes in memory order."""
    if isinstance(contiguity, bool):
        return tuple(None if size == 1 else contiguity for size in sizes)
    if len(contiguity) != len(sizes):
        raise UserError(
            f"{call}: Length of contiguity argument ({len(contiguity)}) must match that of shape "
            f"argument ({len(sizes)})"
        )
    for flag, size in zip(contiguity, sizes, strict=True):
        if not isinstance(flag, bool | None):  # pyright: ignore[reportUnnecessaryIsInstance]  # users' values
            raise UserTypeError(f"{call}: a contiguity flag is True, False or None, got {flag!r}")
        if size == 1 and flag is not None:
            raise UserError(f"{call}: the contiguity flag of an axis of size 1 must be None")
    return tuple(contiguity)


def _with_definition(program: Program, name: TensorName, definition: TensorDef) -> Program:
    tensors = {**program.fusion.tensors, name: definition}
    return replace(program, fusion=replace(program.fusion, tensors=tensors))


def define_scalar(program: Program, dtype: DataType) -> tuple[Program, ScalarName]:
    """A scalar that nothing defines yet; `add_input` makes it an input."""
    program, name = fresh_scalar_name(program)
    scalars = {**program.fusion.scalars, name: ScalarDef(dtype)}
    return replace(program, fusion=replace(program.fusion, scalars=scalars)), name


def literal(value: Scalar, dtype: DataType | None = None) -> Literal:
    """A constant operand; by default bool is Bool, int Int and float Double.

    Every NaN becomes the same object, so that equal constants compare equal.
    """
    if value != value:  # noqa: PLR0124  # only NaN differs from itself
        value = math.nan
    return Literal(value, dtype if dtype is not None else dtype_of_value(value))


def add_input(program: Program, name: TensorName | ScalarName) -> Program:
    """Make a tensor or scalar the next input."""
    inputs = (*program.fusion.inputs, name)
    return replace(program, fusion=replace(program.fusion, inputs=inputs))


def size(program: Program, tensor: TensorName, dim: int) -> IntExpr:
    """The (global) extent of a tensor axis; a negative dim counts from the end."""
    axes = program.tensor(tensor).tensor_axes
    call = describe_call(program, "size", [tensor], dim=dim)
    return axes[wrap_dim(dim, len(axes), call)].extent


def add_output(program: Program, tensor: TensorName, alias: TensorName | None = None) -> Program:
    """Make a tensor the next output; with `alias` its value goes into that input's memory instead.

    An aliased tensor takes the input's memory order and contiguity. If it is an input or aliased
    already, a copy of it is aliased. Raises UserError if `alias` is no input, differs in type or
    shape, is expanded, or is aliased already.
    """
    if alias is not None:
        _check_alias(program, tensor, alias)
        taken = any(o.tensor == tensor and o.alias is not None for o in program.fusion.outputs)
        if tensor in program.fusion.inputs or taken:
            program, tensor = set_(program, tensor)
        program = _allocate_like(program, tensor, alias)
    outputs = (*program.fusion.outputs, Output(tensor, alias))
    return replace(program, fusion=replace(program.fusion, outputs=outputs))


def _check_alias(program: Program, tensor: TensorName, alias: TensorName) -> None:
    call = describe_call(program, "add_output", [tensor], alias_input=describe(program, alias))
    if alias not in program.fusion.inputs:
        raise UserError(f"{call}: the second tensor must be an input of the program")
    if any(output.alias == alias for output in program.fusion.outputs):
        raise UserError(f"{call}: another output goes into {alias} already")
    have, want = program.tensor(tensor), program.tensor(alias)
    if have.dtype is not want.dtype:
        raise UserError(f"{call}: element types differ; cast the output to {want.dtype.value}")
    kinds = [axis.kind for axis in have.tensor_axes]
    sizes = [str(axis.extent) for axis in have.tensor_axes]
    if kinds != [axis.kind for axis in want.tensor_axes] or any(
        a != str(b.extent) and a.isdigit() and str(b.extent).isdigit()
        for a, b in zip(sizes, want.tensor_axes, strict=True)
    ):
        raise UserError(f"{call}: shapes differ; an update in place keeps the shape")
    allocation = program.schedule(alias).allocation
    moving = {axis.name for axis in want.tensor_axes if axis.kind is AxisKind.iteration}
    if allocation is not None:
        for axis, flag in zip(allocation.order, allocation.contiguity, strict=True):
            if flag is None and axis in moving:
                raise UserError(f"{call}: {alias} is expanded along {axis}: its elements overlap")


def _allocate_like(program: Program, tensor: TensorName, like: TensorName) -> Program:
    allocation = program.schedule(like).allocation
    if allocation is None:
        return program
    pairs = zip(program.tensor(like).tensor_axes, program.tensor(tensor).tensor_axes, strict=True)
    renamed = {theirs.name: ours.name for theirs, ours in pairs}
    order = tuple(renamed[axis] for axis in allocation.order)
    schedule = replace(
        program.schedule(tensor), allocation=Allocation(order, allocation.contiguity)
    )
    return program.with_schedule(tensor, schedule)
