"""Loops on worker streams as they run: in which order things are posted, awaited and done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch

from host_loops import gathered_rows
from meshfuse.base.trace import Trace
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.communicator import Communicator
from meshfuse.host import cuda_streams
from meshfuse.host.cooperative import CooperativeRun
from meshfuse.host.direct import DirectPlan
from meshfuse.host.executors import run_executable
from meshfuse.host.load import load
from meshfuse.host.plan import Executable
from stream_programs import chunks_of, lowered

# On CPUs.


@dataclass(eq=False)
class Transfer:
    """A collective of two ranks that both have the same; it arrives when the test says so."""

    request: CollectiveRequest
    log: list[str]
    has_arrived: bool
    posts_again: bool = False
    group: None = None

    @property
    def posting(self) -> Transfer:
        return self

    def wait(self) -> None:
        self.log.append(f"wait {self.request.number}")
        out, src = self.request.out, self.request.src
        out.view(2, -1).copy_(src.reshape(1, -1).expand(2, -1))

    def when_arrived(self, tell: Callable[[], None]) -> None:
        tell()


@dataclass(eq=False)
class Transport:
    """In place of a communicator. `arrive` says which numbers are there when they are asked for."""

    arrived: frozenset[int] = frozenset()
    posts_again: bool = False
    fails_at: int | None = None
    log: list[str] = field(default_factory=list[str])

    def post(self, request: CollectiveRequest) -> Transfer:
        self.log.append(f"post {request.number}")
        if request.number == self.fails_at:
            raise ValueError("the transport is out of order")
        return Transfer(request, self.log, request.number in self.arrived, self.posts_again)

    def give_up(self, reason: str) -> None:
        self.log.append(f"gave up: {reason}")


def executable_of(chunks: int, streams: int) -> Executable:
    host = lowered(gathered_rows(2, chunks), chunks_of(chunks), streams)
    return load(host, {}, None, 0, torch.device("cpu"))


def run_on(
    transport: Transport, chunks: int, streams: int, trace: Trace | None = None
) -> list[str]:
    """The order of posts, waits and products; results are checked."""
    executable, (a, b) = executable_of(chunks, streams), chunks_of(chunks)
    plan, slots = executable.start([a, b])
    assert plan.order is not None
    call = CooperativeRun(plan, plan.order, slots, cast(Communicator, transport), trace)
    [found] = call.run(executable)
    assert torch.equal(found, (a @ b).expand(chunks, 2, 2, 5))
    assert call.to_come == 0
    return transport.log


def test_all_streams_post_before_the_first_blocks() -> None:
    log = run_on(Transport(), 4, 4)
    assert log == [*(f"post {k}" for k in range(4)), *(f"wait {k}" for k in range(4))]


def test_an_iteration_runs_behind_the_one_before_it_on_its_stream() -> None:
    """There are never more chunks under way than streams."""
    log = run_on(Transport(), 5, 2)
    assert log == [
        *("post 0", "post 1", "wait 0", "post 2", "wait 1", "post 3"),
        *("wait 2", "post 4", "wait 3", "wait 4"),
    ]


def test_what_has_arrived_goes_first() -> None:
    log = run_on(Transport(arrived=frozenset({2})), 4, 4)
    assert log[3:5] == ["wait 2", "post 3"]
    assert log[5:] == ["wait 0", "wait 1", "wait 3"]


def test_what_has_arrived_in_time_is_awaited_in_program_order() -> None:
    log = run_on(Transport(arrived=frozenset(range(5))), 5, 4)
    assert log == [f"{verb} {k}" for k in range(5) for verb in ("post", "wait")]


def test_collectives_that_post_again_keep_program_order() -> None:
    """Ranks post in one order, whatever has arrived where."""
    for arrived in (frozenset[int](), frozenset({1, 3}), frozenset(range(4))):
        log = run_on(Transport(arrived=arrived, posts_again=True), 4, 4)
        assert log == [f"{verb} {k}" for k in range(4) for verb in ("post", "wait")]


def test_traces_have_all_that_was_done() -> None:
    trace = Trace()
    run_on(Transport(), 4, 4, trace)
    assert sum(span.meeting is not None for span in trace.spans) == 4
    assert sum(span.meeting is None for span in trace.spans) == 4


def test_an_error_in_a_loop_is_told_to_the_peers() -> None:
    transport = Transport(fails_at=2)
    executable, inputs = executable_of(4, 4), chunks_of(4)
    plan, _ = executable.start(inputs)
    with pytest.raises(ValueError, match="out of order"):
        _started(executable, inputs, transport)
    assert plan.communications == 4
    assert transport.log[-1] == "gave up: ValueError: the transport is out of order"


def _started(executable: Executable, inputs: list[torch.Tensor], transport: Any) -> object:
    """A call whose ranks have agreed already."""
    transport.entry = lambda agreements, has_readers: transport
    transport.is_of = lambda communicator: True
    transport.bind = lambda bound: None
    transport.enter = lambda call, inputs: transport
    transport.leave = lambda: None
    return run_executable(executable, inputs, transport)


# CUDA, by its calls.


@dataclass(eq=False)
class Cuda:
    """The calls of torch.cuda that streams need, recorded as text."""

    log: list[str] = field(default_factory=list[str])
    current_name: str = "caller"
    streams: int = 0
    events: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def make_stream(device: torch.device, priority: int = 0) -> CudaStream:
            self.streams += 1
            return CudaStream(f"worker {self.streams - 1}", self)

        def make_event() -> CudaEvent:
            self.events += 1
            return CudaEvent()

        monkeypatch.setattr(torch.cuda, "Stream", make_stream)
        monkeypatch.setattr(torch.cuda, "Event", make_event)
        monkeypatch.setattr(cuda_streams, "Streams", lambda _: self)
        monkeypatch.setattr(cuda_streams, "set_stream", self.set_stream)
        monkeypatch.setattr(cuda_streams, "is_capturing", lambda _: False)
        monkeypatch.setattr(torch.cuda, "device", CudaGuard)

    def current(self) -> CudaStream:
        return CudaStream(self.current_name, self)

    def set_stream(self, stream: CudaStream) -> None:
        self.current_name = stream.name


@dataclass(frozen=True)
class CudaStream:
    name: str
    cuda: Cuda = field(compare=False)

    def wait_stream(self, other: CudaStream) -> None:
        self.cuda.log.append(f"{self.name} waits for all of {other.name}")


@dataclass(eq=False)
class CudaEvent:
    marked: str = ""

    def record(self, stream: CudaStream) -> None:
        self.marked = f"mark of {stream.name}"

    def wait(self, stream: CudaStream) -> None:
        stream.cuda.log.append(f"{stream.name} waits for {self.marked}")


@dataclass(frozen=True)
class CudaGuard:
    device: torch.device

    def __enter__(self) -> None:
        assert self.device.type == "cuda"

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    monkeypatch.setattr(cuda_streams.StreamPool, "_pools", {})
    fake = Cuda()
    fake.install(monkeypatch)
    return fake


def on_cuda(chunks: int, streams: int) -> Executable:
    executable = executable_of(chunks, streams)
    executable.device = torch.device("cuda", 0)
    return executable


@dataclass(eq=False)
class CudaTransport(Transport):
    """Says on which stream it is asked."""

    has_replays = False
    cuda: Cuda = field(default_factory=Cuda)

    def post(self, request: CollectiveRequest) -> Transfer:
        self.cuda.log.append(f"post {request.number} on {self.cuda.current_name}")
        return super().post(request)


def test_on_cuda_all_is_issued_in_program_order(cuda: Cuda) -> None:
    executable, (a, b) = on_cuda(3, 2), chunks_of(3)
    transport = CudaTransport(cuda=cuda)
    for _ in range(2):
        cuda.log.clear()
        [found] = cast(list[torch.Tensor], _started(executable, [a, b], transport))
        assert torch.equal(found, (a @ b).expand(3, 2, 2, 5))
        assert cuda.current_name == "caller"
        assert cuda.log == [
            "post 0 on caller",  # which is the first worker stream
            "worker 1 waits for mark of caller",
            "post 1 on worker 1",
            "post 2 on caller",
            "caller waits for mark of worker 1",
        ]
    assert (cuda.streams, cuda.events) == (2, 2)  # made in the first call


def test_on_cuda_an_error_leaves_the_callers_stream_behind_all_that_was_issued(cuda: Cuda) -> None:
    executable, inputs = on_cuda(4, 2), chunks_of(4)
    transport = CudaTransport(fails_at=1, cuda=cuda)
    with pytest.raises(ValueError, match="out of order"):
        _started(executable, inputs, transport)
    assert cuda.current_name == "caller"
    assert cuda.log[-1] == "caller waits for all of worker 1"
    assert transport.log[-1].startswith("gave up")


def test_peers_are_told_of_outputs_that_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of calls that may be replayed have memory before anything is done."""
    executable, (a, b) = executable_of(2, 2), chunks_of(2)
    plan, slots = executable.start([a, b])
    transport: Any = Transport()
    direct = DirectPlan(executable, replace(plan, agreements=()), transport)

    def make(slots: list[Any]) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(direct, "_makes", (make,))
    streams: Any = nullcontext()
    for _ in range(2):  # no turn is left held
        with pytest.raises(MemoryError):
            direct._run_on(streams, slots)
    assert transport.log == ["gave up: MemoryError: no room"] * 2
