"""Time by bytes moved: enough to rank schedulers, not to predict them."""

from __future__ import annotations

from collections.abc import Iterable

from meshfuse.facts.nominal import nominal_bytes
from meshfuse.ir.axes import TensorName
from meshfuse.ir.program import Program

BYTES_PER_MICROSECOND = 10_000.0
LAUNCH_MICROSECONDS = 5.0


def microseconds_to_move(program: Program, tensors: Iterable[TensorName]) -> float:
    """Time to read or write each of `tensors` once, symbolic sizes taken as a nominal one."""
    return sum(nominal_bytes(program, tensor) for tensor in tensors) / BYTES_PER_MICROSECOND


def inputs_and_outputs(program: Program) -> tuple[TensorName, ...]:
    """The tensors that a kernel reads and writes, each once."""
    tensors = program.fusion.tensors
    inputs = (TensorName(name) for name in program.fusion.inputs if name in tensors)
    outputs = (output.tensor for output in program.fusion.outputs)
    return tuple(dict.fromkeys((*inputs, *outputs)))
