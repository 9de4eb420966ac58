"""Collectives of all ranks in one process."""

from __future__ import annotations

import re

import pytest
import torch

from meshfuse.base.errors import CommunicationError, InvariantError, Unsupported
from meshfuse.dist.collectives import CollectiveRequest, reduce_blocks
from meshfuse.dist.simulated import SimulatedTransport, perform
from meshfuse.dist.wires import memory_of

TEAM = (2, 0, 1)


def request(
    collective: str,
    src: torch.Tensor,
    out: torch.Tensor,
    function: str | None = None,
    number: int = 0,
    team: tuple[int, ...] = TEAM,
) -> CollectiveRequest:
    return CollectiveRequest(number, collective, team, src, out, function, "T1 = set(T0)")


def gathers(size: int = 2) -> dict[int, CollectiveRequest]:
    return {
        rank: request("all_gather", torch.full((size,), float(rank)), torch.empty(3 * size))
        for rank in TEAM
    }


def test_all_gather_in_team_order() -> None:
    requests = gathers()
    perform(requests)
    for rank in TEAM:
        assert requests[rank].out.tolist() == [2, 2, 0, 0, 1, 1]


def test_reduce_scatter_in_team_order() -> None:
    requests = {
        rank: request("reduce_scatter", torch.arange(3) * 10 + rank, torch.empty(1).long(), "sum")
        for rank in TEAM
    }
    perform(requests)
    assert [int(requests[rank].out) for rank in TEAM] == [3, 33, 63]


def test_all_reduce_in_place() -> None:
    buffers = {rank: torch.tensor([rank, -rank]) for rank in TEAM}
    perform({rank: request("all_reduce", b, b, "max") for rank, b in buffers.items()})
    assert [b.tolist() for b in buffers.values()] == [[2, 0]] * 3


def test_blocks_are_memory_whatever_the_strides() -> None:
    """Gathering axis 1 of a tensor that lies in memory with axis 1 slowest."""
    parts = {rank: torch.full((2, 4), rank).t().contiguous().t() for rank in TEAM}
    outs = {rank: torch.empty(12, 2, dtype=torch.int64).t() for rank in TEAM}
    perform({rank: request("all_gather", parts[rank], outs[rank]) for rank in TEAM})
    assert torch.equal(outs[0], torch.cat([parts[rank] for rank in TEAM], dim=1))


def test_sixteen_bit_sums_are_rounded_once() -> None:
    blocks = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16).view(4, 1)
    out = torch.empty(1, dtype=torch.bfloat16)
    reduce_blocks(blocks, "sum", out)
    assert (
        out.item() == 260.0
    )  # 259 to the nearest bf16; one rounding an addition would stay at 256


def test_bool_max_is_or() -> None:
    requests = {
        rank: request("all_reduce", torch.tensor([rank == 1, False]), torch.empty(2).bool(), "max")
        for rank in TEAM
    }
    perform(requests)
    assert requests[2].out.tolist() == [True, False]


def test_what_no_rank_could_run() -> None:
    ones = torch.ones(2)
    with pytest.raises(Unsupported, match="bool has no sum"):
        perform({0: request("all_reduce", ones.bool(), ones.bool(), "sum", team=(0,))})
    with pytest.raises(Unsupported, match="reduced by sum, prod, max, min"):
        perform({0: request("all_reduce", ones, ones, "mul", team=(0,))})
    with pytest.raises(InvariantError, match="2 elements into 3 over 1 ranks"):
        perform({0: request("all_gather", ones, torch.ones(3), team=(0,))})
    with pytest.raises(InvariantError, match="dense in memory"):
        memory_of(torch.ones(4)[::2])
    with pytest.raises(InvariantError, match="dense in memory"):
        memory_of(torch.ones(1).expand(4))


