"""Groups: the ranks of one team joined by one backend, gloo for CPU tensors, NCCL for CUDA tensors.

They are backends of torch.distributed over a store of its default process group, made directly:
torch's new_group sorts the ranks (a team's order is the mesh's), wants every rank of the job to
take part, and shares the fate of other groups. Posting on them is the calling thread's alone, in
program order.
"""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from threading import RLock
from typing import cast, final

import torch
import torch.distributed as dist

from meshfuse.base.errors import CommunicationError, MeshfuseError, Unsupported
from meshfuse.dist import collectives, deadlines
from meshfuse.dist.board import Board, Notice, Standing
from meshfuse.dist.collectives import CollectiveBackend, CollectiveRequest, Posting, Start
from meshfuse.dist.cuda_driver import current_handle
from meshfuse.dist.deadlines import Deadline, Polled, StreamWatch, Watch
from meshfuse.dist.mailbox import MOST_NUMBERS, Mail, Mailbox
from meshfuse.dist.symmetric import SymmetricTransport

CONTROL = "control"
"""In place of a device type: what ranks tell one another before they exchange tensors."""

AGREEMENT_NUMBER = -3
"""In place of a host program's number, for what ranks tell one another so."""

BACKENDS = {"cpu": "gloo", "cuda": "nccl", CONTROL: "gloo"}
"""Device type -> backend."""


