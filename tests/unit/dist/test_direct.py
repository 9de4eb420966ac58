"""What a plan posts again and again, on tensors of this process in place of a GPU's."""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from alike_ranks import TEAM, Backend, Peers, peers_over, seem_to_be_on_a_stream
from meshfuse.base.errors import CommunicationError
from meshfuse.dist import collectives, deadlines, groups
from meshfuse.dist.bound_collectives import SizedCollective
from meshfuse.dist.collectives import CollectiveRequest, Transfer
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.direct import DirectCollective, DirectTransfer
from meshfuse.dist.packing import Holding, Packing, pack_gather, pack_scatter
from meshfuse.dist.transfers import SizedTransfer

CPU = torch.device("cpu")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    seem_to_be_on_a_stream(monkeypatch)
    return Backend()


def collective(
    peers: Peers, kind: str, function: str | None = None, order: tuple[int, ...] = (0, 1)
) -> DirectCollective:
    sized = SizedCollective(3, kind, TEAM, order, function, "a test", None, False, at_once=True)
    return DirectCollective(cast(Communicator, peers), sized)


def test_the_second_post_goes_to_the_backend(backend: Backend) -> None:
    peers = peers_over(backend)
    gather = collective(peers, "all_gather")
    for k in range(4):
        src, out = torch.full((2, 3), float(k)), torch.empty(4, 3)
        gather.post(src, out)
        gather.wait()
        assert torch.equal(out, src.repeat(2, 1))
    assert (peers.requests, peers.group.posted) == (1, 4)


def test_work_is_awaited_where_there_is_some(backend: Backend) -> None:
    backend.has_work = True
    gather = collective(peers_over(backend), "all_gather")
    for _ in range(3):
        gather.post(torch.ones(1, 2), torch.empty(2, 2))
        gather.wait()
    assert backend.log == ["gather 2", "wait"] * 3


@pytest.mark.parametrize("has_work", [False, True])
def test_what_streams_wait_for_is_noted(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, has_work: bool
) -> None:
    """Each post, the long way or not; at the wait, if there is one."""
    monkeypatch.setattr(deadlines, "mark_stream", lambda stream: lambda: False)
    backend.has_work, peers = has_work, peers_over(backend)
    gather = collective(peers, "all_gather")
    for _ in range(3):
        gather.perform(torch.ones(1, 2), torch.empty(2, 2))
    [lane] = peers.group._stream_watch.lanes.values()
    assert [sequence for sequence, _ in lane.noted] == [1, 2, 3]
    assert all(str(text).startswith("all_gather") for _, text in lane.noted)


def test_sums_are_of_the_source(backend: Backend) -> None:
    peers = peers_over(backend)
    reduce = collective(peers, "all_reduce", "sum")
    src = torch.arange(128.0 * 128).view(128, 128)  # smaller sums on CPUs are done here
    for _ in range(3):
        out = torch.empty(128, 128)
        reduce.post(src, out)
        assert torch.equal(out, 2 * src)
        in_place = src.clone()
        reduce.post(in_place, in_place)
        assert torch.equal(in_place, 2 * src)
    assert peers.requests == 1


PARTS = [Holding(((rows,), (range(2),))) for rows in (range(3), range(3, 5))]
"""Three rows and two, of two elements each."""
WHOLE = Holding(((range(5),), (range(2),)))