def test_ranks_that_disagree_are_named() -> None:
    requests = gathers()
    requests[0] = request("all_gather", torch.ones(4), torch.empty(12))
    with pytest.raises(CommunicationError, match="ranks 2 and 0 disagree on the bytes: 8 and 16"):
        perform(requests)
    requests[0] = request("all_reduce", torch.ones(2), torch.empty(2), "sum")
    with pytest.raises(
        CommunicationError, match="disagree on the collective: all_gather and all_r"
    ):
        perform(requests)
    del requests[0]
    with pytest.raises(CommunicationError, match=re.escape("by ranks (2, 1); missing: (0,)")):
        perform(requests)


def test_transport_delivers_at_each_wait() -> None:
    transport = SimulatedTransport()
    requests = gathers()
    transport.post(2, requests[2])
    assert requests[2].out.isnan().all(), "poisoned until the wait"
    assert transport.missing(2, 0) == (0, 1)
    with pytest.raises(CommunicationError, match=r"rank 2 waits for ranks \(0, 1\) for ever"):
        transport.wait(2, 0)
    transport.post(0, requests[0])
    transport.post(1, requests[1])
    transport.wait(0, 0)
    assert requests[0].out.tolist() == [2, 2, 0, 0, 1, 1]
    assert requests[1].out.isnan().all()
    assert len(transport.unfinished()) == 2
    transport.wait(1, 0)
    transport.wait(2, 0)
    assert requests[2].out.tolist() == [2, 2, 0, 0, 1, 1]
    assert transport.unfinished() == ()


def test_transport_poisons_integers_and_what_runs_in_place() -> None:
    transport = SimulatedTransport()
    whole = request("all_reduce", torch.ones(2).int(), torch.empty(2).int(), "sum", team=(0, 1))
    transport.post(0, whole)
    assert whole.out.tolist() == [torch.iinfo(torch.int32).max] * 2
    buffers = [torch.tensor([1.0]), torch.tensor([2.0])]
    for rank, buffer in enumerate(buffers):
        transport.post(rank, request("all_reduce", buffer, buffer, "sum", number=1, team=(1, 0)))
        assert buffer.isnan().all()
    for rank in range(2):
        transport.wait(rank, 1)
    assert buffers == [torch.tensor([3.0]), torch.tensor([3.0])]


def test_transport_sees_a_send_buffer_that_changes() -> None:
    transport = SimulatedTransport()
    requests = gathers()
    for rank in TEAM:
        transport.post(rank, requests[rank])
    transport.wait(2, 0)
    requests[2].src.zero_()  # after its own wait: allowed
    requests[0].src.fill_(7)
    transport.wait(1, 0)
    assert requests[1].out.tolist() == [2, 2, 0, 0, 1, 1]
    with pytest.raises(CommunicationError, match="rank 0 changed its send buffer between post and"):
        transport.wait(0, 0)


def test_transport_sees_ranks_that_post_in_another_order() -> None:
    transport = SimulatedTransport()
    team = (0, 1)
    a = request("all_gather", torch.ones(1), torch.empty(2), number=1, team=team)
    b = request("all_gather", torch.ones(1), torch.empty(2), number=2, team=team)
    transport.post(0, a)
    with pytest.raises(CommunicationError, match="ranks 0 and 1 disagree on the number: 1 and 2"):
        transport.post(1, b)


def test_transport_runs_the_same_number_again_and_not_twice_at_once() -> None:
    transport = SimulatedTransport()
    for _ in range(2):
        requests = gathers()
        for rank in TEAM:
            transport.post(rank, requests[rank])
        for rank in TEAM:
            transport.wait(rank, 0)
            assert requests[rank].out.tolist() == [2, 2, 0, 0, 1, 1]
    transport.post(0, gathers()[0])
    with pytest.raises(InvariantError, match="posted again, without a wait between"):
        transport.post(0, gathers()[0])
    with pytest.raises(InvariantError, match="waits for number 5, which it has not posted"):
        transport.wait(0, 5)
