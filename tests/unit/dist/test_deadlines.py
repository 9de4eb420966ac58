"""Waits that end, without processes: a work that never completes, a store in memory."""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store

import meshfuse
from meshfuse.base.errors import CommunicationError, UserValueError
from meshfuse.dist import deadlines
from meshfuse.dist.board import (
    Board,
    Notice,
    ProcessIdentity,
    Standing,
    has_ended,
    identify_process,
    publish_identity,
)
from meshfuse.dist.collectives import CollectiveRequest, Posting
from meshfuse.dist.deadlines import Deadline, StreamWatch, await_arrival, nobody, read_timeout, wait


class ScriptedWork:
    """A work that completes after some seconds, or fails then with a backend's words."""

    def __init__(self, seconds: float, failure: str | None = None) -> None:
        self.at = time.monotonic() + seconds
        self.failure = failure

    def is_completed(self) -> bool:
        return time.monotonic() >= self.at

    def wait(self, limit: timedelta = timedelta(0)) -> bool:
        ahead = max(0.0, self.at - time.monotonic())
        seconds = limit.total_seconds() or ahead
        time.sleep(min(seconds, ahead))
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")
        if self.failure is not None:
            raise RuntimeError(self.failure)
        return True


def make_posting(work: ScriptedWork, *steps: Callable[[], dist.Work | None]) -> Posting:
    request = CollectiveRequest(
        7, "all_reduce", (4, 5), torch.ones(2), torch.empty(2), "sum", "T3 = sum(T2)"
    )
    return Posting(request, cast(dist.Work, work), steps, sequence=1)


def make_boards() -> tuple[Board, Board]:
    store: Store = HashStore()
    notices, processes = PrefixStore("n", store), PrefixStore("p", store)
    for rank in (4, 5):
        publish_identity(processes, rank)
    return Board(4, (4, 5), notices, processes), Board(5, (4, 5), notices, processes)


SUBJECT = r"all_reduce number 7 over ranks \(4, 5\) \(sum, 8 bytes, for T3 = sum\(T2\)\): rank 4 "


def test_completes_all_that_follows_once_and_in_order() -> None:
    mine, _ = make_boards()
    calls: list[str] = []
    later = ScriptedWork(0.6)

    def start_another() -> dist.Work:
        calls.append("start")
        return cast(dist.Work, later)

    posting = make_posting(ScriptedWork(0.4), start_another, lambda: calls.append("end"))
    wait(posting, mine, Deadline.after(5))
    assert later.is_completed()
    wait(posting, mine, Deadline.after(5))
    assert calls == ["start", "end"]
    notice = mine.read(4)
    assert notice is not None and notice.standing is Standing.waits, "a slow wait is announced"


def test_deadline_names_who_does_not_wait() -> None:
    mine, _ = make_boards()
    started = time.monotonic()
    with pytest.raises(CommunicationError, match=SUBJECT + r"waited 0\.6 s.*rank 5 does not wait"):
        wait(make_posting(ScriptedWork(60)), mine, Deadline.after(0.6))
    assert time.monotonic() - started < 2


def test_deadline_names_where_the_peer_waits() -> None:
    mine, other = make_boards()
    other.announce(Notice(Standing.waits, 9, "all_gather number 2"))
    with pytest.raises(CommunicationError, match=r"rank 5 .* last waited for all_gather number 2"):
        wait(make_posting(ScriptedWork(60)), mine, Deadline.after(0.4))
    other.announce(Notice(Standing.waits, 1, "the same"))
    with pytest.raises(CommunicationError, match="all ranks wait for it, so the network"):
        wait(make_posting(ScriptedWork(60)), mine, Deadline.after(0.4))


def test_peer_that_gives_up_ends_the_wait() -> None:
    mine, other = make_boards()
    other.announce(Notice(Standing.failed, 0, "out of memory"))
    with pytest.raises(CommunicationError, match=SUBJECT + ".*rank 5 gave up: out of memory"):
        wait(make_posting(ScriptedWork(60)), mine, Deadline.after(30))


def test_completion_goes_before_a_peer_that_gives_up() -> None:
    mine, other = make_boards()
    other.announce(Notice(Standing.failed, 0, "out of memory"))
    work = ScriptedWork(0.6)
    wait(make_posting(work), mine, Deadline.after(30))
    assert work.is_completed()


def test_error_of_the_backend_is_translated() -> None:
    mine, other = make_boards()
    other.announce(Notice(Standing.failed, 1, "lost its peers in something"))
    failing = make_posting(ScriptedWork(0.01, "Connection closed by peer [::1]:1"))
    with pytest.raises(CommunicationError, match=SUBJECT + r".*rank 5.*\[Connection closed by pe"):
        wait(failing, mine, Deadline.after(30))


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[bool]]:
    """Streams by handle: of each mark that was made on one, whether the stream has passed it."""
    found: dict[int, list[bool]] = {0: []}

    def mark(stream: list[bool]) -> Callable[[], bool]:
        stream.append(False)
        place = len(stream) - 1
        return lambda: stream[place]

    monkeypatch.setattr(deadlines, "current_handle", lambda device: 0)
    monkeypatch.setattr(deadlines, "mark_stream", mark)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found[0])
    monkeypatch.setattr(deadlines, "POLL_SECONDS", 0.02)
    return found


