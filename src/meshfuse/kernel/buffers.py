"""Tensors in memory: shapes and strides of kernel arguments, from allocations."""

from __future__ import annotations

from meshfuse.expr import IntExpr, const, symbol
from meshfuse.ir.axes import AxisKind, AxisName, TensorName
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Allocation
from meshfuse.kernel.nodes import Buffer, BufferName


def buffer_of(program: Program, tensor: TensorName, *, written: bool) -> Buffer:
    """The memory of a tensor; without an allocation, row-major and contiguous."""
    definition = program.tensor(tensor)
    strides = strides_of(tensor, definition, program.schedule(tensor).allocation)
    shape = tuple(axis.extent for axis in definition.tensor_axes)
    return Buffer(BufferName(tensor), definition.dtype, shape, strides, written)


def strides_of(
    tensor: TensorName, definition: TensorDef, allocation: Allocation | None
) -> tuple[IntExpr, ...]:
    """One stride per tensor axis, in elements.

    A contiguous axis has the size times the stride of the next axis that is not broadcast, an axis
    of any stride the symbol `<tensor>_s<position>`, a broadcast or expanded one 0.
    """
    layout = allocation or row_major(definition)
    places = {axis.name: place for place, axis in enumerate(definition.tensor_axes)}
    extents = {axis.name: axis.extent for axis in definition.tensor_axes}
    strides: dict[AxisName, IntExpr] = {}
    following: IntExpr = const(1)
    pairs = zip(layout.order, layout.contiguity, strict=True)
    for axis, contiguous in reversed(tuple(pairs)):
        if contiguous is None:
            strides[axis] = const(0)
            continue
        strides[axis] = following if contiguous else symbol(stride_name(tensor, places[axis]))
        following = extents[axis] * strides[axis]
    return tuple(strides[axis.name] for axis in definition.tensor_axes)


def row_major(definition: TensorDef) -> Allocation:
    """The allocation of a tensor that has none: contiguous, slowest axis first."""
    axes = definition.tensor_axes
    return Allocation(
        tuple(axis.name for axis in axes),
        tuple(None if axis.kind is AxisKind.broadcast else True for axis in axes),
    )


def stride_name(tensor: TensorName, position: int) -> str:
    """The size symbol that passes the stride of a tensor axis at launch."""
    return f"{tensor}_s{position}"