def uneven(rank: int) -> Packing:
    """Of an all-gather of these."""
    return replace(pack_gather(PARTS, rank, WHOLE, (0, 1), CPU), has_room=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_uneven_blocks_come_right_into_memory_with_room(backend: Backend, rank: int) -> None:
    """The backend's ranks have the same; what is shorter is packed, if no room lies behind it."""
    peers, rows = peers_over(backend), (3, 2)[rank]
    sized = SizedCollective(3, "all_gather", TEAM, (0, 1), None, "a test", uneven(rank), False)
    gather = DirectCollective(cast(Communicator, peers), sized)
    for k in range(4):
        room = 2 if k == 2 else 0
        src = torch.arange(2.0 * rows + room).as_strided((rows, 2), (2, 1)) + 10 * k
        memory = torch.full((12,), -1.0)
        out = memory.as_strided((5, 2), (2, 1))
        gather.post(src, out)
        gather.wait()
        assert torch.equal(memory[: 2 * rows], src.flatten())
        assert torch.equal(memory[6 : 6 + 2 * 2], src[:2].flatten())
    assert (peers.requests, backend.log) == (1, ["gather 6"] * 4)


def test_blocks_without_room_behind_the_result_are_unpacked(backend: Backend) -> None:
    packing, peers = replace(uneven(1), has_room=False), peers_over(backend)
    sized = SizedCollective(3, "all_gather", TEAM, (0, 1), None, "a test", packing, False)
    gather = DirectCollective(cast(Communicator, peers), sized)
    for value in range(4):
        src, out = torch.full((2, 2), float(value)), torch.full((5, 2), -1.0)
        gather.post(src, out)
        gather.wait()
        assert torch.equal(out[3:], src)
    assert (peers.requests, backend.log) == (1, ["gather 6"] * 4)


def layouts(shape: tuple[int, ...], room: int) -> dict[str, torch.Tensor]:
    """Equal tensors that lie differently in memory."""
    values = torch.arange(1.0, 1 + math.prod(shape)).view(shape)

    def within(before: int, behind: int) -> torch.Tensor:
        memory = torch.full((before + values.numel() + behind,), -7.0)
        return memory.as_strided(shape, values.stride(), before).copy_(values)

    return {
        "alone": values,
        "at the end": within(3, 0),
        "with little behind": within(1, max(room - 1, 0)),
        "with room": within(0, room),
        "in the middle": within(4, room + 5),
        "with gaps": torch.stack((values, -values), -1)[..., 0],
    }


TURNS = list(itertools.permutations(["alone", "at the end", "with room", "in the middle"], 3))


@pytest.mark.parametrize("turns", [*TURNS, ("with gaps", "with room", "with little behind")])
def test_sources_may_lie_otherwise_in_each_call(backend: Backend, turns: tuple[str, ...]) -> None:
    """Of the shorter block: whatever lies behind it, and whether the first one had room."""
    peers = peers_over(backend)
    sized = SizedCollective(3, "all_gather", TEAM, (0, 1), None, "a test", uneven(1), False)
    gather, found = DirectCollective(cast(Communicator, peers), sized), layouts((2, 2), 2)
    for turn in (*turns, *turns):
        memory = torch.full((12,), -1.0)
        gather.post(found[turn], memory.as_strided((5, 2), (2, 1)))
        gather.wait()
        assert torch.equal(memory[6:10], found["alone"].flatten())
    assert backend.log == ["gather 6"] * 6
    assert peers.requests == (1 if turns[0] != "with gaps" else 3)


def test_what_lies_as_it_is_sent_is_not_copied(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole block, and a shorter one with room behind it."""
    sent: list[int] = []
    monkeypatch.setattr(
        collectives,
        "start_of",
        lambda backend, request: lambda out, src: sent.append(src.data_ptr()),
    )
    peers = peers_over(backend)
    for rank in (0, 1):
        packing = uneven(rank)
        sized = SizedCollective(3, "all_gather", TEAM, (0, 1), None, "a test", packing, False)
        gather = DirectCollective(cast(Communicator, peers), sized)
        found = layouts(((3, 2)[rank], 2), 2)
        for turn in ("with room", "in the middle", "with room"):
            gather.post(found[turn], torch.empty(12).as_strided((5, 2), (2, 1)))
            assert sent.pop() == found[turn].data_ptr()
        gather.post(found["at the end"], torch.empty(12).as_strided((5, 2), (2, 1)))
        assert (sent.pop() == found["at the end"].data_ptr()) == (rank == 0)


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_scattered_may_lie_otherwise_in_each_call(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, rank: int, turns: tuple[str, ...]
) -> None:
    """Both ranks have the same terms, and the sum is there at once, as on the current stream."""

    def add_up(out: torch.Tensor, src: torch.Tensor) -> None:
        out.view(-1).copy_(2 * src.view(2, -1)[rank])

    monkeypatch.setattr(collectives, "start_of", lambda backend, request: add_up)
    peers = peers_over(backend)
    packing = replace(pack_scatter(PARTS, rank, WHOLE, (0, 1), CPU), has_room=True)
    sized = SizedCollective(3, "reduce_scatter", TEAM, (0, 1), "sum", "a test", packing, False)
    scatter, found = DirectCollective(cast(Communicator, peers), sized), layouts((5, 2), 2)
    rows = (slice(3), slice(3, 5))[rank]
    for turn in (*turns, *turns):
        out = torch.full((6,), -1.0).as_strided(((3, 2)[rank], 2), (2, 1))
        scatter.post(found[turn], out)
        scatter.wait()
        assert torch.equal(out, 2 * found["alone"][rows])
    assert peers.requests == 1


@pytest.mark.parametrize(
    ("leading", "rows", "length"),
    [((1,), 1, 2), ((), 1, 2), ((), 0, 2), ((1, 1), 2, 3), ((1,), 0, 1)],
)
def test_shorter_blocks_of_any_shape(
    backend: Backend, leading: tuple[int, ...], rows: int, length: int
) -> None:
    """Axes of one element before the one in blocks, and blocks of one row or none."""
    ones = [(range(1),) for _ in leading]
    parts = [
        Holding((*ones, (r,) if r else (), (range(3),)))
        for r in (range(length), range(length, length + rows))
    ]
    whole = Holding((*ones, (range(length + rows),), (range(3),)))
    order = tuple(range(len(leading) + 2))
    packing = replace(pack_gather(parts, 1, whole, order, CPU), has_room=True)
    peers = peers_over(backend)
    sized = SizedCollective(3, "all_gather", TEAM, order, None, "a test", packing, False)
    gather = DirectCollective(cast(Communicator, peers), sized)
    for src in layouts((*leading, rows, 3), 3 * (length - rows)).values():
        memory = torch.full((6 * length,), -1.0)
        gather.post(src, memory[: 3 * (length + rows)].view(*leading, length + rows, 3))
        gather.wait()
        assert torch.equal(memory[3 * length :][: 3 * rows], src.flatten())


@pytest.mark.parametrize("has_work", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("rows", "columns"), [(4, (3, 3)), (4, (3, 2)), (3, (3, 2)), (2, (3, 1)), (2, (2, 0))]
)
def test_columns_are_put_in_their_places(
    backend: Backend, rank: int, rows: int, columns: tuple[int, int], has_work: bool
) -> None:
    """What is received is not the result's memory; it is unpacked behind the collective. Blocks are
    lengthened by whole rows or by less."""
    backend.has_work, peers = has_work, peers_over(backend)
    first, second = columns
    parts = [
        Holding(((range(rows),), (c,) if c else ()))
        for c in (range(first), range(first, first + second))
    ]
    whole = Holding(((range(rows),), (range(first + second),)))
    packing = pack_gather(parts, rank, whole, (0, 1), CPU)
    sized = SizedCollective(3, "all_gather", TEAM, (0, 1), None, "a test", packing, False)
    gather = DirectCollective(cast(Communicator, peers), sized)
    for src in layouts((rows, columns[rank]), rows * (first - columns[rank])).values():
        out = torch.full((rows, first + second), -1.0)
        gather.post(src, out)
        gather.wait()
        assert torch.equal(out[:, first:], src.flatten()[: rows * second].view(rows, second))
        if columns[rank] == first:  # else there was padding in the other's block
            assert torch.equal(out[:, :first], src)
    assert peers.requests == 1 + (columns[rank] > 0)  # for the first, and for the one with gaps


@pytest.mark.parametrize("rows", [(2, 2), (3, 2)])
def test_blocks_in_another_memory_order_are_sent_where_they_lie(
    backend: Backend, rows: tuple[int, int]
) -> None:
    """Columns in blocks, where columns are slowest in memory."""
    peers, order, (first, second) = peers_over(backend), (1, 0), rows
    parts = [Holding(((range(4),), (c,))) for c in (range(first), range(first, first + second))]
    whole = Holding(((range(4),), (range(first + second),)))
    packing = None
    if first != second:
        packing = replace(pack_gather(parts, 1, whole, order, CPU), has_room=True)
    sized = SizedCollective(3, "all_gather", TEAM, order, None, "a test", packing, False)
    gather, found = DirectCollective(cast(Communicator, peers), sized), layouts((second, 4), 4)
    for turn in ("alone", "at the end", "with room", "in the middle"):
        memory = torch.full((2 * first, 4), -1.0)
        gather.post(found[turn].T, memory[: first + second].T)
        gather.wait()
        assert torch.equal(memory[first:][:second], found["alone"])
    assert peers.requests == 1
    src = found["alone"].T.contiguous()
    memory = torch.full((2 * first, 4), -1.0)
    gather.post(src, memory[: first + second].T)
    assert torch.equal(memory[first:][:second], src.T)
    assert peers.requests == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_memory_in_another_order_goes_the_long_way(
    backend: Backend, order: tuple[int, int]
) -> None:
    """As transposed in memory, or contiguous where transposed is wanted: it is copied."""
    peers = peers_over(backend)
    reduce = collective(peers, "all_reduce", "sum", order)
    whole = torch.arange(12.0).view(3, 4)
    for src in (whole, whole.T.contiguous().T, whole, whole[:, :2], whole[:, :1].expand(3, 4)):
        wanted = 2 * src
        out = torch.empty_strided(
            src.shape, (src.shape[1], 1) if order == (0, 1) else (1, src.shape[0])
        )
        reduce.post(src, out)
        assert torch.equal(out, wanted)


def test_an_error_of_the_backend_names_operation_and_ranks(backend: Backend) -> None:
    peers = peers_over(backend)
    gather = collective(peers, "all_gather")
    src, out = torch.ones(1, 2), torch.empty(2, 2)
    gather.post(src, out)
    backend.fails = True
    with pytest.raises(CommunicationError, match=r"all_gather number 3 over ranks \(0, 1\)"):
        gather.post(src, out)
    assert backend.log == ["gather 2", "abort"]
    with pytest.raises(CommunicationError, match="the group failed before"):
        gather.post(src, out)


class Memory:
    """In place of symmetric memory: the peer's chunk is the rank's own, negated."""

    def __init__(self) -> None:
        self.bound = 0

    def bind(self, kind: str, transfer: Transfer) -> Any:
        self.bound += 1

        def start(out: torch.Tensor, src: torch.Tensor) -> None:
            if not transfer.is_own:
                out.copy_(-src)

        return start

    def post(self, request: CollectiveRequest) -> Any:
        assert request.transfer is not None
        self.bind(request.collective, request.transfer)(request.out, request.src)
        return groups.Posting(request)


@pytest.mark.parametrize("sources", [(0, 1), (1, 0)])
def test_transfers_are_bound_once(backend: Backend, sources: tuple[int, int]) -> None:
    peers, memory = peers_over(backend), Memory()
    peers.group.transport = cast(Any, memory)
    sized = SizedTransfer(4, "fetch", TEAM, Transfer(0, sources), (2, 2), (0, 1), (2, 1), "a test")
    fetch, into = DirectTransfer(cast(Communicator, peers), sized), torch.empty(2, 2)
    for k in range(3):
        src = torch.full((2, 2), float(k))
        found = fetch.post(src, into if k == 1 else None)
        fetch.wait()
        if sources == (0, 1):
            assert found is src
        else:
            assert torch.equal(found, -src)
            assert (found is into) == (k == 1)
    assert (peers.requests, memory.bound, peers.group.posted) == (1, 2, 3)
