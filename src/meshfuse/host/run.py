"""The interpreter of a loaded host program: a generator that yields at communications.

Whoever drives it decides how ranks meet: host/executors.py through the communicator of this
process, host/simulate.py for all ranks of a mesh at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import Unsupported, UserError
from meshfuse.base.trace import Trace
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.expr import IntExpr, evaluate, free_symbols
from meshfuse.host.nodes import HostProgram
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.runtime.arguments import Argument
from meshfuse.runtime.evaluate_ops import Environment
from meshfuse.runtime.torch_types import to_torch_dtype


@final
@dataclass(frozen=True, slots=True)
class Post:
    """Start this collective."""

    request: CollectiveRequest


@final
@dataclass(frozen=True, slots=True)
class AwaitWork:
    """Go on when the collective of this number is complete."""

    number: int


Event = Post | AwaitWork


class Step(ABC):
    """Abstract: one node, bound to what it needs."""

    __slots__ = ()

    @abstractmethod
    def run(self, env: Environment) -> Event | None:
        """Do it, or say what the driver must do next."""


@final
@dataclass(frozen=True, slots=True)
class Executable:
    """A host program ready to run on one rank. `steps` is the flat hot path.

    `is_outside`: the rank is in none of the program's meshes, it holds and does nothing.
    """

    program: HostProgram
    rank: int
    is_outside: bool
    steps: tuple[Step, ...]
    dtypes: Mapping[TensorName | ScalarName, DataType]
    shapes: Mapping[TensorName, tuple[IntExpr, ...]]


def interpret(
    executable: Executable, inputs: Sequence[Argument], trace: Trace | None = None
) -> Generator[Event, None, list[torch.Tensor]]:
    """Run on this rank's inputs, which fit the program's, and return the visible outputs.

    `trace` gets a span for each run of an executor. To be driven under no_grad. Raises UserError
    for sizes that disagree, Unsupported for a size that the ranks of a mesh cannot share in equal
    blocks.
    """
    program = executable.program
    if executable.is_outside:
        return _nothing(program)
    env = bind_inputs(executable, inputs, trace)
    for step in executable.steps:
        event = step.run(env)
        if event is None:
            continue
        if trace is None:
            yield event
        else:
            yield from _traced(event, trace)
    return [env.tensor(output.buffer) for output in program.outputs if output.alias is None]


def _traced(event: Event, trace: Trace) -> Generator[Event, None, None]:
    """The event, marked where a collective is posted; its run ends when the wait is over."""
    match event:
        case Post(request):
            with trace.mark(trace.opened(request.number).name):
                yield event
        case AwaitWork(number):
            yield event
            trace.close(number)


def _nothing(program: HostProgram) -> list[torch.Tensor]:
    """Empty tensors in place of the outputs."""
    shown = (program.buffers[o.buffer] for o in program.outputs if o.alias is None)
    return [
        torch.empty((0,) * len(buffer.shape), dtype=to_torch_dtype(buffer.dtype))
        for buffer in shown
    ]


def bind_inputs(
    executable: Executable, inputs: Sequence[Argument], trace: Trace | None = None
) -> Environment:
    """Inputs by name, and the sizes they give; checks that these agree with one another."""
    program = executable.program
    values = dict(zip(program.inputs, inputs, strict=True))
    sizes: dict[str, int] = {
        name: value for name, value in values.items() if isinstance(value, int)
    }
    env = Environment(executable.dtypes, executable.shapes, sizes, values, trace)
    for size in program.symbols:
        sizes[size.symbol] = env.tensor(size.tensor).shape[size.axis] * size.factor
    for demand in program.demands:
        found = evaluate(demand.extent, sizes)
        if found % demand.divisor:
            raise Unsupported(
                f"execute: {demand.tensor} has a sharded axis of global size {found} "
                f"({demand.extent}), which {demand.divisor} ranks cannot share in equal blocks; "
                f"the size must be a multiple of {demand.divisor}"
            )
    for position, name in enumerate(program.inputs):
        if name in program.buffers:
            _check_sizes(program, position, TensorName(name), env)
    return env


def _check_sizes(program: HostProgram, position: int, name: TensorName, env: Environment) -> None:
    shape = env.tensor(name).shape
    for axis, extent in enumerate(program.buffers[name].shape):
        wanted = evaluate(extent, env.sizes)
        if shape[axis] != wanted:
            origins = ", ".join(
                f"{s.symbol} is {env.sizes[s.symbol]} by axis {s.axis} of {s.tensor}"
                for s in program.symbols
                if any(s.symbol == symbol.name for symbol in free_symbols(extent))
            )
            raise UserError(
                f"Expected input {position}, {name}, to be of size {wanted} on axis {axis}, "
                f"but got a tensor of shape {list(shape)}" + (f" ({origins})" if origins else "")
            )
