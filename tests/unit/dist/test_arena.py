"""Arenas: ranks as threads over one memory, at random speeds, read what was meant for them."""

# What an arena has of a use is looked at, to go through it without the arena.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
import time
from threading import Thread

import pytest
import torch

from memory_links import SECONDS, MemoryLink, World
from meshfuse.base.errors import InvariantError
from meshfuse.dist.arena import FIRST_SLOTS, Arena, Course, Use, slot_bytes


def write(arena: Arena, use: Use, length: int, value: int) -> None:
    arena.hold(use, (length,), (1,), torch.int32).fill_(value)


def dawdle(draw: random.Random) -> None:
    if draw.random() < 0.3:
        time.sleep(draw.random() / 500)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_chunks_are_delivered_in_turn(ranks: int) -> None:
    sizes = [random.Random(1).choice([1, 10, 1000, 300_000, 700_000]) for _ in range(60)]

    def work(arena: Arena) -> None:
        draw = random.Random(arena.place)
        for n, size in enumerate(sizes):
            step = 1 + n % (ranks - 1)
            use = arena.take(4 * size)
            dawdle(draw)
            write(arena, use, size, 1000 * n + arena.place)
            arena.publish(use, ((arena.place + step) % ranks,))
            dawdle(draw)
            source = (arena.place - step) % ranks
            out = torch.empty(size, dtype=torch.int32)
            arena.pull(use, source, out)
            assert torch.equal(out, torch.full_like(out, 1000 * n + source))

    World(ranks).run(work)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_published_chunks_stay_while_they_are_pinned(ranks: int) -> None:
    """More others than there are slots come between the publication and its last reader."""

    def work(arena: Arena) -> None:
        draw = random.Random(arena.place)
        for n in range(10):
            kept = arena.take(400, pins=1)
            write(arena, kept, 100, 7000 + 10 * n + arena.place)
            others = tuple(k for k in range(ranks) if k != arena.place)
            arena.publish(kept, others)
            for k in range(2 * FIRST_SLOTS):
                use = arena.take(40)
                dawdle(draw)
                write(arena, use, 10, k)
                arena.publish(use, ((arena.place + 1) % ranks,))
                out = torch.empty(10, dtype=torch.int32)
                arena.pull(use, (arena.place - 1) % ranks, out)
                assert torch.equal(out, torch.full_like(out, k))
            for other in others:
                dawdle(draw)
                out = torch.empty(100, dtype=torch.int32)
                arena.pull(kept, other, out)
                assert torch.equal(out, torch.full_like(out, 7000 + 10 * n + other))
            kept.pins = 0

    World(ranks).run(work)


def test_slots_are_added_while_all_are_pinned() -> None:
    def work(arena: Arena) -> None:
        other = 1 - arena.place
        uses = [arena.take(400, pins=1) for _ in range(3 * FIRST_SLOTS)]
        for n, use in enumerate(uses):
            write(arena, use, 100, 2 * n + arena.place)
            arena.publish(use, (other,))
        for n, use in reversed(list(enumerate(uses))):
            out = torch.empty(100, dtype=torch.int32)
            arena.pull(use, other, out)
            assert torch.equal(out, torch.full_like(out, 2 * n + other))

    World(2).run(work)


def test_what_lasts_leaves_as_many_slots_to_others() -> None:
    """Chunks that come and go take turns on them, and wait for their readers no sooner; and when it
    is over, there is room for what lasts next."""

    def work(arena: Arena) -> None:
        assert isinstance(arena.link, MemoryLink)
        for _ in range(5):
            lasting = [arena.take(40, pins=1, lasts=True) for _ in range(3)]
            others = [arena.take(40).slot for _ in range(3 * FIRST_SLOTS)]
            turn = others[:FIRST_SLOTS]
            assert others == turn * 3
            assert len({*turn, *(use.slot for use in lasting)}) == FIRST_SLOTS + 3
            assert arena.link.opened == 3
            for use in lasting:
                use.pins = 0

    World(1).run(work)


def test_no_more_slots_than_flags() -> None:
    def work(arena: Arena) -> None:
        with pytest.raises(MemoryError, match="8 chunks of 400 bytes are under way at once"):
            for _ in range(FIRST_SLOTS + 1):
                arena.take(400, pins=1)

    World(2).run(work, most_slots=FIRST_SLOTS)


