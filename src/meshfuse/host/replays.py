"""Calls between peers that come again, replayed as CUDA graphs: then the host, which small programs
wait for, has next to nothing to do.

A call whose tensors lie where those of an earlier one lay differs from it in the numbers of its
uses of peers' memory alone, and a graph can be given others for each launch. So ranks need not
agree on what is replayed: to its peers a replay is the call itself. Outputs are made anew for each
call. What lives within a call is the graphs' own, in memory that those of a device share.

Collectives of NCCL are not replayed: where a rank records one, its peers may have to record it.
"""

# torch's own module is asked: the public ways take long.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch

from meshfuse.base.bounded import BoundedTable
from meshfuse.dist.direct import DirectTransfer
from meshfuse.dist.graph_flags import FlaggedGraph
from meshfuse.dist.groups import Group
from meshfuse.dist.symmetric import SymmetricTransport, TransferRecord
from meshfuse.host.actions import Slots
from meshfuse.host.cuda_streams import BoundStreams
from meshfuse.host.recorder import Recorder

SIGHTINGS: Final = 2
"""Calls alike, after which one is recorded."""
_MOST_SIGHTED: Final = 1024

Key = tuple[Any, ...]
Act = Callable[[Slots], object]


@final
@dataclass(slots=True, eq=False)
class Replay:
    """A call that was recorded. `posted`: how many transfers each group counts, and the first.
    `last_use`: by the recorder's clock."""

    graph: FlaggedGraph
    records: tuple[TransferRecord, ...]
    posted: tuple[tuple[Group, int, str], ...]
    device: torch.device
    last_use: int = 0

    def run(self, stream: int) -> None:
        """The call, on the current stream, which has this handle. Raises CommunicationError for a
        broken group."""
        values = [value for record in self.records for value in record.repeat()]
        self.graph.launch(stream, values)
        for group, transfers, text in self.posted:
            group.repeat(transfers, self.device, text)


