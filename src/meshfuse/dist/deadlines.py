"""The one owner of deadlines: every wait for other ranks ends, and its error says who is missing.

A wait polls. Between polls it runs Python's signal handlers (so Ctrl-C works) and looks at the
team's board: a peer that ended or gave up ends the wait long before the deadline. What a backend
reports in its own words ("Connection closed by peer") is translated into ranks and operation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from threading import Event, Thread, current_thread
from typing import final

import torch.distributed as dist

from meshfuse.base.errors import CommunicationError, MeshfuseError, UserValueError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.board import Board, Notice, Standing
from meshfuse.dist.collectives import Posting

DEFAULT_SECONDS = 300.0
TIMEOUT_VARIABLE = "MESHFUSE_TIMEOUT"

POLL_SECONDS = 0.25
"""Between two looks at the board; a completion ends the wait at once."""
LAST_DATA_SECONDS = 1.0
"""What an ended peer sent last may still be under way."""
ROLL_CALL_SECONDS = 2.0
"""After the backend's error: until the peers have noticed too, or the system has seen one end."""
BACKEND_MARGIN_SECONDS = 5.0
"""A backend's own limit lies this far beyond ours, so that ours speaks first."""

Watch = Callable[[Board], Mapping[int, str]]
"""Peers that will not come, by what else is known than what a board says, and why."""


def nobody(board: Board) -> Mapping[int, str]:
    """The watch that knows of nothing."""
    return {}


@final
@frozen_dataclass
class Deadline:
    """A moment of the monotonic clock, and the `seconds` it was set ahead."""

    at: float
    seconds: float

    @staticmethod
    def after(seconds: float) -> Deadline:
        if not seconds > 0:
            raise UserValueError(f"a deadline of {seconds} s: must be positive")
        return Deadline(time.monotonic() + seconds, seconds)

    @property
    def remaining(self) -> float:
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        return self.remaining == 0.0


def read_timeout(environ: Mapping[str, str]) -> float:
    """Seconds until a wait gives up: MESHFUSE_TIMEOUT, else 300. Raises UserValueError for no
    positive number."""
    text = environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return DEFAULT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UserValueError(f"{TIMEOUT_VARIABLE}={text!r}: must be a positive number of seconds")
    return seconds


def backend_limit(seconds: float) -> timedelta:
    """What a backend is told whose waits end here after `seconds`."""
    return timedelta(seconds=seconds + BACKEND_MARGIN_SECONDS)


def wait(posting: Posting, board: Board, deadline: Deadline, watch: Watch = nobody) -> None:
    """Block until `out` of the posting may be read.

    Raises CommunicationError, naming the operation and the ranks that are missing, when a peer
    ends, gives up or is found by `watch`, when the backend fails, or at the deadline. The group is
    of no use after that.
    """
    try:
        while posting.work is not None:
            _await_completion(posting, posting.work, board, deadline, watch)
            posting.advance()
    except MeshfuseError:
        raise
    except RuntimeError as error:
        raise explain(error, str(posting.request), posting.sequence, board) from error


def await_arrival(board: Board, deadline: Deadline, purpose: object, watch: Watch = nobody) -> None:
    """Block until every rank of the team has come here, which is to say on the board that it
    arrived.

    Raises CommunicationError as `wait` does, naming `purpose` for the operation.
    """
    subject = f"forming the group of ranks {board.team} for {purpose}"
    try:
        board.announce(Notice(Standing.arrived, 0, subject))
        absent = list(board.peers)
        pause = 0.001
        while absent := [rank for rank in absent if board.read(rank) is None]:
            _raise_for_peers(board, subject, lambda: False, watch)
            if deadline.expired:
                missing = dict.fromkeys(absent, "has not arrived")
                raise CommunicationError(_expiry(subject, board, deadline, missing))
            time.sleep(min(pause, deadline.remaining))
            pause = min(2 * pause, POLL_SECONDS / 5)
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise explain(error, subject, 0, board) from error


