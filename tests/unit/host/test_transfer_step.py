"""Memory for what ranks deliver: of symmetric memory only as much as peers read."""

from __future__ import annotations

import pytest
import torch

from meshfuse import FusionDefinition
from meshfuse.facts.overlap_form import PLAIN, Overlap
from meshfuse.host.events import PostTransfer, ReserveSlot
from meshfuse.host.load import load
from meshfuse.host.plan import Plan
from meshfuse.pipeline import compile
from meshfuse.runtime.arguments import signature_of
from peer_programs import multiply_then_scatter, multiply_then_sum


def plan_of(fd: FusionDefinition, form: Overlap, shards: list[torch.Tensor], rank: int) -> Plan:
    """On a GPU, which is not needed to plan."""
    program = fd.fusion.recording.program
    host = compile(program, signature_of(shards), kernels=False, form=form).host
    plan, _ = load(host, {}, None, rank, torch.device("cuda", 0)).start(shards)
    return plan


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("pieces", [1, 2])
def test_terms_that_all_ranks_keep_take_no_symmetric_memory(pieces: int, rank: int) -> None:
    """Of each piece a rank delivers the blocks of its two peers, and keeps its own."""
    shards = [torch.ones(12, 2), torch.ones(3, 2)]
    plan = plan_of(multiply_then_sum(3, 12, 6), Overlap.peers(pieces), shards, rank)
    reserved = [found.asks for found in plan.bound if isinstance(found.asks, ReserveSlot)]
    assert len(reserved) == 2 * pieces
    assert {found.chunk.team for found in reserved} == {(0, 1, 2)}
    assert {found.chunk.most_bytes for found in reserved} == {4 * 3 * 4 // pieces}


@pytest.mark.parametrize("d", [2, 4])
def test_each_delivery_that_moves_has_some(d: int) -> None:
    """In the order of the text: memory, then what is sent from it."""
    shards = [torch.ones(8, 2), torch.ones(2, 3)]
    plan = plan_of(multiply_then_scatter(d, 8, 2 * d), PLAIN, shards, 0)
    asked = [found.asks for found in plan.bound if found.asks is not None]
    moving = [
        asks for asks in asked if not isinstance(asks, PostTransfer) or asks.transfer.transfer.moves
    ]
    assert [type(asks) for asks in moving] == [ReserveSlot, PostTransfer] * (d - 1)
    for memory, post in zip(moving[::2], moving[1::2], strict=True):
        assert isinstance(memory, ReserveSlot) and isinstance(post, PostTransfer)
        assert memory.slot == post.src
