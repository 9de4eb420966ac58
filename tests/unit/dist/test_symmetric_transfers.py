"""Fetches through symmetric memory, by ranks that are threads: what is published, and when."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from itertools import permutations

import pytest
import torch

from memory_links import MemoryLink, World
from meshfuse.dist.arena import FIRST_SLOTS, Arena
from meshfuse.dist.collectives import Transfer
from meshfuse.dist.kept_memory import KeptMemory
from meshfuse.dist.symmetric import SymmetricTransport
from peers_in_threads import transport_over


@pytest.fixture(autouse=True)
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def fetch(
    transport: SymmetricTransport, sources: tuple[int, ...], src: torch.Tensor, number: int = 1
) -> torch.Tensor:
    transfer = Transfer(transport._arena.place, sources, src.nbytes, (number,))
    out = src if transfer.is_own else torch.zeros_like(src)
    transport.bind("fetch", transfer)(out, src)
    return out


def rotations(ranks: int, steps: list[int]) -> list[tuple[int, ...]]:
    return [tuple((place + step) % ranks for place in range(ranks)) for step in steps]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_blocks_are_fetched_in_any_order(ranks: int) -> None:
    """Own blocks first, in the middle or last; or one rank's after another's; of two chunks."""
    orders = [rotations(ranks, list(steps)) for steps in permutations(range(ranks))]
    orders.append([(k,) * ranks for k in range(ranks)])

    def work(arena: Arena) -> None:
        transport, draw = transport_over(arena), random.Random(3)
        for n in range(60):
            order = draw.choice(orders)
            chunks = [torch.full((5,), 1000 * n + 10 * k + arena.place) for k in range(2)]
            for sources in order:
                for k, src in enumerate(chunks):
                    found = fetch(transport, sources, src, k)
                    wanted = 1000 * n + 10 * k + sources[arena.place]
                    assert torch.equal(found, torch.full((5,), wanted))
            assert not transport._sources

    World(ranks).run(work)


@pytest.mark.parametrize("is_kept", [True, False])
def test_nothing_that_lies_there_is_published_before_something_moves(is_kept: bool) -> None:
    """What is made of the own block comes behind the request for it on a stream. It must not wait
    for peers; but it does for a copy."""

    def work(arena: Arena) -> None:
        transport, link = transport_over(arena), arena.link
        assert isinstance(link, MemoryLink)
        src = torch.full((5,), arena.place)
        if is_kept:
            window = arena.link.open_window(src.nbytes)
            src = window.part(arena.place, 0, src.nbytes).view(torch.int64).copy_(src)
            memory = KeptMemory((0, 1, 2), 0, window, src.data_ptr(), src.nbytes)
            transport.kept.add(memory)
        own, *others = rotations(3, [0, 1, 2])
        assert fetch(transport, own, src) is src
        with link.world.changed:
            raised = {flag % 3 for _, flag in link.world.flags}  # by whom
        assert (arena.place in raised) != is_kept
        for sources in others:
            found = fetch(transport, sources, src)
            assert torch.equal(found, torch.full((5,), sources[arena.place]))

    World(3).run(work)


@pytest.mark.parametrize("collective", ["fetch", "deliver"])
def test_only_fetches_tell_their_owners_beside_what_comes_next(collective: str) -> None:
    """A product comes next, which waits for the block; behind a delivery comes a sum."""

    def work(arena: Arena) -> None:
        transport, link = transport_over(arena), arena.link
        assert isinstance(link, MemoryLink)
        src, owner = torch.full((5,), arena.place), 1 - arena.place
        transport.bind(collective, Transfer(arena.place, (1, 0), src.nbytes, (3,)))(
            src.clone(), src
        )
        arrived, told = link.done[-2:]
        assert (arrived[0], told[0]) == (None, owner)
        assert link.beside == [told] * (collective == "fetch")

    World(2).run(work)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_is_made_in_allocated_memory_is_not_copied(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order of requests; it is as it was made until it is given back, however many chunks
    are delivered meanwhile."""
    orders = [rotations(ranks, list(steps)) for steps in permutations(range(ranks))]
    orders.append([(k,) * ranks for k in range(ranks)])
    monkeypatch.delattr(SymmetricTransport, "_write")

    def deliver(transport: SymmetricTransport, value: int) -> None:
        arena = transport._arena
        src = transport.allocate((3,), (1,), torch.int64, 24).fill_(value + arena.place)
        source = (arena.place + 1) % ranks
        sources = tuple((k + 1) % ranks for k in range(ranks))
        out = torch.zeros_like(src)
        transport.bind("deliver", Transfer(arena.place, sources, src.nbytes, (7,)))(out, src)
        assert torch.equal(out, torch.full_like(out, value + source))

    def work(arena: Arena) -> None:
        transport, draw = transport_over(arena), random.Random(5)
        for n in range(60):
            lengths = [draw.choice([0, 1, 5]) for _ in range(ranks)]
            made = transport.allocate((lengths[arena.place],), (1,), torch.int64, 40, lasts=True)
            made.fill_(10 * n + arena.place)
            for sources in draw.choice(orders):
                deliver(transport, 1000 * n)
                transfer = Transfer(arena.place, sources, 40, (1,))
                owner = sources[arena.place]
                wanted = torch.full((lengths[owner],), 10 * n + owner)
                out = made if transfer.is_own else torch.zeros_like(wanted)
                transport.bind("fetch", transfer)(out, made)
                assert torch.equal(out, wanted)
            for _ in range(draw.choice([0, FIRST_SLOTS])):
                deliver(transport, 2000 * n)
            use = arena.find(made)
            assert use is not None and use.pins == 1
            assert torch.equal(made, torch.full_like(made, 10 * n + arena.place))
            transport.give_back(made)
            assert use.pins == 0 and not transport._sources

    World(ranks).run(work)
