"""Fetches and deliveries between the GPUs of one host: each rank copies what it needs out of its
peers' memory, by the copy engines, and nobody meets anybody.

This file alone knows torch's symmetric memory. Multicast over NVLink is not used.

What is sent lies in memory that peers can reach. A program's own chunks are made there; others are
copied there first, once for all readers.
"""

# torch's symmetric memory is not public yet; what is used of it is in 2.11 as in 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, ClassVar, cast, final

import torch
import torch.distributed as dist

from meshfuse.base import optional
from meshfuse.base.errors import InvariantError, Unsupported
from meshfuse.dist.arena import Arena, Course, Use, Window
from meshfuse.dist.board import identify_process
from meshfuse.dist.collectives import CollectiveRequest, Posting, Start, Transfer
from meshfuse.dist.cuda_driver import (
    FlagOperation,
    StreamMemory,
    Streams,
    current_handle,
    is_capturing,
)
from meshfuse.dist.deadlines import DEFAULT_SECONDS, backend_limit
from meshfuse.dist.graph_flags import Flag
from meshfuse.dist.kept_memory import KeptMemories, KeptMemory

_FLAG_BYTES = 1 << 16
_MODULE = "torch.distributed._symmetric_memory"


Gather = Callable[[Sequence[int], str], list[list[int]]]
"""What each rank of a team says, in its order; and what for."""


def join_transport(
    gather: Gather, team: tuple[int, ...], rank: int, device: torch.device, store: dist.Store
) -> tuple[SymmetricTransport | None, str]:
    """The transport of a team whose ranks all come here; or None, on all of them, and why.

    `store` is its own part of a store.
    """
    missing = _missing_here()
    found = gather([not missing, identify_process().host_number], "symmetric memory")
    reason = _first_reason(team, [bool(has) for has, _ in found], missing)
    if not reason and len({there for _, there in found}) > 1:
        reason = "they are not on one host"
    if reason:
        return None, reason
    transport, failure = None, ""
    try:
        transport = SymmetricTransport(store, team.index(rank), len(team), device)
    except RuntimeError as error:
        failure = str(error).splitlines()[0]
    found = gather([not failure], "symmetric memory")
    reason = _first_reason(team, [bool(has) for (has,) in found], failure)
    return (None if reason else transport), reason


def _first_reason(team: tuple[int, ...], has: Sequence[bool], here: str) -> str:
    if all(has):
        return ""
    return here or f"rank {team[list(has).index(False)]} has no symmetric memory"


def _missing_here() -> str:
    """Why this process has no symmetric memory; "" if it may have."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not optional.is_available(_MODULE) or not hasattr(_memory_type(), "rendezvous"):
        return f"torch {torch.__version__} has no symmetric memory"
    try:
        StreamMemory()
    except (OSError, AttributeError) as error:
        return f"the CUDA driver has no stream memory operations: {error}"
    return ""


def _memory_type() -> Any:
    return optional.load(_MODULE)._SymmetricMemory


def name_group(name: str, place: int, ranks: int, store: dist.Store) -> dist.ProcessGroup:
    """Make a team known to torch, which resolves the name where windows are opened; for as long as
    the result is kept.

    Up to 2.10 torch's symmetric memory has a table of its own; since 2.11 it asks for the store of
    a process group, and since 2.13 whether the group's backend would rather carry what its ranks
    say. Ours, which is never used, would not.
    """
    group = dist.ProcessGroup(store, place, ranks)
    alone = dist.PrefixStore(f"alone {place}", store)
    backend = dist.ProcessGroupGloo(alone, 0, 1, backend_limit(DEFAULT_SECONDS))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    dist.distributed_c10d._register_process_group(cast(Any, name), group)
    # Set beside a process group, the table would make later versions compare counts of allocations.
    if not hasattr(optional.load(_MODULE).enable_symm_mem_for_group, "__deprecated__"):
        _memory_type().set_group_info(name, place, ranks, store)
    return group


@final
class _CudaWindow:
    """Memory of all ranks of a team that this process has mapped."""

    __slots__ = ("_handle", "_memory")

    def __init__(self, memory: torch.Tensor, group: str) -> None:
        self._memory = memory
        self._handle = _memory_type().rendezvous(memory, group)

    @property
    def place(self) -> int:
        """This rank's."""
        return self._handle.rank

    @property
    def addresses(self) -> list[int]:
        """Where it begins, by place."""
        return [int(address) for address in self._handle.buffer_ptrs]

    def part(self, place: int, start: int, length: int) -> torch.Tensor:
        if place == self._handle.rank:
            return self._memory[start : start + length]
        return self._handle.get_buffer(place, (length,), torch.uint8, start)


