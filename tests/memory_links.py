"""Ranks as threads of one process: the flags and windows of arenas in ordinary memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from threading import Barrier, Condition, Thread

import torch

from meshfuse.dist.arena import Arena

SECONDS = 20.0
"""A deadlock ends here."""


LATE = 0.01
"""Seconds, at most."""


class World:
    """The flags and windows of all ranks. `is_late`: flags that stand beside a graph's course come
    some time, whatever is done meanwhile."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.is_late = False
        self.late: list[Thread] = []
        self.errors: list[BaseException] = []
        self.changed = Condition()
        self.flags: dict[tuple[int, int], int] = {}
        self.meeting = Barrier(ranks)
        self.windows: dict[int, list[torch.Tensor]] = {}

    def run(self, work: Callable[[Arena], None], most_slots: int = 64) -> None:
        errors = self.errors

        def rank(place: int) -> None:
            try:
                work(Arena(place, self.ranks, MemoryLink(self, place), most_slots))
            except BaseException as error:  # noqa: BLE001 - raised again by the test's thread
                errors.append(error)
                self.meeting.abort()

        threads = [Thread(target=rank, args=(k,), daemon=True) for k in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a rank waits for ever"
        for thread in self.late:
            thread.join(SECONDS)
        if errors:
            raise errors[0]


class MemoryWindow:
    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts = parts

    def part(self, place: int, start: int, length: int) -> torch.Tensor:
        return self.parts[place][start : start + length]


class MemoryLink:
    """A rank whose host does at once what a stream would do. Flags wait in a queue: nobody sees or
    awaits them before they are flushed."""

    def __init__(self, world: World, place: int) -> None:
        self.world = world
        self.place = place
        self.opened = 0
        self.queue: list[tuple[int | None, int, int]] = []
        self.log: list[tuple[int | None, int, int]] | None = None  # of what is recorded
        self.done: list[tuple[int | None, int, int]] = []
        self.beside: list[tuple[int | None, int, int]] = []  # of these, what nothing need wait for

    def open_window(self, size: int) -> MemoryWindow:
        if self.place == 0:
            parts = [torch.zeros(size, dtype=torch.uint8) for _ in range(self.world.ranks)]
            self.world.windows[self.opened] = parts
        self.world.meeting.wait(SECONDS)
        window = MemoryWindow(self.world.windows[self.opened])
        self.opened += 1
        assert {len(part) for part in window.parts} == {size}
        return window

    def raise_flag(self, place: int, flag: int, value: int) -> None:
        self.queue.append((place, flag, value))

    def await_flag(self, flag: int, value: int) -> None:
        self.queue.append((None, flag, value))

    def flush(self, *, is_beside: bool = False) -> None:
        queue, self.queue = self.queue, []
        if self.log is not None:
            self.log += queue
            return
        if is_beside and self.world.is_late and all(place is not None for place, _, _ in queue):
            thread = Thread(target=self._raise_late, args=(queue,), daemon=True)
            self.world.late.append(thread)
            thread.start()
            return
        self.done += queue
        self.beside += queue if is_beside else []
        for place, flag, value in queue:
            if place is None:
                self._await(flag, value)
            else:
                self._raise(place, flag, value)

    def _raise_late(self, queue: list[tuple[int, int, int]]) -> None:
        time.sleep(random.random() * LATE)
        try:
            for place, flag, value in queue:
                self._raise(place, flag, value)
        except AssertionError as error:
            self.world.errors.append(error)

    def forget(self) -> None:
        self.queue.clear()

    def release(self, flags: int, value: int) -> None:
        for flag in range(flags):
            self._raise(self.place, flag, value)

    def _raise(self, place: int, flag: int, value: int) -> None:
        with self.world.changed:
            assert self.world.flags.get((place, flag), 0) < value
            self.world.flags[place, flag] = value
            self.world.changed.notify_all()

    def _await(self, flag: int, value: int) -> None:
        with self.world.changed:
            there = self.world.changed.wait_for(
                lambda: self.world.flags.get((self.place, flag), 0) >= value, SECONDS
            )
        assert there, f"rank {self.place} waits for {value} in flag {flag}"

    def settle(self) -> None:
        pass

    def stream(self) -> int:
        return 0

    def follow(self, stream: int) -> None:
        raise AssertionError("there is one stream")