@final
class Replays:
    """The calls of a plan that are replayed, and those seen so far. One call at a time."""

    __slots__ = (
        "__weakref__",
        "_bind",
        "_calls",
        "_device",
        "_elsewhere",
        "_graphs",
        "_inputs",
        "_outputs",
        "_reason",
        "_recorder",
        "_replayed",
        "_sightings",
        "_transfers",
        "_transports",
    )

    def __init__(
        self,
        device: torch.device,
        bind: Callable[[BoundStreams], Iterable[Act]],
        transfers: Iterable[DirectTransfer],
        inputs: int,
        outputs: Sequence[int],
    ) -> None:
        """`bind`: what a call does, with its `transfers` recorded. The slots of inputs come first;
        `outputs` are those that have memory before it."""
        self._device = device
        self._bind = bind
        self._transfers = tuple(transfers)
        self._inputs, self._outputs = range(inputs), tuple(outputs)
        self._transports: tuple[SymmetricTransport, ...] = ()
        self._sightings: BoundedTable[int, int] = BoundedTable(_MOST_SIGHTED)
        self._graphs: dict[Key, Replay] = {}  # the one that was used last is the last one
        self._recorder: Recorder | None = None
        self._calls = self._replayed = self._elsewhere = 0
        self._reason = ""  # why no call is recorded any more

    def __str__(self) -> str:
        """As `explain` says it."""
        done = f"{self._replayed} of {self._calls} calls between peers were replayed as CUDA graphs"
        kept = f"graphs kept: {len(self._graphs)}"
        if self._elsewhere:
            kept += (
                f"; {self._elsewhere} calls came from another stream than those that have graphs"
            )
        return f"{done}; {self._reason or kept}"

    def has_run(self, slots: Slots, caller: torch.cuda.Stream) -> bool:
        """Whether the call is done, being like an earlier one. Else it is to be made.

        Raises as Replay.run.
        """
        self._calls += 1
        if self._reason:
            return False
        if not self._transports and not self._finds_transports():
            return False
        if torch.cuda.is_current_stream_capturing():  # the user's own graph gets the call itself
            return False
        lies = self._lies(slots, caller)
        key = (lies, *[transport.state() for transport in self._transports])
        replay = self._graphs.get(key)
        if replay is None and self._has_seen(lies):
            replay = self._record_anew(key, slots, caller)
        if replay is None:
            return False
        self._use(key, replay)
        replay.run(caller.cuda_stream)
        return True

    def _finds_transports(self) -> bool:
        """They are known behind the first call, if they will ever be."""
        if self._calls == 1:
            return False
        groups = {id(found.group): found.group for found in self._transfers}
        found = [None if group is None else group.transport for group in groups.values()]
        self._transports = tuple(transport for transport in found if transport is not None)
        if len(self._transports) == len(found):
            return True
        self._transports, self._reason = (), "some do not go through symmetric memory"
        return False

    def _lies(self, slots: Slots, caller: torch.cuda.Stream) -> Key:
        """All that a graph has in it but for the state of transports: how tensors lie, and numbers,
        as text, for 0.0 is not -0.0."""
        return (
            caller.cuda_stream,
            _settings(),
            *[
                (value.data_ptr(), value.stride())
                if isinstance(value := slots[place], torch.Tensor)
                else repr(value)
                for place in self._inputs
            ],
            *[slots[place].data_ptr() for place in self._outputs],
        )

    def _has_seen(self, lies: Key) -> bool:
        """Whether calls like it came often enough, in whatever state the transports were.

        Kept by hashes, which are small: two calls of one hash are recorded a little too soon.
        """
        place = hash(lies)
        seen = self._sightings.get(place) or 0
        if seen < SIGHTINGS:
            self._sightings.put(place, seen + 1)
        return seen == SIGHTINGS

    def _use(self, key: Key, replay: Replay) -> None:
        assert self._recorder is not None
        self._replayed += 1
        self._recorder.clock += 1
        replay.last_use = self._recorder.clock
        self._graphs[key] = self._graphs.pop(key)

    @property
    def oldest_use(self) -> int | None:
        """See recorder.Owner."""
        return next((replay.last_use for replay in self._graphs.values()), None)

    def drop_unused(self, since: int) -> None:
        """See recorder.Owner."""
        for key in [key for key, replay in self._graphs.items() if replay.last_use < since]:
            del self._graphs[key]

    def _record_anew(self, key: Key, slots: Slots, caller: torch.cuda.Stream) -> Replay | None:
        """A call, recorded; None if it cannot be."""
        recorder = self._recorder = Recorder.of(self._device, caller.cuda_stream)
        recorder.owners.add(self)
        if recorder.home != caller.cuda_stream:
            self._elsewhere += 1
            return None
        if not recorder.has_room():
            return None
        self._drop_outdated(key)
        try:
            replay = self._graphs[key] = self._record(recorder, slots)
        except Exception as error:  # noqa: BLE001  # whatever it is, the call itself can be made
            self._reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            text = "meshfuse: calls that come again cost the host as much as new ones: "
            text += self._reason
            warnings.warn(text, UserWarning, stacklevel=2)
            return None
        return replay

    def _drop_outdated(self, key: Key) -> None:
        """Graphs of states that will not come again keep memory that peers no longer use."""
        windows = [state[0] for state in key[1:]]
        for other in [k for k in self._graphs if [state[0] for state in k[1:]] != windows]:
            del self._graphs[other]

    def _record(self, recorder: Recorder, slots: Slots) -> Replay:
        records = [transport.record() for transport in self._transports]
        try:
            captured = self._capture(recorder, list(slots))
            for record in records:
                record.end()
            graph = FlaggedGraph(captured, [flag for record in records for flag in record.flags])
        except BaseException:
            for record in records:
                record.cancel()
            raise
        return Replay(graph, tuple(records), self._posted(), self._device)

    def _capture(self, recorder: Recorder, slots: Slots) -> torch.cuda.CUDAGraph:
        """Other threads go on meanwhile. What fails in a capture is said, not how that ends; and it
        ends, or the stream would record for ever, also where the user interrupts it."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        failure: BaseException | None = None
        streams = BoundStreams(self._device, recorder.workers)
        acts = tuple(self._bind(streams))
        with torch.cuda.stream(recorder.stream):
            graph.capture_begin(pool=recorder.memory(), capture_error_mode="thread_local")
            try:
                with streams:
                    for act in acts:
                        act(slots)
                    streams.join()
            except BaseException as error:  # noqa: BLE001  # raised again behind the capture's end
                failure = error
            try:
                graph.capture_end()
            except RuntimeError as error:
                failure = failure or error
        if failure is not None:
            recorder.leave_memory()
            raise failure
        graph.instantiate()
        recorder.add(graph)
        return graph

    def _posted(self) -> tuple[tuple[Group, int, str], ...]:
        counts = Counter(id(found.group) for found in self._transfers)
        first: dict[int, DirectTransfer] = {}
        for found in self._transfers:
            first.setdefault(id(found.group), found)
        return tuple(
            (found.group, counts[number], found.text)
            for number, found in first.items()
            if found.group is not None
        )


def _settings() -> tuple[Any, ...]:
    """What operations of torch depend on, beside their operands."""
    torch_c = torch._C
    return (
        torch_c._get_deterministic_algorithms(),
        torch_c._get_fp32_precision_getter("cuda", "matmul"),
        torch_c._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch_c._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch_c._get_cublas_allow_fp16_accumulation(),
        torch_c._get_blas_preferred_backend(),
        torch_c._get_flash_sdp_enabled(),
        torch_c._get_mem_efficient_sdp_enabled(),
        torch_c._get_math_sdp_enabled(),
        torch_c._get_cudnn_sdp_enabled(),
    )
