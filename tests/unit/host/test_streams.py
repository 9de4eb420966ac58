"""Loops on worker streams: the text, what the verifier says, and what a plan leaves out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from host_loops import gathered_rows
from meshfuse import FusionDefinition
from meshfuse.base.errors import InvariantError, UserError
from meshfuse.dist.communicator import Communicator
from meshfuse.expr import const, symbol
from meshfuse.host.events import CALLER, AwaitMark, AwaitWork, Event, Mark
from meshfuse.host.executors import run_executable
from meshfuse.host.load import load
from meshfuse.host.memory_use import memory_use
from meshfuse.host.nodes import ForLoop, HostProgram, Node, OnStream, Record, WaitEvent, all_nodes
from meshfuse.host.printer import print_host_program, print_node
from meshfuse.host.simulate import simulate
from meshfuse.host.stream_order import without_known_marks
from meshfuse.host.verify import verify_host_program
from meshfuse.ir.mesh import ParallelType
from sharded_runs import integers
from stream_programs import chunks_of, lowered

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
