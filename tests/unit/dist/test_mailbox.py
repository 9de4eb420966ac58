"""Mailboxes, without processes: threads that stand for ranks, and files that are not what they
should be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from threading import Barrier, get_ident
from typing import TypeVar

import pytest

from meshfuse.dist import mailbox
from meshfuse.dist.board import identify_process
from meshfuse.dist.deadlines import Polled, poll
from meshfuse.dist.mailbox import MOST_NUMBERS, Mail, Mailbox, join_mailbox

T = TypeVar("T")
SECONDS = 20.0


def make_memory(ranks: int) -> bytearray:
    return bytearray(1024 * ranks)


def at_once(work: Callable[[int], T], ranks: int) -> list[T]:
    """What each rank returns."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))


def say(rank: int, sequence: int) -> list[int]:
    """What a rank says in a collective: no two say the same. At times as much as fits."""
    count = (1, 2, 5, MOST_NUMBERS)[sequence % 7 % 4]
    return [(-1) ** k * (sequence << 24 | rank << 16 | k) for k in range(count)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_nothing_is_mixed_up_whoever_is_late(ranks: int) -> None:
    memory = make_memory(ranks)

    def run(rank: int) -> int:
        box, chance, wrong = Mailbox(memory, rank, ranks), Random(rank), 0
        for sequence in range(1, 1500):
            if chance.random() < 0.02:
                time.sleep(chance.random() / 500)
            mail = box.send(sequence, say(rank, sequence))
            assert poll(mail.is_completed, SECONDS)
            wrong += mail.read() != [say(other, sequence) for other in range(ranks)]
        return wrong

    assert at_once(run, ranks) == [0] * ranks


def test_numbers_may_be_left_out() -> None:
    """Other collectives of the group have those: between two of one parity, all ranks met."""
    memory = make_memory(2)
    boxes = [Mailbox(memory, rank, 2) for rank in range(2)]
    for sequence in (1, 3, 4, 6, 1 << 40):
        mails = [box.send(sequence, [sequence, rank]) for rank, box in enumerate(boxes)]
        for mail in mails:
            assert mail.is_completed()
            assert mail.read() == [[sequence, 0], [sequence, 1]]


def test_the_numbers_of_a_peer_that_is_one_ahead_are_still_there() -> None:
    memory = make_memory(2)
    fast, slow = (Mailbox(memory, rank, 2) for rank in range(2))
    fast.send(1, [10])
    mail = slow.send(1, [20])
    fast.send(2, [11])
    assert mail.is_completed() and mail.read() == [[10], [20]]
    later = slow.send(2, [21])
    assert later.is_completed() and later.read() == [[11], [21]]


@pytest.mark.parametrize("torn", range(mailbox._HEAD_WORDS + 3))
def test_what_is_half_written_is_not_read(torn: int) -> None:
    """Words of a slot may be seen in any order: each in turn is the last to be seen."""
    memory = make_memory(2)
    words = memoryview(memory).cast("Q")
    writer, reader = Mailbox(memory, 0, 2), Mailbox(memory, 1, 2)
    writer.send(2, [3, 5])
    before = list(words)
    writer.send(4, [7, 6, 1])
    seen = words[torn]
    assert reader.read(0, 4) == [7, 6, 1]
    words[torn] = before[torn]
    assert reader.read(0, 4) is None
    words[torn] = (1 << 64) - 1
    assert reader.read(0, 4) is None
    words[torn] = seen
    assert reader.read(0, 4) == [7, 6, 1]


def test_who_has_come_is_seen_at_once() -> None:
    memory = make_memory(3)
    first, second = Mailbox(memory, 0, 3), Mailbox(memory, 1, 3)
    assert not first.has_come(1, 1)
    second.send(3, [1])
    assert [first.has_come(1, sequence) for sequence in (2, 3, 4)] == [True, True, False]
    second.send(4, [1])
    assert first.has_come(1, 4) and not first.has_come(2, 1)


def test_who_gives_up_is_waited_for() -> None:
    memory = make_memory(2)
    first, second = Mailbox(memory, 0, 2), Mailbox(memory, 1, 2)
    first.send(1, [1]).take_back()
    mail = second.send(1, [2])
    assert not mail.is_completed() and not second.has_come(0, 1)


def test_a_wait_ends_at_its_limit_and_goes_on_behind_it() -> None:
    memory = make_memory(2)
    first, second = Mailbox(memory, 0, 2), Mailbox(memory, 1, 2)
    mail = first.send(1, [1])
    assert not mail.comes_soon()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"not completed within 0:00:00\.2"):
        Polled(mail.is_completed).wait(timedelta(seconds=0.2))
    assert 0.2 <= time.monotonic() - started < 2

    def come(rank: int) -> Mail | bool:
        if rank == 0:
            return Polled(mail.is_completed).wait()
        time.sleep(0.3)
        return second.send(1, [2])

    assert at_once(come, 2)[0] is True
    assert mail.read() == [[1], [2]]


