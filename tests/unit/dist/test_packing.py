"""Parts of tensors that are no single piece of memory, moved between simulated ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

from meshfuse.base.errors import CommunicationError, InvariantError
from meshfuse.dist.collectives import CollectiveBackend, CollectiveRequest, post
from meshfuse.dist.packing import Blocks, Packing, Region, places_of
from meshfuse.dist.simulated import SimulatedTransport, perform
from meshfuse.ir.mesh import make_mesh
from moved_cases import CPU, Moved, along_one_axis, exchanges, mesh_of, on_two_axes

CASES = [
    *along_one_axis(mesh_of(0, 1)),
    *along_one_axis(mesh_of(2, 0, 1)),
    *exchanges(mesh_of(0, 1), mesh_of(0, 1)),
    *exchanges(mesh_of(0, 1), mesh_of(1, 2)),
    *exchanges(mesh_of(0), mesh_of(0, 1, 2)),
    *exchanges(mesh_of(0, 1, 2), mesh_of(1)),
    *exchanges(mesh_of(0, 1), mesh_of(3, 2)),
    *on_two_axes(make_mesh([[0, 1, 2], [3, 4, 5]])),
    *on_two_axes(make_mesh([[5, 4], [1, 0], [2, 3]])),
]


def by_team(case: Moved) -> list[dict[int, CollectiveRequest]]:
    """The requests of all ranks, by the teams that they make."""
    teams: dict[tuple[int, ...], dict[int, CollectiveRequest]] = {}
    for rank in case.ranks:
        request = case.request(rank)
        teams.setdefault(request.team, {})[rank] = request
    return list(teams.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} over {case.src.mesh}")
def test_every_rank_gets_its_part(case: Moved) -> None:
    for dtype in (torch.float32, torch.bool, torch.bfloat16):
        if dtype == torch.bool and case.function == "sum":
            continue
        typed = replace(case, dtype=dtype)
        transport = SimulatedTransport()
        requests = [(rank, r) for team in by_team(typed) for rank, r in team.items()]
        for rank, request in requests:
            transport.post(rank, request)
        for rank, request in requests:
            transport.wait(rank, request.number)
            if rank in (typed.out.mesh.ids if typed.out.mesh else ()):
                assert torch.equal(request.out, typed.wanted(rank))
        assert transport.unfinished() == ()


def test_straight_parts_that_a_call_makes_uneven_are_packed() -> None:
    by_name = {case.name: case for case in along_one_axis(mesh_of(0, 1))}
    case = replace(by_name["gather uneven axis 0"], packed=False)
    assert case.request(0).packing is not None
    assert by_name["straight gather block axis 0"].request(0).packing is None


def test_teams_of_an_exchange_are_those_who_exchange() -> None:
    rows_to_rows = exchanges(mesh_of(0, 1), mesh_of(0, 1))[2]
    assert [rows_to_rows.request(rank).team for rank in (0, 1)] == [(0,), (1,)]
    handed_over = exchanges(mesh_of(0, 1), mesh_of(3, 2))[2]
    assert {rank: handed_over.request(rank).team for rank in (0, 1, 2, 3)} == {
        0: (0, 3),
        3: (0, 3),
        1: (1, 2),
        2: (1, 2),
    }


def test_whole_pieces_are_sent_and_received_where_they_lie() -> None:
    case = exchanges(mesh_of(0, 1), mesh_of(3, 2))[2]
    sender, receiver = case.request(0), case.request(3)
    assert sender.wire().send.data_ptr() == sender.src.data_ptr()
    assert receiver.wire().receive.data_ptr() == receiver.out.data_ptr()
    gather = replace(along_one_axis(mesh_of(0, 1))[0], packed=True).request(0)
    assert gather.wire().send.data_ptr() == gather.src.data_ptr()
    assert gather.wire().receive.data_ptr() == gather.out.data_ptr()


def test_transport_is_as_strict_with_packed_requests() -> None:
    case = exchanges(mesh_of(0, 1), mesh_of(0, 1))[0]
    transport = SimulatedTransport()
    requests = {rank: case.request(rank) for rank in (0, 1)}
    transport.post(0, requests[0])
    assert requests[0].out.isnan().all(), "poisoned until the wait, what the rank keeps, too"
    transport.post(1, requests[1])
    requests[1].src.fill_(7)
    with pytest.raises(CommunicationError, match="rank 1 changed its send buffer"):
        transport.wait(0, 4)


def test_ranks_that_disagree_in_an_exchange_are_named() -> None:
    case = exchanges(mesh_of(0, 1), mesh_of(0, 1))[0]
    other = replace(case, sizes=(case.sizes[0] - 1, case.sizes[1]))
    with pytest.raises(
        CommunicationError, match="0 and 1 disagree on the elements received: 6 and 3"
    ):
        perform({0: case.request(0), 1: other.request(1)})


def test_packings_that_fit_nothing() -> None:
    request = along_one_axis(mesh_of(0, 1))[0].request(0)
    with pytest.raises(
        InvariantError, match=r"src has shape \(3, 5\), its packing is for \(2, 5\)"
    ):
        perform({0: request, 1: replace(request, src=torch.ones(3, 5))})
    with pytest.raises(InvariantError, match="an exchange needs a packing"):
        perform({0: replace(request, collective="exchange", packing=None, team=(0,))})
    with pytest.raises(InvariantError, match="packs 1 blocks into 2 over 3 ranks"):
        perform({rank: replace(request, team=(0, 1, 2)) for rank in range(3)})


@pytest.mark.parametrize(
    ("part", "whole", "places"),
    [
        ((range(4, 6),), (range(8),), (range(4, 6),)),
        ((range(1, 8, 2),), (range(8),), (range(1, 8, 2),)),
        ((range(2, 8, 4),), (range(0, 8, 2),), (range(1, 4, 2),)),
        ((range(2), range(4, 6)), (range(2), range(4, 6)), (range(4),)),
        ((range(5, 6), range(12, 14)), (range(4, 6), range(12, 16)), (range(1, 4),)),
        ((range(1, 14, 4),), (range(2), range(4, 6), range(8, 14)), (1, 3, 5, 9)),
        ((), (range(3),), ()),
    ],
)
def test_places_of_a_part(
    part: tuple[range, ...], whole: tuple[range, ...], places: tuple[range | int, ...]
) -> None:
    found = places_of(part, whole)
    flat = [place for run in found for place in run]
    assert flat == [p for place in places for p in ([place] if isinstance(place, int) else place)]
    if len(places) == 1:
        assert len(found) == 1


def test_what_a_rank_lacks_has_no_place() -> None:
    for part, whole in (
        ((range(3, 5),), (range(4),)),
        ((range(3),), (range(0, 8, 2),)),
        ((range(1, 3),), (range(2), range(4, 6))),
        ((range(0, 9, 3),), (range(2), range(4, 6))),
    ):
        with pytest.raises(InvariantError, match="is to move indices"):
            places_of(part, whole)


def test_regions_of_several_lists() -> None:
    tensor = torch.arange(60).view(5, 4, 3)
    odd = (range(1), range(2, 3), range(4, 5))
    region = Region((odd, (range(1, 3),), (range(1), range(2, 3))), CPU)
    assert region.shape == (3, 2, 2)
    assert torch.equal(region.read(tensor), tensor[::2, 1:3, ::2])
    out = torch.zeros_like(tensor)
    region.write(out, region.read(tensor))
    assert torch.equal(out[::2, 1:3, ::2], tensor[::2, 1:3, ::2])
    assert out.count_nonzero() == tensor[::2, 1:3, ::2].count_nonzero()


def test_padding_is_not_unpacked() -> None:
    region = Region(((range(2),),), CPU)
    blocks = Blocks((2,), (0,), (region,), (3,))
    out = torch.zeros(2)
    blocks.unpack(torch.tensor([1.0, 2.0, 9.0]), out)
    assert out.tolist() == [1, 2]
    assert blocks.memory_in(out) is None
    assert blocks.pack(out).numel() == 3


def rows_of(*counts: int, length: int) -> Blocks:
    """Blocks of rows of two elements, one behind the other, each in so many elements."""
    starts = [sum(counts[:k]) for k in range(len(counts))]
    regions = tuple(
        Region(((range(start, start + count),) if count else (), (range(2),)), CPU)
        for start, count in zip(starts, counts, strict=True)
    )
    return Blocks((sum(counts), 2), (0, 1), regions, (length,) * len(counts))


@pytest.mark.parametrize(
    ("counts", "is_one_piece"),
    [((3, 2), True), ((3, 3), True), ((3, 0), True), ((3, 1, 0), True), ((2, 3), False)],
)
def test_padding_at_the_end_may_lie_behind_a_tensor(
    counts: tuple[int, ...], is_one_piece: bool
) -> None:
    """Where padding is between blocks, no room helps."""
    blocks, rows = rows_of(*counts, length=6), sum(counts)
    assert blocks.padding == 6 * len(counts) - 2 * rows
    memory = torch.arange(6.0 * len(counts))
    tensor = memory.as_strided((rows, 2), (2, 1))
    assert blocks.padding_behind(tensor) == (blocks.padding if is_one_piece else None)
    for room in range(blocks.padding + 1):
        found = blocks.memory_in(tensor, room)
        assert (found is not None) == (is_one_piece and room == blocks.padding)
        if found is not None:
            assert torch.equal(found, memory)
    packed = blocks.pack(tensor)
    assert packed.numel() == 6 * len(counts)
    assert (packed.data_ptr() == memory.data_ptr()) == is_one_piece
    out = torch.zeros(rows, 2)
    blocks.unpack(packed, out)
    assert torch.equal(out, tensor)


def test_a_part_of_a_tensor_is_not_it_and_its_padding() -> None:
    tensor = torch.arange(10.0).view(5, 2)
    for rows, padding in ((range(5), 2), (range(4), None), (range(1, 5), None)):
        region = Region(((rows,), (range(2),)), CPU)
        assert Blocks((5, 2), (0, 1), (region,), (12,)).padding_behind(tensor) == padding
    nothing = Region(((), (range(2),)), CPU)
    assert Blocks((0, 2), (0, 1), (nothing,), (12,)).padding_behind(tensor[:0]) == 12


def test_memory_without_room_is_left_alone() -> None:
    """A tensor at the end of its memory, one that begins in the middle, and one that others follow:
    what is received may come behind it only where that is said."""
    blocks = rows_of(3, 1, length=6)
    for memory, start in ((torch.zeros(8), 0), (torch.zeros(20), 12)):
        tensor = memory.as_strided((4, 2), (2, 1), start)
        packed = blocks.pack(tensor)
        assert packed.numel() == 12 and packed.data_ptr() != tensor.data_ptr()
    followed = torch.zeros(20).as_strided((4, 2), (2, 1))
    assert blocks.memory_in(followed) is None
    assert Packing(blocks, blocks).received_in(followed) is None
    assert Packing(blocks, blocks, has_room=True).received_in(followed) is not None


class AtOnce:
    """A backend that is done when it returns, as NCCL on the current stream: it gives no work."""

    def __init__(self, blocks: list[torch.Tensor]) -> None:
        self.blocks = blocks

    def _allgather_base(self, out: torch.Tensor, src: torch.Tensor) -> None:
        out.copy_(torch.cat(self.blocks))


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_are_put_in_their_place_where_there_is_no_work_to_wait_for(rank: int) -> None:
    by_name = {case.name: case for case in along_one_axis(mesh_of(0, 1))}
    case = by_name["gather uneven axis 0"]
    backend = AtOnce([case.request(other).wire().send for other in (0, 1)])
    request = replace(case.request(rank), at_once=True)
    posting = post(cast(CollectiveBackend, backend), request)
    assert posting.work is None and posting.steps == ()
    assert torch.equal(request.out, case.wanted(rank))