@final
class Group:
    """One team on one backend. Once a collective on it fails, the group is broken and says so."""

    def __init__(
        self,
        board: Board,
        backend: CollectiveBackend,
        watch: Watch = deadlines.nobody,
        seconds: float = deadlines.DEFAULT_SECONDS,
    ) -> None:
        """`watch` is asked in each long wait for peers that will not come; streams wait for at most
        `seconds`. `transport` carries fetches and deliveries, `mailbox` what ranks tell one
        another, if there is one."""
        self.board = board
        self.broken: str | None = None
        self.watch = watch
        self._backend: CollectiveBackend | None = backend
        self._sequence = 0
        self._outstanding: dict[int, Posting] = {}
        self._lock = RLock()
        self._stream_watch = StreamWatch(board, self.abandon, watch, seconds)
        self.transport: SymmetricTransport | None = None
        self.mailbox: Mailbox | None = None

    @property
    def posted(self) -> int:
        """How many collectives this rank has posted."""
        return self._sequence

    def gather(self, mine: Sequence[int], purpose: str, seconds: float) -> list[list[int]]:
        """What every rank says, in team order; all say equally many numbers of 64 bits, and all
        have come when this returns.

        Raises CommunicationError as a collective does, and where others say more or fewer numbers.
        """
        deadline = Deadline.after(seconds)
        if self.mailbox is None or len(mine) > MOST_NUMBERS:
            return self._gather_by_backend(mine, purpose, deadline)
        with self._lock:
            self._usable_backend(purpose)
            self._sequence += 1
            mail = self.mailbox.send(self._sequence, mine)
        try:
            if not mail.comes_soon():
                request, _ = self._gathering(mine, purpose)
                work = cast(dist.Work, Polled(mail.is_completed))
                self.wait(Posting(request, work, sequence=mail.sequence), deadline)
            return self._read(mail, len(mine), purpose)
        except (CommunicationError, KeyboardInterrupt) as error:
            mail.take_back()
            self.abandon(str(error) or f"interrupted in {self._gathering(mine, purpose)[0]}")
            raise

    def _read(self, mail: Mail, count: int, purpose: str) -> list[list[int]]:
        found = mail.read()
        for rank, said in zip(self.board.team, found, strict=True):
            if len(said) != count:
                raise CommunicationError(
                    f"{purpose}: rank {rank} says {len(said)} numbers, and rank {self.board.rank} "
                    f"{count}: they run different programs, or one in another order"
                )
        return found

    def _gather_by_backend(
        self, mine: Sequence[int], purpose: str, deadline: Deadline
    ) -> list[list[int]]:
        request, found = self._gathering(mine, purpose)
        self._announce_next(str(request))
        self.wait(self.post(request), deadline)
        return found.view(len(self.board.team), -1).tolist()

    def _gathering(
        self, mine: Sequence[int], purpose: str
    ) -> tuple[CollectiveRequest, torch.Tensor]:
        numbers, team = torch.tensor(mine, dtype=torch.int64), self.board.team
        found = numbers.new_empty(len(team) * len(mine))
        request = CollectiveRequest(
            AGREEMENT_NUMBER, "all_gather", team, numbers, found, None, purpose
        )
        return request, found

    def _announce_next(self, text: str) -> None:
        """Say, before it is posted, that this rank comes to the group's next collective.

        Raises CommunicationError for a broken group: what it has said of its failure stays.
        """
        self._usable_backend(text)
        try:
            self.board.announce(Notice(Standing.waits, self._sequence + 1, text))
        except RuntimeError as error:
            raise deadlines.explain(error, text, self._sequence + 1, self.board) from error

    def has_come(self, rank: int) -> bool:
        """Whether a peer said that it comes to the collective that this rank posted last."""
        place = self.board.team.index(rank)
        if self.mailbox is not None and self.mailbox.has_come(place, self._sequence):
            return True
        notice = self.board.read(rank)
        return notice is not None and notice.sequence >= self._sequence

    def post(self, request: CollectiveRequest) -> Posting:
        """Start a collective. All ranks of the team post the same ones in the same order."""
        with self._lock:
            backend = self._usable_backend(request)
            self._sequence += 1
            try:
                posting = self._post(backend, request)
            except MeshfuseError:
                raise
            except RuntimeError as error:
                raise self._failed(request, self._sequence, error) from error
            posting.sequence = self._sequence
            if posting.work is not None:
                self._outstanding[posting.sequence] = posting
            elif is_on_stream(request):  # on the current one, if it is anywhere
                self._watch_stream(request.out.device, str(request))
        return posting

    def _post(self, backend: CollectiveBackend, request: CollectiveRequest) -> Posting:
        if self.transport is not None and request.transfer is not None:
            return self.transport.post(request)
        return collectives.post(backend, request)

    def bind(self, request: CollectiveRequest) -> Start | None:
        """What starts collectives like this one, which was posted, if it can be without a request:
        on CUDA, on what is sent and received as it is in memory, of the same sizes."""
        if self.transport is not None and request.transfer is not None:
            return self.transport.bind(request.collective, request.transfer)
        if request.src.dtype == torch.bool or not is_on_stream(request):
            return None
        return collectives.start_of(self._usable_backend(request), request)

    def counted(self, start: Start, device: torch.device, text: str) -> Start:
        """`start`, which `bind` has given, with all else that `post` does; `text` stands for the
        request."""
        lock, index, lanes = self._lock, device.index, self._stream_watch.lanes
        begin_lane = self._stream_watch.begin_lane

        def post(out: torch.Tensor, src: torch.Tensor) -> dist.Work | None:
            with lock:
                if self._backend is None:
                    raise self._is_broken(text)
                self._sequence = sequence = self._sequence + 1
                try:
                    work = start(out, src)
                except MeshfuseError:
                    raise
                except RuntimeError as error:
                    raise self._failed(text, sequence, error) from error
            if work is None:  # StreamWatch.note, without a frame of its own
                handle = current_handle(index)
                lane = lanes.get(handle) or begin_lane(handle, device)
                lane.noted.append((sequence, text))
            return work

        return post

    def repeat(self, transfers: int, device: torch.device, text: str) -> None:
        """Count transfers that the current stream has got in some other way; `text` stands for
        them. Raises CommunicationError for a broken group."""
        with self._lock:
            self._usable_backend(text)
            self._sequence += transfers
        self._watch_stream(device, text)

    def await_on_stream(
        self, work: dist.Work, device: torch.device, sequence: int, text: str
    ) -> None:
        """The current stream waits for the work of the collective of this number."""
        self._usable_backend(text)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(text, sequence, error) from error
        self._stream_watch.note(device, sequence, text)

    def wait(self, posting: Posting, deadline: Deadline) -> None:
        """Block until the posting's `out` may be read; on CUDA, the current stream waits instead.

        Raises CommunicationError as deadlines.wait does. An interrupt too leaves the group broken.
        """
        if is_on_stream(posting.request):
            self._wait_on_stream(posting)
        else:
            try:
                deadlines.wait(posting, self.board, deadline, self.watch)
            except CommunicationError as error:
                self.abandon(str(error))
                raise
            except KeyboardInterrupt:
                self.abandon(f"interrupted in {posting.request}")
                raise
        with self._lock:
            self._outstanding.pop(posting.sequence, None)

    def _wait_on_stream(self, posting: Posting) -> None:
        device, text = posting.request.out.device, str(posting.request)
        while posting.work is not None:
            self.await_on_stream(posting.work, device, posting.sequence, text)
            try:
                posting.advance()
            except RuntimeError as error:
                raise self._failed(text, posting.sequence, error) from error

    def _watch_stream(self, device: torch.device, text: str) -> None:
        self._stream_watch.note(device, self._sequence, text)

    def _failed(
        self, request: CollectiveRequest | str, sequence: int, error: RuntimeError
    ) -> CommunicationError:
        """The error of a backend, with the ranks behind it; the group is broken from here on."""
        failure = deadlines.explain(error, str(request), sequence, self.board)
        self.abandon(str(failure))
        return failure

    def _usable_backend(self, request: CollectiveRequest | str) -> CollectiveBackend:
        if self._backend is None:
            raise self._is_broken(request)
        return self._backend

    def _is_broken(self, request: CollectiveRequest | str) -> CommunicationError:
        return CommunicationError(
            f"{request}: the group failed before, and stays so until the process group is "
            f"destroyed and made again: {self.broken}"
        )

    def abandon(self, reason: str) -> None:
        """Give up: later posts fail, and waiting peers learn the reason."""
        with self._lock:
            if self._backend is None:
                return
            self.broken = reason
            if self.transport is not None:
                self.transport.release()
            self._abort(self._backend)
        try:
            self.board.announce(Notice(Standing.failed, self._sequence, reason))
        except RuntimeError:
            return  # The store is gone, and with it the process that every peer waits for.

    def close(self) -> None:
        """Release the backend; the group is not used again."""
        self._stream_watch.close()
        with self._lock:
            if self._backend is None:
                return
            self.broken = "the process group it stood on was destroyed"
            if self._outstanding:
                if self.transport is not None:
                    self.transport.release()
                self._abort(self._backend)
                return
            self._backend.shutdown()
            # The last reference: gloo's destructor joins its threads. Left alive, one of them may
            # let go of a tensor while the interpreter shuts down, and a signal ends the process.
            self._backend = None

    def _abort(self, backend: CollectiveBackend) -> None:
        """Stop a backend whose collective will not complete.

        NCCL aborts. gloo has no abort that works, and its destructor waits for the collective until
        gloo's own time limit; so backend and buffers are kept for ever, and the process can end.
        """
        backend.abort()
        for kept in (backend, self._outstanding):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self._backend = None