class Table:
    """Where threads gather numbers."""

    def __init__(self, ranks: int) -> None:
        self.said: list[list[int]] = [[] for _ in range(ranks)]
        self.barrier = Barrier(ranks)

    def gather(self, rank: int, numbers: Sequence[int]) -> list[list[int]]:
        self.said[rank] = list(numbers)
        self.barrier.wait(5)
        found = list(self.said)
        self.barrier.wait(5)
        return found


def join(ranks: int) -> list[Mailbox | None]:
    table = Table(ranks)
    return at_once(lambda rank: join_mailbox(partial(table.gather, rank), rank, ranks), ranks)


def files_in_memory() -> list[str]:
    """What this process has open or mapped of them."""
    folder = Path("/proc/self/fd")
    links = [os.readlink(folder / name) for name in os.listdir(folder) if (folder / name).is_file()]
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    found = [line[line.find(mailbox.FOLDER) :] for line in (*links, *maps)]
    return [name for name in found if name.startswith(f"{mailbox.FOLDER}/")]


def test_ranks_that_join_share_memory_that_has_no_name() -> None:
    before = files_in_memory()
    boxes = join(3)
    mails = [box.send(1, [rank]) for rank, box in enumerate(boxes) if box is not None]
    assert [poll(mail.is_completed, SECONDS) and mail.read() for mail in mails] == [
        [[0], [1], [2]]
    ] * 3
    shared = [name for name in files_in_memory() if name not in before]
    assert len(set(shared)) == 1 and shared[0].endswith(" (deleted)"), shared
    del boxes, mails
    assert not set(shared) & set(files_in_memory())


def on_one_rank(real: Callable[..., T], instead: Callable[..., T]) -> Callable[..., T]:
    """What the first thread that comes calls in place of another function."""
    chosen: list[int] = []

    def call(*arguments: object) -> T:
        chosen[:] = chosen or [get_ident()]
        return (instead if chosen == [get_ident()] else real)(*arguments)

    return call


def test_all_do_without_where_one_rank_cannot_open_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_open_file", on_one_rank(mailbox._open_file, lambda *_: None))
    assert join(3) == [None] * 3


def test_all_do_without_where_it_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mailbox, "FOLDER", str(tmp_path / "none"))
    assert join(2) == [None] * 2


def test_all_do_without_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = replace(identify_process(), host="another host")
    identify = on_one_rank(identify_process, lambda: elsewhere)
    monkeypatch.setattr(mailbox, "identify_process", identify)
    assert join(2) == [None] * 2


def test_all_do_without_where_processes_are_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = replace(identify_process(), namespace="")
    monkeypatch.setattr(mailbox, "identify_process", lambda: nowhere)
    assert join(2) == [None] * 2


def test_a_file_that_is_not_the_one_meant_is_left_alone() -> None:
    size, token, here = 4096, 77, os.getpid()
    handle = mailbox._make_file(size, token)
    assert handle is not None
    assert mailbox._open_file(here, handle, size, token) is not None
    assert mailbox._open_file(here, handle, size, 78) is None
    assert mailbox._open_file(here, handle, 2 * size, token) is None
    os.close(handle)
    assert mailbox._open_file(here, handle, size, token) is None
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert mailbox._open_file(ended.pid, handle, size, token) is None