@final
class _CudaLink:
    """See arena.Link."""

    __slots__ = (
        "_addresses",
        "_driver",
        "_flags",
        "_group",
        "_place",
        "_queue",
        "_streams",
        "beside",
        "device",
        "log",
    )

    def __init__(self, group: str, device: torch.device) -> None:
        self.log: list[Flag] | None = None  # what is put on streams that record
        self.beside: dict[int, list[int]] = {}  # by stream, nodes that the next flag there follows
        self._queue: list[tuple[int, int, int]] = []
        self._driver = StreamMemory()
        self._group = group
        self.device = device
        flags = self._empty(_FLAG_BYTES).zero_()
        self.settle()  # before peers, which the rendezvous lets go on, raise any
        self._flags = _CudaWindow(flags, group)
        self._addresses = self._flags.addresses
        self._place = self._flags.place
        self._streams = Streams(device)

    def _empty(self, size: int) -> torch.Tensor:
        return _memory_type().empty_strided_p2p((size,), (1,), torch.uint8, self.device)

    def open_window(self, size: int) -> Window:
        if self.log is not None:
            raise Unsupported("ranks open windows together, which nothing that is recorded can")
        return _CudaWindow(self._empty(size), self._group)

    def raise_flag(self, place: int, flag: int, value: int) -> None:
        self._queue.append((FlagOperation.WRITE, self._addresses[place] + 4 * flag, value))

    def await_flag(self, flag: int, value: int) -> None:
        address = self._addresses[self._place] + 4 * flag
        self._queue.append((FlagOperation.AWAIT, address, value))

    def flush(self, *, is_beside: bool = False) -> None:
        if not self._queue:
            return
        queue, self._queue = self._queue, []
        stream, driver, log = current_handle(self.device.index), self._driver, self.log
        if log is not None:
            log += [(address, value) for _, address, value in queue]
            if is_beside and all(kind == FlagOperation.WRITE for kind, _, _ in queue):
                self.beside.setdefault(stream, []).extend(driver.put_beside(stream, queue))
                return
            # A graph may do one behind the other what stands side by side: a flag that is awaited
            # first, for which a peer waits for one that was raised before, would be for ever.
            if stream in self.beside:
                driver.follow(stream, self.beside.pop(stream))
        driver.put(stream, queue)

    def forget(self) -> None:
        self._queue.clear()

    def release(self, flags: int, value: int) -> None:
        first = self._addresses[self._place]
        raised = [(FlagOperation.WRITE, first + 4 * flag, value) for flag in range(flags)]
        self._driver.put(current_handle(self.device.index), raised)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def stream(self) -> int:
        """By its handle, as to ask for more takes long."""
        return current_handle(self.device.index)

    def follow(self, stream: int) -> None:
        """What is recorded follows what is: who replays it, all else."""
        earlier = torch.cuda.ExternalStream(stream, self.device)
        if self.log is None or is_capturing(earlier):
            torch.cuda.current_stream(self.device).wait_stream(earlier)

    def issued(self) -> Issued:
        """All that is on the current stream so far."""
        return Issued(self._streams.current())


@final
class Issued:
    """What was put on a stream, up to here: as much of a torch Work as is asked of one."""

    __slots__ = ("_event", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self, timeout: object = None) -> bool:
        """The current stream waits."""
        if current_handle(self._stream.device.index) != self._stream.cuda_stream:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return self._event.query()

    def get_future(self) -> Issued:
        return self

    def add_done_callback(self, tell: Callable[[Any], None]) -> None:
        """As of a Work of NCCL: at once, for what is asked then is asked of the stream."""
        tell(self)


