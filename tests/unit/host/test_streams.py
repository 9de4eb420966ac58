"""Loops on worker streams: the text, what the verifier says, and in which order things are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch

from host_loops import gathered_rows
from meshfuse import FusionDefinition
from meshfuse.base.errors import InvariantError, UserError
from meshfuse.base.options import NO_OPTIONS, with_options
from meshfuse.base.trace import Trace
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.communicator import Communicator
from meshfuse.expr import const, symbol
from meshfuse.host import cuda_streams
from meshfuse.host.cooperative import CooperativeRun
from meshfuse.host.events import CALLER, AwaitMark, AwaitWork, Event, Mark
from meshfuse.host.executors import run_executable
from meshfuse.host.load import load
from meshfuse.host.memory_use import memory_use
from meshfuse.host.nodes import ForLoop, HostProgram, Node, OnStream, Record, WaitEvent, all_nodes
from meshfuse.host.parser import parse_host_program
from meshfuse.host.plan import Executable
from meshfuse.host.printer import print_host_program, print_node
from meshfuse.host.simulate import simulate
from meshfuse.host.stream_order import without_known_marks
from meshfuse.host.verify import verify_host_program
from meshfuse.ir.mesh import ParallelType
from meshfuse.ir.parser import parse_program
from meshfuse.pipeline import compile
from meshfuse.runtime.arguments import signature_of
from sharded_runs import integers

STREAM, X = ParallelType.stream, ParallelType.mesh_x


def added_columns(rows: int) -> FusionDefinition:
    """The sum along axis 0, row by row."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([rows, 5], contiguity=True)
        y = fd.define_tensor([rows, 5], contiguity=True)
        z = fd.ops.sum(fd.ops.mul(x, y), [0])
        z.axis(0).parallelize(STREAM)
        fd.add_output(z)
    return fd


def lowered(fd: FusionDefinition, inputs: Sequence[torch.Tensor], streams: int) -> HostProgram:
    names = [f"number_of_streams({streams})", "check_host_program"]
    options = with_options(NO_OPTIONS, names)
    program = parse_program(repr(fd.fusion))
    host = compile(program, signature_of(inputs), kernels=False, options=options).host
    assert parse_host_program(print_host_program(host)) == host
    return host


def chunks_of(count: int) -> list[torch.Tensor]:
    return [integers(count, 1, 2, 4), integers(4, 5)]


def marks(host: HostProgram) -> list[str]:
    """What the text says of streams."""
    lines = [line.strip() for line in print_host_program(host).splitlines()]
    kinds = ("for_loop", "on_stream", "record", "wait_event")
    return [line for line in lines if line.startswith(kinds)]


# The text.


def test_iterations_take_turns_on_streams_and_the_caller_waits_for_the_last_of_each() -> None:
    assert marks(lowered(gathered_rows(2, 8), chunks_of(8), 4)) == [
        "record(0, 0)",
        "for_loop(j0, 8) {",
        "on_stream(j0 % 4) {",
        "wait_event(0, 0)",
        "record(1, j0)",
        "for_loop(j1, 4) {",
        "wait_event(1, 7 - j1)",
    ]


def test_fewer_iterations_than_streams() -> None:
    text = marks(lowered(gathered_rows(2, 3), chunks_of(3), 4))
    assert text[1:3] == ["for_loop(j0, 3) {", "on_stream(j0) {"]
    assert text[-2:] == ["for_loop(j1, 3) {", "wait_event(1, 2 - j1)"]


def test_a_count_that_a_call_gives() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4], contiguity=True)
        y = fd.ops.relu(x)
        y.inner_split(0, 3)
        y.axis(0).parallelize(STREAM)
        fd.add_output(y)
    host = lowered(fd, [integers(7, 4)], 2)
    join = [node for node in host.body if isinstance(node, ForLoop)][1]
    assert str(join.count).startswith("min(")
    for rows in (0, 1, 2, 6, 7, 20):
        x = integers(rows, 4)
        executable = load(host, {}, None, 0, torch.device("cpu"))
        [found] = run_executable(executable, [x], Communicator({}))
        assert torch.equal(found, x.relu())


@pytest.mark.parametrize("streams", [1, 4])
def test_no_streams_where_there_is_one_or_one_iteration(streams: int) -> None:
    count = 5 if streams == 1 else 1
    host = lowered(gathered_rows(2, count), chunks_of(count), streams)
    assert not any(isinstance(node, OnStream | Record | WaitEvent) for node in all_nodes(host.body))


def test_sums_are_added_to_in_order() -> None:
    inputs = [integers(6, 5), integers(6, 5)]
    host = lowered(added_columns(6), inputs, 2)
    [on_stream] = [node for node in all_nodes(host.body) if isinstance(node, OnStream)]
    texts = [print_node(node).splitlines()[0] for node in on_stream.body]
    first, last = texts.index("wait_event(2, j0 - 1)"), texts.index("record(2, j0)")
    assert texts[first + 1].startswith("evaluate(into=T3")
    assert last == first + 2
    assert texts[-1] == "record(1, j0)"


