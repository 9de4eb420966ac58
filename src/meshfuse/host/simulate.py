"""All ranks of a mesh in this process: one driver steps each rank's program in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from meshfuse.base.errors import CommunicationError, UserError
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.simulated import SimulatedTransport
from meshfuse.host.events import AwaitWork, Post, Reserve
from meshfuse.host.plan import Executable
from meshfuse.host.run import RankProgram, interpret
from meshfuse.runtime.arguments import Argument
from meshfuse.runtime.autocast import without_autocast
from meshfuse.runtime.random import RandomState, draw_state


@final
@dataclass(slots=True, eq=False, repr=False)
class _Rank:
    """One rank under way. `waits_for`: the number it awaits; `outputs` when it has ended."""

    program: RankProgram
    posted: dict[int, CollectiveRequest]
    waits_for: int | None = None
    outputs: list[torch.Tensor] | None = None


def simulate(
    executables: Mapping[int, Executable],
    inputs: Mapping[int, Sequence[Argument]],
    given: Mapping[str, int] | None = None,
) -> dict[int, list[torch.Tensor]]:
    """Run one executable per rank, each on its own inputs, and return the visible outputs by rank.

    `given`: global sizes that the caller knows, by symbol.
    Raises UserError for inputs that give ranks different global sizes, CommunicationError if ranks
    disagree otherwise, or if none can go on: then it lists what each waits for; and what
    `interpret` raises.
    """
    _check_sizes(executables, inputs, given or {})
    transport = SimulatedTransport()
    random = RandomState()
    ranks = {
        rank: _Rank(interpret(executable, inputs[rank], given=given, random=random), {})
        for rank, executable in executables.items()
    }
    drawing = next((e.drawing for e in executables.values() if e.drawing is not None), None)
    if drawing is not None:  # once for all ranks, which share this process's generator
        random.take(draw_state(drawing.device, drawing.draws))
    with torch.no_grad(), without_autocast():
        while any(state.outputs is None for state in ranks.values()):
            moved = [_advance(transport, rank, state) for rank, state in ranks.items()]
            if not any(moved):
                raise _deadlock(transport, ranks)
    return {rank: state.outputs or [] for rank, state in ranks.items()}


def _check_sizes(
    executables: Mapping[int, Executable],
    inputs: Mapping[int, Sequence[Argument]],
    given: Mapping[str, int],
) -> None:
    """Law 9: ranks agree on what communication depends on."""
    seen: dict[str, tuple[int, int]] = {}
    for rank, executable in executables.items():
        if executable.is_outside:
            continue
        for name, (size, found) in executable.sizes_of_inputs(inputs[rank]).items():
            other, wanted = seen.setdefault(name, (rank, found))
            if found != wanted and name not in given:
                raise UserError(
                    f"ranks {other} and {rank} disagree on the global size {name}, axis "
                    f"{size.axis} of {size.tensor}: {wanted} and {found}; where blocks are not "
                    "equal, global sizes must be given, or be static"
                )


def _advance(transport: SimulatedTransport, rank: int, state: _Rank) -> bool:
    """Step one rank until it ends or must wait; whether it did anything."""
    moved = False
    while state.outputs is None:
        if state.waits_for is not None:
            if transport.missing(rank, state.waits_for):
                return moved
            transport.wait(rank, state.waits_for)
            state.waits_for = None
        moved = True
        try:
            event = next(state.program)
        except StopIteration as end:
            state.outputs = end.value
            return True
        match event:
            case Post(request):
                transport.post(rank, request)
                state.posted[request.number] = request
            case AwaitWork(number):
                state.waits_for = number
            case Reserve(chunk):
                event.fill(chunk.ordinary())
            case _:
                pass  # all streams are this thread, in program order
    return moved


def _deadlock(transport: SimulatedTransport, ranks: Mapping[int, _Rank]) -> CommunicationError:
    lines = ["deadlock: no rank of the simulation can go on"]
    for rank, state in ranks.items():
        if state.waits_for is None:
            lines.append(f"  rank {rank} has ended")
        else:
            missing = transport.missing(rank, state.waits_for)
            request = state.posted[state.waits_for]
            lines.append(f"  rank {rank} waits in {request} for ranks {missing}")
    return CommunicationError("\n".join(lines))