@final
class SymmetricTransport:
    """The transport of one team, this rank at `place`. Made by all ranks of the team together."""

    __slots__ = ("_arena", "_group", "_link", "_sources", "kept")

    _names: ClassVar[Iterator[str]] = (f"meshfuse {number}" for number in count())

    def __init__(self, store: dist.Store, place: int, ranks: int, device: torch.device) -> None:
        name = next(self._names)
        self._group = name_group(name, place, ranks, store)
        self._link = _CudaLink(name, device)
        self._arena = Arena(place, ranks, self._link, _FLAG_BYTES // (8 * ranks))
        self._sources: dict[tuple[int, ...], tuple[Use | None, int]] = {}
        self.kept = KeptMemories()

    def keep(
        self, team: tuple[int, ...], shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[torch.Tensor, KeptMemory]:
        """Memory for a user's tensor, of the same size on all ranks of the team, which ask alike.

        It lasts as long as the transport.
        """
        elements = math.prod(shape)
        size = max(elements * dtype.itemsize, 1)
        window = self._link.open_window(size)
        memory = window.part(self._arena.place, 0, size)
        kept = KeptMemory(team, len(self.kept), window, memory.data_ptr(), size)
        self.kept.add(kept)
        return memory[: elements * dtype.itemsize].view(dtype).view(tuple(shape)), kept

    def allocate(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        most_bytes: int,
        *,
        lasts: bool = False,
    ) -> torch.Tensor:
        """Memory for what will be delivered or fetched, which is at most `most_bytes` on any rank.
        All ranks of the team allocate alike.

        What is delivered from it is delivered once. What is fetched lasts until it is given back.
        """
        self._refuse_capture()
        use = self._arena.take(most_bytes, pins=1, lasts=lasts)
        return self._arena.hold(use, shape, strides, dtype)

    def give_back(self, memory: torch.Tensor) -> None:
        """This rank has done all with memory that lasts, but for what is on the stream that it was
        allocated on, or what that one waits for. Peers may be reading it yet."""
        use = self._arena.find(memory)
        if use is not None:
            use.pins = 0

    def post(self, request: CollectiveRequest) -> Posting:
        """Put a fetch or delivery on the current stream. All ranks of the team post alike, those
        too where nothing moves."""
        if request.transfer is None:
            raise InvariantError(f"{request}: nobody says who sends to whom")
        self.bind(request.collective, request.transfer)(request.out, request.src)
        if request.transfer.is_own or not request.transfer.moves:
            return Posting(request)
        return Posting(request, cast(dist.Work, self._link.issued()))

    def bind(self, collective: str, transfer: Transfer) -> Start:
        """What puts a fetch or delivery on the current stream, into a dense result, from a
        source."""
        is_own, is_fetch = transfer.is_own, collective == "fetch"
        find = self._fetched(transfer) if is_fetch else self._delivered(transfer)
        arena, owner = self._arena, transfer.sources[transfer.place]

        def start(out: torch.Tensor, src: torch.Tensor) -> None:
            self._refuse_capture()
            use = find(src)
            if use is not None and not is_own:
                arena.pull(use, owner, out)
            # A product waits for what is fetched, and need not for what peers are told of that;
            # behind what is delivered comes a sum, which waits for another product, too.
            arena.flush(is_beside=is_fetch)

        return start

    def _fetched(self, transfer: Transfer) -> Callable[[torch.Tensor], Use | None]:
        """What finds the use in which the source of a fetch is published: once for all ranks, each
        of which asks for it in one of as many requests as there are ranks.

        None where all ranks get their own, and it lies in memory that they keep: the next request
        publishes it, so that the product of the own block need not wait for peers. What lies in
        memory that was allocated for it needs no more than a word to them. What must be copied is
        copied first: beside a product that has all multiprocessors it takes far longer.
        """
        sources, chunk, ranks = self._sources, transfer.chunk, self._arena.ranks
        moves, has_one_reader = transfer.moves, transfer.root is not None

        def find(src: torch.Tensor) -> Use | None:
            use, asked = sources.get(chunk, (None, 0))
            if use is None:
                use = self._publish_made(src, transfer)
            if use is None and (moves or self.kept.find(src) is None):
                use = self._publish_source(src, transfer)
            if asked + 1 < ranks and not has_one_reader:
                sources[chunk] = (use, asked + 1)
                return use
            sources.pop(chunk, None)
            if use is not None and not use.lasts:
                use.pins = 0
            return use

        return find

    def _publish_made(self, src: torch.Tensor, transfer: Transfer) -> Use | None:
        """The use of a source that was made in memory allocated for it, as it was on all ranks."""
        use = self._arena.find(src)
        if use is not None and transfer.root in (None, self._arena.place):
            self._publish(use)
        return use

    def _publish(self, use: Use) -> None:
        arena = self._arena
        arena.publish(use, tuple(k for k in range(arena.ranks) if k != arena.place))

    def _publish_source(self, src: torch.Tensor, transfer: Transfer) -> Use:
        """A use of a fetch's source, for all others if the rank is one that they fetch from."""
        arena, kept = self._arena, self.kept.find(src)  # alike on all ranks, as they have agreed
        is_source = transfer.root in (None, arena.place)
        use = arena.take(transfer.most_bytes if kept is None else 0, pins=1)
        if kept is not None:
            memory, use.start = kept
            use.window = memory.window
        elif is_source:
            self._write(use, src)
        if is_source:
            self._publish(use)
        return use

    def _delivered(self, transfer: Transfer) -> Callable[[torch.Tensor], Use | None]:
        """What finds the use in which each rank's chunk is published; None where all keep their
        own."""
        arena, receivers, moves = self._arena, transfer.receivers, transfer.moves

        def find(src: torch.Tensor) -> Use | None:
            use = arena.find(src)
            if use is not None:
                use.pins = 0
            if not moves:
                return None
            if use is None:
                use = arena.take(transfer.most_bytes)
                if receivers:
                    self._write(use, src)
            arena.publish(use, receivers)
            return use

        return find

    def _write(self, use: Use, src: torch.Tensor) -> None:
        held = self._arena.hold(use, src.shape, src.stride(), src.dtype)
        held.copy_(src, non_blocking=True)

    def release(self) -> None:
        """Let streams go on that wait here for peers which will not come."""
        with torch.cuda.stream(torch.cuda.Stream(self._link.device)):
            self._arena.release()

    def _refuse_capture(self) -> None:
        if self._link.log is None and torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                "capture: peer-to-peer transfers through symmetric memory count their uses, which "
                'a graph cannot; capture with overlap="off" or in chunks'
            )

    def state(self) -> tuple[object, ...]:
        """All that a call depends on beside its tensors, and but for the numbers of its uses."""
        return self._arena.state()

    def record(self) -> TransferRecord:
        """What is posted from here on goes onto streams that record."""
        return TransferRecord(self._arena, self._link, self._sources)


@final
class TransferRecord:
    """What one call posts over a transport while its streams record: for others which find the
    transport in the same state. `end` it or `cancel` it before anything else is posted.

    `flags`: those that were written or awaited, in order.
    """

    __slots__ = ("_course", "_link", "_published", "_sources", "flags")

    def __init__(
        self, arena: Arena, link: _CudaLink, published: dict[tuple[int, ...], Any]
    ) -> None:
        """`published`: sources that will be asked for yet; none between calls."""
        self._course = Course(arena)
        self._link = link
        self._published = published
        self._sources: tuple[int, ...] = ()
        self.flags: list[Flag] = []
        link.log = self.flags
        link.beside.clear()

    def cancel(self) -> None:
        """Nothing was posted."""
        self._link.log = None
        self._published.clear()
        self._course.undo()

    def end(self) -> None:
        """All is recorded. Raises InvariantError as Course.end."""
        self._link.log = None
        self._course.end()
        self._sources = tuple(self._course.source(value) for _, value in self.flags)

    def repeat(self) -> list[int]:
        """The values of the flags in a call like it, which is then counted as made, and goes onto
        the current stream."""
        return self._course.repeat(self._sources)