def test_a_sum_within_an_iteration_needs_no_order() -> None:
    with FusionDefinition() as fd:
        a = fd.define_tensor([5, 7], contiguity=True)
        c = fd.ops.matmul(a, fd.define_tensor([7, 6], contiguity=True))
        for axis, count in ((0, 2), (3, 3)):
            c.outer_split(axis, count)
            c.axis(axis).parallelize(STREAM)
        fd.add_output(fd.ops.relu(c))
    host = lowered(fd, [integers(5, 7), integers(7, 6)], 4)
    assert marks(host) == [
        "record(0, 0)",
        "for_loop(j0, 2) {",
        "on_stream(j0) {",
        "wait_event(0, 0)",
        "for_loop(j1, 3) {",
        "record(1, j0)",
        "for_loop(j2, 2) {",
        "wait_event(1, 1 - j2)",
    ]


def test_a_number_of_streams_below_one() -> None:
    with pytest.raises(UserError, match="at least one stream"):
        added_columns(4).execute(
            [integers(4, 5), integers(4, 5)], _enable_options=["number_of_streams(0)"]
        )


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_simulated_values_on_any_number_of_streams(ranks: int, streams: int) -> None:
    host = lowered(gathered_rows(ranks, 5), chunks_of(5), streams)
    a, b = integers(5, ranks, 2, 4), integers(4, 5)
    executables = {rank: load(host, {}, None, rank, torch.device("cpu")) for rank in range(ranks)}
    shards = {rank: [a[:, rank : rank + 1].contiguous(), b] for rank in range(ranks)}
    for [found] in simulate(executables, shards).values():
        assert torch.equal(found, a @ b)


@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_memory_is_that_of_one_iteration_for_each_stream(streams: int) -> None:
    """Inputs and the result are there all the time; an iteration gathers [2, 2, 4] floats."""
    host = lowered(gathered_rows(2, 6), chunks_of(6), streams)
    whole = 4 * (6 * 2 * 4 + 4 * 5 + 6 * 2 * 2 * 5)
    assert memory_use(host, {}, 0).peak == whole + min(streams, 6) * 4 * 2 * 2 * 4


# The verifier.


def spoilt(change: Callable[[OnStream], list[Node]]) -> HostProgram:
    host = lowered(gathered_rows(2, 5), chunks_of(5), 2)
    body: list[Node] = []
    for node in host.body:
        if isinstance(node, ForLoop) and isinstance(node.body[0], OnStream):
            node = replace(node, body=tuple(change(node.body[0])))
        body.append(node)
    return replace(host, body=tuple(body))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda on: [replace(on, body=on.body[:-2])], "makes and does not free"),
        (lambda on: [replace(on, body=(on,))], "another stream in it"),
        (lambda on: [on, Record(0, const(1))], "event 0 stands twice"),
        (lambda on: [on, WaitEvent(7, const(0))], "nothing records this event"),
    ],
)
def test_what_streams_must_not_do(change: Callable[[OnStream], list[Node]], reason: str) -> None:
    with pytest.raises(InvariantError, match=reason):
        verify_host_program(spoilt(change))


def test_what_an_event_that_comes_later_means() -> None:
    """An event that nothing has marked yet: no plan is made."""
    host = spoilt(lambda on: [WaitEvent(1, symbol("j0")), on])
    executable = load(host, {}, None, 0, torch.device("cpu"))
    with pytest.raises(InvariantError, match="there is none"):
        executable.start(chunks_of(5))


# Plans.


@dataclass(frozen=True)
class Told:
    """An action of which only what it tells matters."""

    stream: int
    tells: Event | None = None
    posts: bool = False
    is_idle: bool = False


def test_streams_do_not_wait_for_what_they_know() -> None:
    entry, done, again = Mark(0, 0), Mark(1, 0), Mark(1, 1)
    kept = [
        Told(CALLER, entry),
        Told(0, AwaitMark(entry)),
        Told(0),
        Told(0, done),
        Told(1, AwaitMark(done)),
        Told(1, again),
        Told(CALLER, AwaitMark(again)),
    ]
    idle = [
        Told(0, AwaitMark(Mark(1, -1))),  # before the first iteration
        Told(0, AwaitMark(done)),  # its own
        Told(0, AwaitMark(entry)),  # once more
        Told(1, AwaitMark(entry)),  # known by way of stream 0
        Told(CALLER, AwaitMark(done)),  # known by way of stream 1
    ]
    places = {0: 1, 1: 4, 2: 4, 3: 5, 4: 7}
    actions = list(kept)
    for which in reversed(range(len(idle))):
        actions.insert(places[which], idle[which])
    assert without_known_marks(actions) == kept


def test_what_leaves_a_stream_as_it_is_makes_no_mark_worth_waiting_for() -> None:
    entry, done, end = Mark(0, 0), Mark(1, 0), Mark(2, 0)
    view = Told(0, is_idle=True)
    kept = [
        Told(CALLER, entry),  # behind whatever the caller has there already
        Told(0, AwaitMark(entry)),
        view,
        Told(0),
        Told(0, done),
        view,
        Told(1),
        Told(1, AwaitMark(done)),
    ]
    actions = [
        *kept[:6],
        Told(0, end),  # the same as `done`
        *kept[6:],
        Told(1, AwaitMark(end)),
        Told(1, Mark(3, 0)),  # for nobody
        Told(2, Mark(3, 1)),
        Told(1, AwaitMark(Mark(3, 1))),  # of a stream on which nothing is
    ]
    assert without_known_marks(actions) == kept
    sent = [Told(0, AwaitWork(4)), Told(0, end), Told(1, AwaitMark(end))]
    assert without_known_marks(sent) == sent  # what has been sent has come by then


# Running.


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
    transport.leads_in = lambda: True
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
        def make_stream(device: torch.device) -> CudaStream:
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
