"""Who sends whose chunk to whom, and what the simulated transport makes of it."""

from __future__ import annotations

import pytest
import torch

from meshfuse.base.errors import CommunicationError, InvariantError
from meshfuse.dist.collectives import CollectiveRequest, Transfer, check_request, moves_nothing
from meshfuse.dist.simulated import perform
from meshfuse.dist.transfers import BoundTransfer
from meshfuse.expr import IntExpr, const, mod, symbol
from meshfuse.facts.holdings import coordinate_symbol
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType, make_mesh

MESH = make_mesh([5, 3, 4])
X = ParallelType.mesh_x
PLACE = coordinate_symbol(MESH, X)
J = symbol("j", 0, 2)


def bound(collective: str, owner: IntExpr, rank: int = 5) -> BoundTransfer:
    out, shape = TensorName("T1"), (const(2),)
    return BoundTransfer(
        2, collective, rank, MESH, X, out, shape, (0,), owner, "a test", bytes=const(0), pieces=()
    )


@pytest.mark.parametrize(
    ("collective", "j", "sources"),
    [
        ("fetch", 0, (0, 1, 2)),
        ("fetch", 1, (1, 2, 0)),
        ("deliver", 0, (0, 1, 2)),
        ("deliver", 1, (2, 0, 1)),
    ],
)
def test_each_place_gets_the_chunk_of_one(
    collective: str, j: int, sources: tuple[int, ...]
) -> None:
    rotated = mod(J + PLACE, 3)
    found = bound(collective, rotated, rank=3).at({"j": j, PLACE.name: 1})
    assert found.team == (5, 3, 4)
    assert (found.transfer.place, found.transfer.sources) == (1, sources)
    assert (found.transfer.most_bytes, found.transfer.chunk) == (0, (2,))
    assert found.transfer.is_own == (j == 0)
    assert found.transfer.moves == (j > 0)


def test_from_one_to_all() -> None:
    transfer = bound("fetch", J).at({"j": 2, PLACE.name: 0}).transfer
    assert (transfer.root, transfer.receivers) == (2, ())
    assert Transfer(2, transfer.sources).receivers == (0, 1)
    assert Transfer(2, transfer.sources).is_own


def test_a_rank_is_delivered_one_chunk() -> None:
    with pytest.raises(InvariantError, match=r"T1: the ranks deliver to \(2, 2, 2\)"):
        bound("deliver", J).at({"j": 2, PLACE.name: 0})


def requests(sources: tuple[int, ...]) -> dict[int, CollectiveRequest]:
    found: dict[int, CollectiveRequest] = {}
    for place, rank in enumerate((5, 3, 4)):
        src = torch.full((place + 1,), float(rank))
        own = sources[place] == place
        out = src if own else torch.empty(sources[place] + 1)
        transfer = Transfer(place, sources)
        found[rank] = CollectiveRequest(
            0, "fetch", (5, 3, 4), src, out, None, "a test", transfer=transfer
        )
    return found


def test_blocks_of_any_size_arrive_and_own_ones_stay() -> None:
    posted = requests((1, 1, 0))
    assert [posted[rank].bytes for rank in (5, 3, 4)] == [4, 8, 0]
    perform(posted)
    assert [posted[rank].out.tolist() for rank in (5, 3, 4)] == [[3.0, 3.0], [3.0, 3.0], [5.0]]
    assert posted[3].out is posted[3].src
    assert all(moves_nothing(request) for request in requests((0, 1, 2)).values())
    assert not any(moves_nothing(request) for request in posted.values())


def test_ranks_that_expect_different_senders_are_told() -> None:
    posted = requests((1, 1, 0))
    posted[4] = requests((1, 2, 0))[4]
    with pytest.raises(CommunicationError, match="disagree on the senders"):
        perform(posted)


def test_requests_that_nobody_could_run() -> None:
    src, out = torch.ones(2), torch.ones(2)
    nobody = CollectiveRequest(0, "fetch", (0, 1), src, out, None, "a test")
    with pytest.raises(InvariantError, match="nobody says who sends to whom"):
        check_request(nobody)
    copied = CollectiveRequest(
        0, "deliver", (0, 1), src, out, None, "a test", transfer=Transfer(0, (0, 1))
    )
    with pytest.raises(InvariantError, match="the rank's own chunk is copied"):
        check_request(copied)
