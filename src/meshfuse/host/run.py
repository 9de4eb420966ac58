"""The interpreter of a loaded host program: a generator that yields at communications.

Whoever drives it decides how ranks meet: host/executors.py through the communicator of this
process, host/simulate.py for all ranks of a mesh at once. What nobody observes needs no driver: see
host/direct.py.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import torch

from meshfuse.base.trace import Activity, Extent, Trace
from meshfuse.facts.holdings import shape_outside
from meshfuse.host.actions import Action, Slots, Traced
from meshfuse.host.events import CALLER, AwaitWork, Event, Post, SwitchStream
from meshfuse.host.nodes import HostProgram
from meshfuse.host.plan import Executable, Plan
from meshfuse.runtime.arguments import Argument
from meshfuse.runtime.executors import bytes_of
from meshfuse.runtime.random import RandomState
from meshfuse.runtime.torch_types import to_torch_dtype

RankProgram = Generator[Event, None, list[torch.Tensor]]


def interpret(
    executable: Executable,
    inputs: Sequence[Argument],
    trace: Trace | None = None,
    given: Mapping[str, int] | None = None,
    random: RandomState | None = None,
) -> RankProgram:
    """Run on this rank's inputs, which fit the program's, and return the visible outputs.

    `given`: global sizes that the caller knows, by symbol. `random`: where this call's random
    numbers begin, which whoever drives it may fill in until its first step.
    `trace` gets a span for each kernel, evaluation and collective. To be driven under no_grad.
    Raises what `Executable.start` does, before anything has run.
    """
    if executable.is_outside:
        return run_nothing(executable.program)
    plan, slots = executable.start(inputs, given)
    return run_plan(executable, plan, slots, trace, random)


def run_plan(
    executable: Executable,
    plan: Plan,
    slots: Slots,
    trace: Trace | None = None,
    random: RandomState | None = None,
) -> RankProgram:
    """As `interpret`, of what `Executable.start` gave: in program order, on whatever streams."""
    if executable.drawing is not None and random is not None:
        executable.drawing.bind(slots, random)
    if trace is not None:
        for traced, action in zip(plan.traced, plan.actions, strict=True):
            yield from run_traced(traced, action, slots, trace)
    else:
        for action in plan.actions:
            event = action(slots)
            if event is not None:
                yield event
    return [slots[place] for place in executable.outputs]


def run_traced(
    traced: Traced | None, action: Action, slots: Slots, trace: Trace
) -> Generator[Event, None, None]:
    """An action in its span; that of a collective lasts from its post to the end of its wait."""
    if traced is not None and not traced.posts:
        with trace.span(Activity.run, traced.work) as extent:
            action(slots)
            _measure(traced, slots, extent)
        return
    event = action(slots)
    match event:
        case Post(request) if traced is not None:
            extent = Extent()
            _measure(traced, slots, extent)
            trace.open(request.number, traced.work, extent)
            with trace.mark(traced.work.name):
                yield event
            trace.posted(request.number)
        case AwaitWork(number):
            trace.awaits(number)
            yield event
            trace.close(number)
        case SwitchStream(stream):
            trace.stream = None if stream == CALLER else stream
            yield event
        case _ if event is not None:
            yield event
        case _:
            pass


def _measure(traced: Traced, slots: Slots, extent: Extent) -> None:
    reads = [slots[i] for i in traced.reads if isinstance(slots[i], torch.Tensor)]
    writes = [slots[i] for i in traced.writes if isinstance(slots[i], torch.Tensor)]
    extent.device = next((str(tensor.device) for tensor in (*writes, *reads)), "cpu")
    extent.input_bytes = sum(map(bytes_of, reads))
    extent.output_bytes = sum(map(bytes_of, writes))


def run_nothing(program: HostProgram) -> RankProgram:
    """On a rank outside all meshes: give empty tensors in place of the outputs."""
    shown = (program.buffers[o.buffer] for o in program.outputs if o.alias is None)
    yield from ()
    return [
        torch.empty(shape_outside(len(buffer.shape)), dtype=to_torch_dtype(buffer.dtype))
        for buffer in shown
    ]