def explain(error: RuntimeError, subject: str, sequence: int, board: Board) -> CommunicationError:
    """The error of a backend or store, with the ranks behind it."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    try:
        missing = _list(_call_roll(board, subject, sequence))
    except RuntimeError:
        missing = "its store is out of reach: rank 0, or the launcher, which holds it, has ended"
    return CommunicationError(
        f"{subject}: rank {board.rank} cannot complete it: {missing} [{reason}]"
    )


@final
class StreamWatch:
    """Watches collectives that a CUDA stream waits for, where the host does not block.

    A thread looks at the oldest one every POLL_SECONDS. It calls `give_up(reason)` where `wait`
    would raise.
    """

    def __init__(self, board: Board, give_up: Callable[[str], None], watch: Watch = nobody) -> None:
        self._board = board
        self._watch = watch
        self._give_up = give_up
        self._pending: deque[tuple[dist.Work, int, str, Deadline]] = deque()
        self._closed = Event()
        self._thread: Thread | None = None

    def add(self, posting: Posting, deadline: Deadline) -> None:
        """Watch a posting whose work the current stream waits for. Keeps its work, not its
        tensors."""
        if posting.work is None:
            return
        entry = (posting.work, posting.sequence, str(posting.request), deadline)
        self._pending.append(entry)
        if self._thread is None:
            self._thread = Thread(target=self._run, name="meshfuse-stream-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching, and return when the thread has seen it."""
        self._closed.set()
        if self._thread is not None and self._thread is not current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            try:
                while self._pending and self._pending[0][0].is_completed():
                    self._pending.popleft()
                if self._pending:
                    self._look_at(*self._pending[0])
            except (
                RuntimeError
            ) as error:  # ours, the backend's or the store's: nobody else hears it
                self._pending.clear()
                self._give_up(str(error))
                return

    def _look_at(self, work: dist.Work, sequence: int, subject: str, deadline: Deadline) -> None:
        self._board.announce(Notice(Standing.waits, sequence, subject))
        _raise_for_peers(self._board, subject, work.is_completed, self._watch)
        if deadline.expired:
            absent = self._board.describe_absence(sequence)
            raise CommunicationError(_expiry(subject, self._board, deadline, absent))


def _await_completion(
    posting: Posting, work: dist.Work, board: Board, deadline: Deadline, watch: Watch
) -> None:
    if _completes(work, min(POLL_SECONDS, deadline.remaining)):
        return
    subject = str(posting.request)
    board.announce(Notice(Standing.waits, posting.sequence, subject))
    while not _completes(work, min(POLL_SECONDS, deadline.remaining)):
        _raise_for_peers(board, subject, lambda: _completes(work, LAST_DATA_SECONDS), watch)
        if deadline.expired:
            absent = board.describe_absence(posting.sequence)
            raise CommunicationError(_expiry(subject, board, deadline, absent))


def _completes(work: dist.Work, seconds: float) -> bool:
    """Whether `work` completes within `seconds`. Raises the backend's RuntimeError if it fails.

    A wait with a time limit raises RuntimeError too, and leaves the work going on.
    """
    try:
        work.wait(timedelta(seconds=max(seconds, 0.001)))  # zero would mean no limit
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def _raise_for_peers(
    board: Board, subject: str, completes_yet: Callable[[], bool], watch: Watch
) -> None:
    """Raise CommunicationError if a peer ended, gave up or will not come, unless the operation
    completes yet."""
    ended, failures, others = board.ended(), board.failures(), watch(board)
    if not (ended or failures or others) or completes_yet():
        return
    causes = {
        **others,
        **{rank: f"gave up: {text}" for rank, text in failures.items()},
        **{rank: f"has ended ({identity})" for rank, identity in ended.items()},
    }
    raise CommunicationError(f"{subject}: rank {board.rank} cannot complete it: {_list(causes)}")


def _expiry(subject: str, board: Board, deadline: Deadline, absent: Mapping[int, str]) -> str:
    missing = _list(absent) if absent else "all ranks wait for it, so the network is at fault"
    return f"{subject}: rank {board.rank} waited {deadline.seconds:g} s, its deadline: {missing}"


def _call_roll(board: Board, subject: str, sequence: int) -> dict[int, str]:
    """Tell the peers that this rank has lost the operation, and see who is there: what is known of
    the others.

    Peers that only lost the operation themselves are left out, unless nobody else is to be named.
    """
    lost = f"lost its peers in {subject}"
    board.announce(Notice(Standing.failed, sequence, lost))
    until = Deadline.after(ROLL_CALL_SECONDS)
    while not (ended := board.ended()) and not until.expired:
        if len(board.failures()) == len(board.peers):
            break
        time.sleep(POLL_SECONDS / 5)
    if ended:
        return {rank: f"has ended ({identity})" for rank, identity in ended.items()}
    absent = board.describe_absence(sequence)
    silent = {rank: text for rank, text in absent.items() if not text.startswith("gave up: lost")}
    return silent or absent


def _list(ranks: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank} {text}" for rank, text in ranks.items())
