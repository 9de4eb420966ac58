"""Time by bytes moved: enough to rank schedulers, not to predict them."""

from __future__ import annotations

from collections.abc import Iterable

from meshfuse.base.dtypes import ITEM_BYTES
from meshfuse.expr import IntExpr, Symbol, evaluate, free_symbols
from meshfuse.ir.axes import TensorName
from meshfuse.ir.program import Program

BYTES_PER_MICROSECOND = 10_000.0
LAUNCH_MICROSECONDS = 5.0
_NOMINAL_SIZE = 1024


def microseconds_to_move(program: Program, tensors: Iterable[TensorName]) -> float:
    """Time to read or write each of `tensors` once, symbolic sizes taken as a nominal one."""
    return sum(nominal_bytes(program, tensor) for tensor in tensors) / BYTES_PER_MICROSECOND


def nominal_bytes(program: Program, tensor: TensorName) -> float:
    definition = program.tensor(tensor)
    elements = 1.0
    for axis in definition.tensor_axes:
        elements *= nominal_extent(axis.extent)
    return elements * ITEM_BYTES[definition.dtype]


def nominal_extent(extent: IntExpr) -> int:
    return evaluate(extent, {found.name: _nominal_size(found) for found in free_symbols(extent)})


def _nominal_size(size: Symbol) -> int:
    value = max(_NOMINAL_SIZE, size.low or 0)
    value = value if size.high is None else min(value, size.high)
    return value - value % size.multiple


def inputs_and_outputs(program: Program) -> tuple[TensorName, ...]:
    """The tensors that a kernel reads and writes, each once."""
    tensors = program.fusion.tensors
    inputs = (TensorName(name) for name in program.fusion.inputs if name in tensors)
    outputs = (output.tensor for output in program.fusion.outputs)
    return tuple(dict.fromkeys((*inputs, *outputs)))