def is_on_stream(request: CollectiveRequest) -> bool:
    """Whether streams wait for it, and not the host."""
    return request.out.is_cuda


def form_group(
    device_type: str,
    board: Board,
    store: dist.Store,
    seconds: float,
    purpose: object,
    watch: Watch = deadlines.nobody,
) -> Group:
    """Join the board's team; every rank of it must do so. `store` is the new group's own part of
    the store, `watch` is asked while others have not come.

    Raises CommunicationError naming the ranks that have not come after `seconds`, Unsupported
    where torch lacks the backend.
    """
    deadlines.await_arrival(board, Deadline.after(seconds), purpose, watch)
    try:
        backend = _make_backend(device_type, board, store, seconds, purpose)
        return Group(board, backend, watch, seconds)
    except MeshfuseError:
        raise
    except RuntimeError as error:  # a peer that ended since it arrived
        raise deadlines.explain(error, str(purpose), 0, board) from error


def _make_backend(
    device_type: str, board: Board, store: dist.Store, seconds: float, purpose: object
) -> CollectiveBackend:
    limit = deadlines.backend_limit(seconds)
    position, size = board.team.index(board.rank), len(board.team)
    # torch's type stubs leave out most of what its backends have: hence the casts.
    if BACKENDS[device_type] == "gloo":
        return cast(CollectiveBackend, dist.ProcessGroupGloo(store, position, size, limit))
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise Unsupported(f"{purpose}: this build of torch has no NCCL, which CUDA tensors need")
    options = nccl.Options()
    options._timeout = limit
    return cast(CollectiveBackend, nccl(store, position, size, options))
