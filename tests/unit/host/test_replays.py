"""Calls that come again, over a stand-in for CUDA's graphs: which are recorded."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshfuse.base.errors import CommunicationError
from meshfuse.dist.direct import DirectTransfer
from meshfuse.host import recorder, replays
from meshfuse.host.recorder import Recorder
from meshfuse.host.replays import Replays

CUDA = torch.device("cuda", 0)
HOME, OTHER = (SimpleNamespace(cuda_stream=handle) for handle in (5, 6))


@dataclass
class Cuda:
    """`log`: captures, launches with the values of their flags, and what groups count."""

    log: list[object] = field(default_factory=list[object])
    fails: bool = False
    is_interrupted: bool = False
    is_capturing: bool = False
    pools: Iterator[int] = field(default_factory=count)
    used: list[int] = field(default_factory=list[int])
    left: list[int] = field(default_factory=list[int])

    def leave(self, device: int, pool: int) -> None:
        self.left.append(pool)
        raise RuntimeError("not recording to it")

    def graph(self, keep_graph: bool) -> Any:
        assert keep_graph
        return Graph(self)

    def flagged(self, graph: Any, flags: list[Any]) -> Any:
        assert flags == [(64, 1)]
        return SimpleNamespace(
            graph=graph, launch=lambda stream, values: self.log.append((stream, *values))
        )


@dataclass(eq=False)
class Graph:
    cuda: Cuda

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        self.cuda.log.append("begin")
        self.cuda.used.append(pool)

    def capture_end(self) -> None:
        self.cuda.log.append("end")

    def instantiate(self) -> None: ...


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    found = Cuda()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", found.graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: "recording")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(found.pools))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.leave, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.is_capturing)
    monkeypatch.setattr(replays, "FlaggedGraph", found.flagged)
    monkeypatch.setattr(replays, "BoundStreams", Streams)
    monkeypatch.setattr(replays, "_settings", lambda: ())
    yield found
    Recorder._found.clear()


class Streams:
    def __init__(self, device: torch.device, pool: object) -> None: ...

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *error: object) -> None: ...

    def join(self) -> None: ...


@dataclass
class Transport:
    """`windows`, `slot`: its state. `number`: of the last use."""

    windows: int = 1
    slot: int = 0
    number: int = 0
    cancelled: int = 0

    def state(self) -> tuple[object, ...]:
        return self.windows, self.slot

    def record(self) -> Any:
        return SimpleNamespace(
            flags=[(64, 1)], end=lambda: None, cancel=self.cancel, repeat=self.repeat
        )

    def cancel(self) -> None:
        self.cancelled += 1

    def repeat(self) -> list[int]:
        self.number += 1
        return [self.number]


@dataclass
class Calls:
    """Calls of a plan with one input, a number and an output."""

    cuda: Cuda
    transport: Transport | None = field(default_factory=Transport)

    def __post_init__(self) -> None:
        group = SimpleNamespace(
            transport=self.transport,
            repeat=lambda transfers, device, text: self.cuda.log.append((transfers, text)),
        )
        transfers = [SimpleNamespace(group=group, text=text) for text in ("fetch 1", "fetch 2")]
        self.replays = Replays(CUDA, self.bind, cast(list[DirectTransfer], transfers), 2, [2])
        self.x, self.out = torch.zeros(2, 3), torch.zeros(2)

    def bind(self, streams: Any) -> Iterator[Any]:
        def act(slots: list[Any]) -> None:
            if self.cuda.fails:
                raise RuntimeError("out of memory\nat all")
            if self.cuda.is_interrupted:
                raise KeyboardInterrupt
            self.cuda.log.append("act")
            slots[3] = None

        yield act

    def call(
        self, x: torch.Tensor | None = None, number: float = 1.0, stream: Any = HOME
    ) -> list[object]:
        """What the log has of one; nothing of a call that is to be made."""
        before = len(self.cuda.log)
        slots = [self.x if x is None else x, number, self.out, "kept"]
        has_run = self.replays.has_run(slots, stream)
        assert slots[3] == "kept"
        found = self.cuda.log[before:]
        assert has_run == (found[-1:] == [(2, "fetch 1")])
        return found

    def settled(self) -> Calls:
        """Behind the first call, and those that are counted only."""
        for _ in range(1 + replays.SIGHTINGS):
            assert not self.call()
        return self


RECORDED = ["begin", "act", "end"]


def test_a_call_is_recorded_when_it_has_come_again(cuda: Cuda) -> None:
    calls = Calls(cuda).settled()
    assert calls.call() == [*RECORDED, (5, 1), (2, "fetch 1")]
    assert calls.call() == [(5, 2), (2, "fetch 1")]
    assert str(calls.replays) == (
        "2 of 5 calls between peers were replayed as CUDA graphs; graphs kept: 1"
    )


def test_it_is_the_same_call_in_another_state_of_the_transport(cuda: Cuda) -> None:
    """So it need not be seen again, but recorded: it has other memory."""
    calls = Calls(cuda).settled()
    assert calls.transport is not None
    for slot in range(3):
        calls.transport.slot = slot
        assert calls.call()[:3] == RECORDED
    calls.transport.slot = 1
    assert calls.call() == [(5, 4), (2, "fetch 1")]


def test_graphs_end_with_the_memory_that_they_were_made_for(cuda: Cuda) -> None:
    calls = Calls(cuda).settled()
    assert calls.transport is not None
    for slot in range(3):
        calls.transport.slot = slot
        assert calls.call()[:3] == RECORDED
    calls.transport.windows = 2
    assert calls.call()[:3] == RECORDED
    assert len(calls.replays._graphs) == 1


def test_other_tensors_and_numbers_are_another_call(cuda: Cuda, monkeypatch: Any) -> None:
    calls = Calls(cuda).settled()
    assert calls.call()
    assert not calls.call(x=calls.x.clone())
    assert not calls.call(x=calls.x.view(3, 2).T)
    assert not calls.call(number=-1.0)
    assert not calls.call(number=1)
    calls.out = torch.zeros(2)
    assert not calls.call()
    monkeypatch.setattr(replays, "_settings", lambda: ("deterministic",))
    assert not calls.call()


def test_zeros_of_both_signs_differ(cuda: Cuda) -> None:
    calls = Calls(cuda).settled()
    for _ in range(replays.SIGHTINGS):
        assert not calls.call(number=0.0)
    assert calls.call(number=0.0)
    assert not calls.call(number=-0.0)


def test_graphs_are_of_one_stream(cuda: Cuda) -> None:
    """They share memory."""
    calls = Calls(cuda).settled()
    assert calls.call()
    for _ in range(4):
        assert not calls.call(stream=OTHER)
    assert calls.call()
    assert str(calls.replays).endswith(
        "; 2 calls came from another stream than those that have graphs"
    )


def test_nothing_is_recorded_within_a_users_capture(cuda: Cuda) -> None:
    calls = Calls(cuda).settled()
    cuda.is_capturing = True
    assert not calls.call()
    cuda.is_capturing = False
    assert calls.call()
    cuda.is_capturing = True
    assert not calls.call()


def test_what_cannot_be_recorded_is_made_and_said_once(cuda: Cuda) -> None:
    calls = Calls(cuda).settled()
    cuda.fails = True
    with pytest.warns(UserWarning, match=r"cost the host as much as new ones: out of memory$"):
        assert calls.call() == ["begin", "end"]
    assert calls.transport is not None and calls.transport.cancelled == 1
    cuda.fails = False
    assert not calls.call()
    assert cuda.left == [0] and Recorder.of(CUDA, 5).memory() == 1
    assert str(calls.replays) == (
        "0 of 5 calls between peers were replayed as CUDA graphs; out of memory"
    )


def test_an_interrupt_ends_what_it_comes_into(cuda: Cuda) -> None:
    """A capture that goes on would have all that the thread does on its stream from then on."""
    calls = Calls(cuda).settled()
    cuda.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        calls.call()
    assert cuda.log == ["begin", "end"] and cuda.left == [0]
    assert calls.transport is not None and calls.transport.cancelled == 1
    cuda.is_interrupted = False
    assert calls.call()[:3] == RECORDED


def test_graphs_share_memory_while_there_are_any(cuda: Cuda) -> None:
    calls = Calls(cuda).settled()
    assert calls.transport is not None
    for slot in range(3):
        calls.transport.slot = slot
        assert calls.call()
    assert cuda.used == [0, 0, 0]
    del calls
    gc.collect()
    assert Calls(cuda).settled().call()
    assert cuda.used[3:] == [1]


def test_without_symmetric_memory_it_is_over_at_once(cuda: Cuda) -> None:
    calls = Calls(cuda, transport=None)
    for _ in range(4):
        assert not calls.call()
    assert str(calls.replays).endswith("; some do not go through symmetric memory")


def test_graphs_make_room_when_they_were_of_no_use_for_long(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all plans of a device together."""
    monkeypatch.setattr(recorder, "MOST_GRAPHS", 3)
    monkeypatch.setattr(recorder, "LONG", 20)
    monkeypatch.setattr(recorder, "_PAUSE", 4)
    first, second = Calls(cuda), Calls(cuda)
    assert not first.call() and not second.call()
    tensors = [torch.zeros(2, 3) for _ in range(3)]
    for _ in range(replays.SIGHTINGS):
        assert not any(calls.call(x) for x in tensors for calls in (first, second))
    assert first.call(tensors[0]) and first.call(tensors[1]) and second.call(tensors[2])
    for _ in range(8):
        assert not second.call(tensors[0])
        assert first.call(tensors[1])[1:] == [(2, "fetch 1")]
    for _ in range(8):
        second.call(tensors[0])
        assert first.call(tensors[1])[1:] == [(2, "fetch 1")]
    assert second.call(tensors[0])[1:] == [(2, "fetch 1")]
    assert first.call(tensors[0])[:3] == RECORDED  # it had to go, as had the second's only one


def test_errors_of_a_group_are_raised(cuda: Cuda) -> None:
    calls = Calls(cuda).settled()

    def fail(*counted: object) -> None:
        raise CommunicationError("the group is broken")

    for transfer in calls.replays._transfers:
        cast(Any, transfer.group).repeat = fail
    with pytest.raises(CommunicationError, match="is broken"):
        calls.call()