def eventually(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_streams_are_marked_when_they_have_passed_the_mark_before(
    lanes: dict[int, list[bool]],
) -> None:
    mine, _ = make_boards()
    reasons: list[str] = []
    watch, stream = StreamWatch(mine, reasons.append, nobody, 5), lanes[0]
    for sequence in range(1, 4):
        watch.note(torch.device("cpu"), sequence, f"gather {sequence}")
    eventually(lambda: len(stream) == 1)
    watch.note(torch.device("cpu"), 4, "gather 4")
    time.sleep(0.1)
    assert len(stream) == 1, "it is on its way to the first mark"
    stream[0] = True
    eventually(lambda: len(stream) == 2)
    stream[1] = True
    time.sleep(0.1)
    assert (len(stream), reasons) == (2, []), "nothing is left to wait for"
    watch.close()


def test_a_stream_that_waits_for_a_lost_peer_ends(lanes: dict[int, list[bool]]) -> None:
    mine, other = make_boards()
    reasons: list[str] = []
    watch = StreamWatch(mine, reasons.append, nobody, 30)
    watch.note(torch.device("cpu"), 1, "gather 1")
    watch.note(torch.device("cpu"), 2, "gather 2")
    other.announce(Notice(Standing.failed, 0, "out of memory"))
    eventually(lambda: bool(reasons))
    assert reasons[0].startswith("gather 1, or one behind it up to collective 2 of these ranks:")
    assert "rank 5 gave up: out of memory" in reasons[0]
    notice = mine.read(4)
    assert notice is not None and (notice.standing, notice.sequence) == (Standing.waits, 1)
    watch.close()


def test_a_stream_may_wait_for_an_earlier_collective_behind_a_later_one(
    lanes: dict[int, list[bool]],
) -> None:
    """All that was before a mark is over with, whatever the numbers."""
    mine, other = make_boards()
    reasons: list[str] = []
    watch, stream = StreamWatch(mine, reasons.append, nobody, 30), lanes[0]
    watch.note(torch.device("cpu"), 2, "fetch 2")
    watch.note(torch.device("cpu"), 1, "gather 1")
    eventually(lambda: len(stream) == 1)
    stream[0] = True
    time.sleep(0.1)
    assert len(stream) == 1, "nothing is left to wait for"
    watch.note(torch.device("cpu"), 5, "gather 5")
    watch.note(torch.device("cpu"), 4, "gather 4")
    eventually(lambda: len(stream) == 2)
    other.announce(Notice(Standing.failed, 4, "out of memory"))
    eventually(lambda: bool(reasons))
    assert reasons[0].startswith("gather 5: rank 4 cannot complete it: rank 5 gave up")
    watch.close()


def test_a_stream_has_a_deadline(lanes: dict[int, list[bool]]) -> None:
    mine, _ = make_boards()
    reasons: list[str] = []
    watch = StreamWatch(mine, reasons.append, nobody, 0.2)
    watch.note(torch.device("cpu"), 1, "gather 1")
    eventually(lambda: bool(reasons))
    assert "gather 1: rank 4 waited 0.2 s, its deadline: rank 5 does not wait" in reasons[0]
    watch.close()


def test_arrival_names_who_has_not_come() -> None:
    mine, other = make_boards()
    with pytest.raises(CommunicationError, match=r"ranks \(4, 5\) for a test.*rank 5 has not arr"):
        await_arrival(mine, Deadline.after(0.3), "a test")
    await_arrival(other, Deadline.after(5), "a test")


def test_process_that_has_ended_is_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify_process(child.pid)
    assert not has_ended(identity)
    assert ProcessIdentity.decode(identity.encode()) == identity
    child.kill()
    limit = time.monotonic() + 10
    while not has_ended(identity) and time.monotonic() < limit:
        time.sleep(0.01)
    assert has_ended(identity), "a zombie has ended"
    child.wait()
    assert has_ended(identity)


def test_process_number_used_again_is_another_process() -> None:
    me = identify_process()
    assert me.pid == os.getpid() and not has_ended(me)
    assert has_ended(ProcessIdentity(me.host, me.namespace, me.pid, "1"))
    assert not has_ended(ProcessIdentity("another host", me.namespace, me.pid, "1"))


def test_timeout_from_the_environment() -> None:
    assert read_timeout({}) == 300
    assert read_timeout({"MESHFUSE_TIMEOUT": "2.5"}) == 2.5
    for text in ("soon", "0", "-1", "nan"):
        with pytest.raises(UserValueError, match="must be a positive number of seconds"):
            read_timeout({"MESHFUSE_TIMEOUT": text})
    with pytest.raises(UserValueError, match="must be positive"):
        Deadline.after(0)


def test_no_other_file_keeps_time() -> None:
    """What else waits for ranks has its deadlines from here."""
    rooms = Path(meshfuse.__file__).parent
    files = [*rooms.glob("dist/*.py"), *rooms.glob("host/*.py")]
    keeping = {
        path.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and {"time", "datetime"} & {getattr(node, "module", None), *(a.name for a in node.names)}
    }
    assert keeping == {"deadlines.py"}
