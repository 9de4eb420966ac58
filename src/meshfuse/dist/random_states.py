"""Ranks that draw random numbers draw the same ones."""

from __future__ import annotations

from typing import Final

import torch

from meshfuse.base.errors import UserError
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.communicator import Communicator
from meshfuse.runtime.random import RandomState, draw_state

_NUMBER: Final = -2
"""In place of a number in the host program."""


def draw_alike(
    communicator: Communicator, team: tuple[int, ...], device: torch.device, draws: int
) -> RandomState:
    """The state of a call that draws, from torch's generator of `device`.

    All ranks of `team` call this, and no collective of theirs is under way. A rank outside draws,
    too: its generator is to stay where the others' are. Raises UserError on all ranks of the team
    if two of them have drawn differently; no group is broken by that.
    """
    state = draw_state(device, draws)
    if len(team) > 1 and communicator.rank() in team:
        _compare(communicator, team, state)
    return state


def _compare(communicator: Communicator, team: tuple[int, ...], state: RandomState) -> None:
    """Each would make a mask of its own of what should be parts of one.

    It takes 16 bytes of every rank at each call that draws: anybody may move a generator between
    two calls, and a rank whose own did not move cannot know whether another's did. To broadcast one
    rank's seed would cost as much, and hide that what else these ranks draw differs. CPU tensors
    also where the program runs on GPUs: the host is to compare, without waiting for a device.
    """
    mine = torch.tensor([state.seed, state.offset])
    found = torch.empty(2 * len(team), dtype=torch.int64)
    communicator.run(
        CollectiveRequest(_NUMBER, "all_gather", team, mine, found, None, "random numbers")
    )
    states = [tuple(pair) for pair in found.view(-1, 2).tolist()]
    for rank, theirs in zip(team, states, strict=True):
        if theirs != states[0]:
            raise UserError(
                f"execute: ranks {team[0]} and {rank} would draw different random numbers: seed "
                f"{states[0][0]} at {states[0][1]}, and seed {theirs[0]} at {theirs[1]}; call "
                "torch.manual_seed with one seed on all ranks, and draw there alike, or give "
                "rng_seed and rng_offset"
            )