def test_windows_are_opened_for_few_sizes() -> None:
    assert slot_bytes(0) == slot_bytes(1) == slot_bytes(1 << 20) == 1 << 20
    for wanted in (*range(1, 1 << 24, 9973), (1 << 30) + 1):
        size = slot_bytes(wanted)
        assert wanted <= size <= max(1 << 20, wanted * 5 // 4 + 1)
    assert len({slot_bytes(wanted) for wanted in range(1 << 20, 1 << 24, 997)}) == 17

    def work(arena: Arena) -> None:
        link = arena.link
        assert isinstance(link, MemoryLink)
        for size in (1000, 3 << 20, 900, 3 << 20, 1 << 20):
            arena.take(size)
        assert link.opened == 2

    World(2).run(work)


def test_what_is_held_is_found_until_its_slot_is_taken() -> None:
    def work(arena: Arena) -> None:
        use = arena.take(24)
        held = arena.hold(use, (2, 3), (1, 2), torch.int32)
        assert held.shape == (2, 3) and held.stride() == (1, 2)
        assert arena.find(held) is use
        assert arena.find(held.clone()) is None and arena.find(held.view(2, 3)) is None
        for _ in range(FIRST_SLOTS):
            arena.take(24)
        assert arena.find(held) is None

    World(1).run(work)


def test_release_lets_those_go_on_who_wait() -> None:
    def work(arena: Arena) -> None:
        use = arena.take(40)
        if arena.place == 0:
            out = torch.empty(10, dtype=torch.int32)
            waiting = Thread(target=arena.pull, args=(use, 1, out))
            waiting.start()
            arena.release()
            waiting.join(SECONDS)
            assert not waiting.is_alive()

    World(2).run(work)


# Calls that are recorded, and made again.


class OneCall:
    """A call of one rank: `chunks` of ten numbers, all under way at once, each delivered to another
    peer. What was recorded is gone through flag by flag, with what lies between them."""

    def __init__(self, arena: Arena, chunks: int) -> None:
        assert isinstance(arena.link, MemoryLink)
        self.arena, self.link, self.chunks = arena, arena.link, chunks
        self.written: list[torch.Tensor] = []
        self.read: list[torch.Tensor] = []
        self.log: list[tuple[int | None, int, int]] = []

    def record(self) -> OneCall:
        before = self.arena.state()
        self.link.log, self.course = self.log, Course(self.arena)
        self.make([0] * self.chunks)
        self.link.log = None
        self.course.end()
        assert self.arena.state() == before
        self.sources = [self.course.source(value) for _, _, value in self.log]
        return self

    def step(self, chunk: int) -> int:
        return 1 + chunk % (self.arena.ranks - 1)

    def make(self, values: list[int]) -> list[torch.Tensor]:
        """The call as the arena makes it."""
        arena, ranks = self.arena, self.arena.ranks
        uses = [arena.take(40, pins=1) for _ in values]
        for k, (use, value) in enumerate(zip(uses, values, strict=True)):
            memory = arena.hold(use, (10,), (1,), torch.int32)
            if self.link.log is None:
                memory.fill_(value)
            self.written.append(memory)
            arena.publish(use, ((arena.place + self.step(k)) % ranks,))
        found = [torch.empty(10, dtype=torch.int32) for _ in values]
        for k, use in enumerate(uses):
            use.pins, owner = 0, (arena.place - self.step(k)) % ranks
            self.read.append(arena._memory(use, owner, (10,), (1,), torch.int32))
            arena.pull(use, owner, found[k])
        arena.flush()
        return found

    def repeat(self, values: list[int]) -> list[torch.Tensor]:
        """The call again, without the arena."""
        found: list[torch.Tensor] = []
        to_write = iter(zip(self.written, values, strict=False))
        to_read = iter(self.read)
        numbers = self.course.repeat(self.sources)
        for (place, flag, _), number in zip(self.log, numbers, strict=True):
            is_ready = flag // self.arena.ranks % 2 == 0
            if place is not None:
                if is_ready:
                    memory, value = next(to_write)
                    memory.fill_(value)
                self.link._raise(place, flag, number)
            else:
                self.link._await(flag, number)
                if is_ready:
                    found.append(next(to_read).clone())
        return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_is_recorded_is_made_again_beside_peers_who_do_not(ranks: int) -> None:
    """Each rank decides by itself: peers see no difference."""
    repeated = [0] * ranks

    def work(arena: Arena) -> None:
        together, own = random.Random(5), random.Random(arena.place)
        calls: dict[object, OneCall] = {}
        arena.take(40)  # the window is opened by all, which nothing recorded can
        for n in range(300):
            chunks = together.choice([1, 1, 2, 3])
            values = [1000 * n + 10 * k + arena.place for k in range(chunks)]
            key = (chunks, arena.state())
            if key not in calls and own.random() < 0.5:
                calls[key] = OneCall(arena, chunks).record()
            call = calls.get(key)
            dawdle(own)
            if call is None or own.random() < 0.2:
                found = OneCall(arena, chunks).make(values)
            else:
                found = call.repeat(values)
                repeated[arena.place] += 1
            for k, out in enumerate(found):
                source = (arena.place - 1 - k % (ranks - 1)) % ranks
                assert torch.equal(out, torch.full_like(out, 1000 * n + 10 * k + source))

    World(ranks).run(work)
    assert min(repeated) > 100


def test_a_recording_leaves_the_arena_as_it_was() -> None:
    def work(arena: Arena) -> None:
        uses = [arena.take(40) for _ in range(3)]
        before = arena.state()
        course = Course(arena)
        arena.take(40, pins=1)
        with pytest.raises(InvariantError, match="before all have come"):
            course.end()
        course.undo()
        assert arena.state() == before
        assert arena.take(40).number == uses[-1].number + 1
        assert arena.state() != before

    World(1).run(work)


def test_a_recording_that_fails_raises_no_flags() -> None:
    """Readers would take the slot's old bytes for what the next use writes, which has the number of
    the one that never was."""

    def work(arena: Arena) -> None:
        assert isinstance(arena.link, MemoryLink)
        arena.take(40)
        if arena.place == 0:
            course = Course(arena)
            arena.link.log = []
            arena.publish(arena.take(40), (1,))
            arena.link.log = None
            course.undo()
        use = arena.take(40)
        arena.flush()
        if arena.place == 0:
            assert not arena.link.world.flags
            arena.hold(use, (10,), (1,), torch.int32).fill_(7)
            arena.publish(use, (1,))
            arena.flush()
        else:
            found = torch.empty(10, dtype=torch.int32)
            arena.pull(use, 0, found)
            assert torch.equal(found, torch.full_like(found, 7))

    World(2).run(work)
