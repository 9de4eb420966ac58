"""The one owner of deadlines: every wait for other ranks ends, and its error says who is missing.

A wait polls. Between polls it runs Python's signal handlers (so Ctrl-C works) and looks at the
team's board: a peer that ended or gave up ends the wait long before the deadline. What a backend
reports in its own words ("Connection closed by peer") is translated into ranks and operation.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Event, Thread, current_thread
from typing import final

import torch
import torch.distributed as dist

from meshfuse.base.errors import CommunicationError, MeshfuseError, UserValueError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.board import Board, Notice, Standing
from meshfuse.dist.collectives import Posting
from meshfuse.dist.cuda_driver import allow_captures_elsewhere, current_handle, mark_stream

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
SPIN_SECONDS = 0.0003
"""What comes so soon is looked for all the time: no sleep is as short."""
LONGEST_PAUSE_SECONDS = 0.002
_PAUSES = 8
"""A pause between two looks takes this part of the time that has gone by."""

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


def poll(is_so: Callable[[], bool], seconds: float) -> bool:
    """Whether `is_so` within some seconds: asked without a pause at first, then at growing
    intervals."""
    begin = time.monotonic()
    while not is_so():
        gone = time.monotonic() - begin
        if gone >= seconds:
            return False
        if gone < SPIN_SECONDS:
            os.sched_yield()  # there may be fewer CPUs than ranks
        else:
            time.sleep(min(gone / _PAUSES, LONGEST_PAUSE_SECONDS, seconds - gone))
    return True


@final
class Polled:
    """What is completed when `is_so` says so: as much of a torch Work as is asked of one."""

    __slots__ = ("is_completed",)

    def __init__(self, is_so: Callable[[], bool]) -> None:
        self.is_completed = is_so

    def wait(self, limit: timedelta = timedelta.max) -> bool:
        """Block until it is completed. Raises RuntimeError, as torch does, if that takes longer
        than the limit."""
        if not poll(self.is_completed, limit.total_seconds()):
            raise RuntimeError(f"not completed within {limit}")
        return True


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
@dataclass(slots=True, eq=False, repr=False)
class Lane:
    """One stream: what it was to wait for, oldest first, by its number and as text.

    `has_passed` tells of a mark behind the first `marked` of those, whose numbers go up to `until`;
    None: there is no mark. A stream may wait for an earlier number behind a later one.
    """

    mark: Callable[[], Callable[[], bool] | None]
    noted: deque[tuple[int, object]] = field(default_factory=deque[tuple[int, object]])
    has_passed: Callable[[], bool] | None = None
    marked: int = 0
    until: int = 0
    deadline: Deadline | None = None


@final
class StreamWatch:
    """Watches what CUDA streams wait for, where the host does not block.

    Whoever puts something on a stream only notes it, which takes next to no time. Every
    POLL_SECONDS a thread marks how far each stream is to come, unless it is still on its way to the
    mark before. It calls `give_up(reason)` where `wait` would raise.
    """

    def __init__(
        self, board: Board, give_up: Callable[[str], None], watch: Watch, seconds: float
    ) -> None:
        """Streams wait for at most `seconds`."""
        self._board = board
        self._watch = watch
        self._give_up = give_up
        self._seconds = seconds
        self.lanes: dict[int, Lane] = {}
        """By the handles of streams. Always the same table: Group.counted has it, too."""
        self._closed = Event()
        self._thread: Thread | None = None

    def note(self, device: torch.device, sequence: int, subject: object) -> None:
        """The current stream of a device has got something that waits for others, the collective of
        this number."""
        handle = current_handle(device.index)
        lane = self.lanes.get(handle) or self.begin_lane(handle, device)
        lane.noted.append((sequence, subject))

    def begin_lane(self, handle: int, device: torch.device) -> Lane:
        """A lane for the current stream of a device, which has this handle and none so far."""
        lane = Lane(partial(mark_stream, torch.cuda.current_stream(device)))
        self.lanes[handle] = lane
        if self._thread is None:
            self._thread = Thread(target=self._run, name="meshfuse-stream-watch", daemon=True)
            self._thread.start()
        return lane

    def close(self) -> None:
        """Stop watching, and return when the thread has seen it."""
        self._closed.set()
        if self._thread is not None and self._thread is not current_thread():
            self._thread.join()

    def _run(self) -> None:
        allow_captures_elsewhere()
        while not self._closed.wait(POLL_SECONDS):
            try:
                for lane in list(self.lanes.values()):
                    self._follow(lane)
            except RuntimeError as error:  # ours, or that of the backend or the store
                self.lanes.clear()  # nobody else would hear of it
                self._give_up(str(error))
                return

    def _follow(self, lane: Lane) -> None:
        if lane.has_passed is not None and lane.has_passed():
            lane.has_passed = None
            for _ in range(lane.marked):
                lane.noted.popleft()
        if lane.has_passed is None:
            self._mark(lane)
        elif lane.deadline is not None:
            self._look_at(lane, lane.has_passed, lane.deadline)

    def _mark(self, lane: Lane) -> None:
        """Behind all that is noted: that is on the stream already."""
        noted = list(lane.noted)  # at once: others append
        if noted:
            lane.has_passed = lane.mark()
            lane.marked, lane.until = len(noted), max(sequence for sequence, _ in noted)
            lane.deadline = Deadline.after(self._seconds)

    def _look_at(self, lane: Lane, has_passed: Callable[[], bool], deadline: Deadline) -> None:
        sequence, first = lane.noted[0]
        subject = str(first)
        if sequence < lane.until:
            subject += f", or one behind it up to collective {lane.until} of these ranks"
        self._board.announce(Notice(Standing.waits, sequence, subject))
        _raise_for_peers(self._board, subject, has_passed, self._watch)
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
