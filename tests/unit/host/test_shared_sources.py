"""What peers fetch, made where they read it: nothing is copied to be sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from host_loops import define, dense
from meshfuse import FusionDefinition, TensorView
from meshfuse.base.trace import Trace
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.transfers import SharedChunk
from meshfuse.expr import const
from meshfuse.host.check import check_host_program
from meshfuse.host.events import GiveBackSlot, PostTransfer, ReserveSlot
from meshfuse.host.executors import run_executable
from meshfuse.host.nodes import (
    Allocate,
    Chunk,
    Collective,
    Communicate,
    ForLoop,
    HostProgram,
    Node,
    OnStream,
    all_nodes,
)
from meshfuse.host.shared_sources import with_shared_sources
from meshfuse.host.uses import names_needed
from meshfuse.ir.axes import TensorName
from meshfuse.ir.schedule import MemoryType
from meshfuse.multidevice import Overlap
from meshfuse.runtime.compile import KernelCompiler
from peer_programs import multiply_then_sum, tensor_parallel_mlp
from peers_in_threads import ranks_of
from sharded_runs import X, integers, mesh_of, place


def split(tensor: torch.Tensor, d: int, axis: int) -> list[torch.Tensor]:
    return [part.contiguous() for part in tensor.chunk(d, axis)]


def sum_with_epilogue(
    d: int, rows: int
) -> tuple[FusionDefinition, list[list[torch.Tensor]], torch.Tensor]:
    """The program, what each rank has of its inputs, and what all ranks get."""
    k = 2 * d
    x, w, b = integers(rows, k), integers(3, k), integers(3)
    shards = [[*own, b] for own in zip(split(x, d, 1), split(w, d, 1), strict=True)]
    wanted = (x @ w.T + b).relu().half()
    return multiply_then_sum(d, rows, k, epilogue=True), shards, wanted


def shared_in(host: HostProgram) -> list[TensorName]:
    """Buffers in symmetric memory, made outside of loops."""
    assert check_host_program(host) == ()
    return [
        node.buffer
        for node in host.body
        if isinstance(node, Allocate) and node.memory is MemoryType.symmetric
    ]


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("d", [2, 3, 4])
def test_a_sum_of_which_more_is_made(d: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fd, shards, wanted = sum_with_epilogue(d, 2 * d * pieces)
    ranks = ranks_of(fd, d, Overlap.peers(pieces), shards[0], monkeypatch)
    assert len(shared_in(ranks.host)) == 1
    for calls in ranks.call(shards, 6):
        assert all(torch.equal(output, wanted) for [output] in calls)
    assert ranks.copies == [[]] * d


@pytest.mark.parametrize(("d", "rows"), [(2, 3), (3, 5), (4, 7), (4, 9), (4, 5)])
def test_blocks_of_unequal_size(d: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nine rows four ranks have 3, 3, 3 and none."""
    fd, shards, wanted = sum_with_epilogue(d, rows)
    ranks = ranks_of(fd, d, Overlap.peers(), shards[0], monkeypatch)
    assert len(shared_in(ranks.host)) == 1
    for calls in ranks.call(shards, 6):
        assert all(torch.equal(output, wanted) for [output] in calls)
    assert ranks.copies == [[]] * d


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("d", [2, 3, 4])
def test_megatron_s_pair(d: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, wide = 2 * d * pieces, 3 * d
    x, v, w, b = integers(rows, 4), integers(wide, 4), integers(4, wide), integers(4)
    shards = [[x, *own, b] for own in zip(split(v, d, 0), split(w, d, 1), strict=True)]
    fd = tensor_parallel_mlp(d, rows, wide)
    ranks = ranks_of(fd, d, Overlap.peers(pieces), shards[0], monkeypatch)
    for calls in ranks.call(shards, 6):
        assert all(torch.equal(output, (x @ v.T).relu() @ w.T + b) for [output] in calls)
    assert ranks.copies == [[]] * d


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("d", [2, 3])
def test_what_a_kernel_makes_to_be_gathered(
    d: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes where peers read, or in one piece, of which parts are copied that are fetched one
    by one."""
    rows, mesh = 2 * d * pieces, mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, rows, 4), dense(fd, 3 * d, 4)
        hidden = fd.ops.add(fd.ops.relu(x), x)
        y = fd.ops.relu(fd.ops.linear(hidden, w))
        place(mesh, {0: X}, x, hidden, w)
        place(mesh, {1: X}, y)
        fd.add_output(y)

    x, w = integers(rows, 4), integers(3 * d, 4)
    shards = [list(own) for own in zip(split(x, d, 0), split(w, d, 0), strict=True)]
    form, compiler = Overlap.peers(pieces), KernelCompiler()
    ranks = ranks_of(define(build), d, form, shards[0], monkeypatch, compiler=compiler)
    assert len(shared_in(ranks.host)) == (pieces == 1)
    wanted = ((x.relu() + x) @ w.T).relu().chunk(d, 1)
    for rank, calls in enumerate(ranks.call(shards, 5)):
        assert all(torch.equal(output, wanted[rank]) for [output] in calls)
    assert ranks.copies == [[2 * 4] * pieces * 5 * (pieces > 1)] * d


@pytest.mark.parametrize("pieces", [1, 2])
def test_many_sums_in_a_row(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with a residual: what is fetched of each sum is added to, and multiplied."""
    mesh, layers = mesh_of(2), 4

    def build(fd: FusionDefinition) -> None:
        x = dense(fd, 8, 4)
        weights = [(dense(fd, 6, 4), dense(fd, 4, 6)) for _ in range(layers)]
        place(mesh, {}, x)
        for wide, narrow in weights:
            place(mesh, {0: X}, wide)
            place(mesh, {1: X}, narrow)
            x = fd.ops.add(x, fd.ops.linear(fd.ops.relu(fd.ops.linear(x, wide)), narrow))
            place(mesh, {}, x)
        fd.add_output(x)

    x = integers(8, 4, low=-1, high=2)
    shards, wanted = [[x], [x]], x
    for _ in range(layers):
        wide, narrow = integers(6, 4, low=-1, high=2), integers(4, 6, low=-1, high=2)
        wanted = wanted + (wanted @ wide.T).relu() @ narrow.T
        for own, *parts in zip(shards, split(wide, 2, 0), split(narrow, 2, 1), strict=True):
            own += parts
    ranks = ranks_of(define(build), 2, Overlap.peers(pieces), shards[0], monkeypatch)
    assert len(shared_in(ranks.host)) == layers
    for calls in ranks.call(shards, 5):
        assert all(torch.equal(output, wanted) for [output] in calls)
    assert ranks.copies == [[]] * 2


def two_readers(fd: FusionDefinition) -> Sequence[TensorView]:
    """A sum in blocks, which each rank keeps, and all ranks multiply by columns of their own."""
    mesh = mesh_of(2)
    x, w, v = dense(fd, 8, 4), dense(fd, 4, 4), dense(fd, 6, 4)
    total = fd.ops.linear(x, w)
    y = fd.ops.linear(total, v)
    place(mesh, {1: X}, x, w, y)
    place(mesh, {0: X}, total, v)
    return total, y


@pytest.mark.parametrize("is_output", [False, True])
def test_a_sum_that_is_an_output_lies_where_outputs_do(
    is_output: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is copied to be sent, once in a call."""

    def build(fd: FusionDefinition) -> None:
        for output in two_readers(fd)[not is_output :]:
            fd.add_output(output)

    x, w, v = integers(8, 4), integers(4, 4), integers(6, 4)
    parts = split(x, 2, 1), split(w, 2, 1), split(v, 2, 0)
    shards = [list(own) for own in zip(*parts, strict=True)]
    ranks = ranks_of(define(build), 2, Overlap.peers(), shards[0], monkeypatch)
    assert len(shared_in(ranks.host)) == (not is_output)
    total = x @ w.T
    for rank, calls in enumerate(ranks.call(shards, 4)):
        for *sums, y in calls:
            assert torch.equal(y, (total @ v.T).chunk(2, 1)[rank])
            assert all(torch.equal(found, total.chunk(2)[rank]) for found in sums)
    assert ranks.copies == [[4 * 4] * 4 * is_output] * 2


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("d", [2, 3])
def test_calls_that_are_recorded(d: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pins of uses are part of the state in which a call begins, and none is left behind it."""
    fd, shards, wanted = sum_with_epilogue(d, 2 * d * pieces)
    ranks = ranks_of(fd, d, Overlap.peers(pieces), shards[0], monkeypatch)
    for calls in ranks.compare(shards, 20):
        assert all(torch.equal(output, wanted) for [output] in calls)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("d", [2, 3])
def test_flags_beside_a_course_may_come_late(
    d: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but peers waits for them: neither what comes next, nor the next use of their slot."""
    fd, shards, wanted = sum_with_epilogue(d, 2 * d * pieces)
    ranks = ranks_of(fd, d, Overlap.peers(pieces), shards[0], monkeypatch)
    ranks.world.is_late = True
    for calls in ranks.call(shards, 8):
        assert all(torch.equal(output, wanted) for [output] in calls)
    assert len(ranks.world.late) >= 8 * d * d * pieces


@pytest.mark.parametrize("times", [1, 2])
def test_a_source_that_is_fetched_twice_stays(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its readers are told by the number of its use, once."""

    def build(fd: FusionDefinition) -> None:
        fd.add_output(two_readers(fd)[1])

    shards = [torch.empty(8, 2), torch.empty(4, 2), torch.empty(3, 4)]
    host = ranks_of(define(build), 2, Overlap.peers(), shards, monkeypatch).host
    [name] = shared_in(host)
    body: list[Node] = []
    for node in host.body:
        if isinstance(node, Allocate) and node.buffer == name:
            node = replace(node, memory=MemoryType.global_)
        is_reader = isinstance(node, ForLoop) and name in names_needed(node)
        body += [node] * (times if is_reader else 1)
    found = list(with_shared_sources(body, host.buffers, ()))
    assert (found == list(host.body)) == (times == 1)
    assert (found == body) == (times == 2)
    assert list(with_shared_sources(body, host.buffers, [name])) == body


def rewritten(body: Sequence[Node], change: Callable[[Node], Sequence[Node]]) -> list[Node]:
    """Each node, in loops and outside, as what `change` makes of it."""
    found: list[Node] = []
    for node in body:
        if isinstance(node, ForLoop | OnStream):
            node = replace(node, body=tuple(rewritten(node.body, change)))
        found += change(node)
    return found


SPOILT = ["order", "gaps", "mesh", "length", "start", "other chunk", "view", "collective"]


@pytest.mark.parametrize("spoilt", ["", *SPOILT])
def test_only_what_is_fetched_as_it_lies(spoilt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in equal pieces, of which nothing knows two, and which nothing but the loop fills."""
    fd, shards, _ = sum_with_epilogue(2, 8)
    host = ranks_of(fd, 2, Overlap.peers(2), shards[0], monkeypatch).host
    [name], buffers = shared_in(host), dict(host.buffers)
    nodes = list(all_nodes(host.body))
    [fetch] = [n for n in nodes if isinstance(n, Communicate) and n.collective is Collective.fetch]
    [piece] = [node for node in nodes if isinstance(node, Chunk) and node.src == name]
    in_front: list[Node] = [piece] if spoilt == "view" else []
    match spoilt:
        case "order":
            buffers[fetch.out] = replace(buffers[fetch.out], order=(1, 0))
        case "gaps":
            buffers[fetch.out] = replace(buffers[fetch.out], gaps=True)
        case "mesh":
            buffers[name] = replace(buffers[name], sharding=None)
        case "length":
            buffers[name] = replace(buffers[name], shape=(const(5), const(3)))
    gathered = replace(fetch, collective=Collective.all_gather, owner=None, out=piece.out, number=9)

    def change(node: Node) -> Sequence[Node]:
        if isinstance(node, Allocate) and node.buffer == name:
            return [replace(node, memory=MemoryType.global_)]
        if node == piece:
            start = piece.start + 1 if spoilt == "start" else piece.start
            own = [replace(piece, start=start)]
            return [*own, replace(piece, out=fetch.out, axis=1)] if spoilt == "other chunk" else own
        if node == fetch and spoilt == "collective":
            return [replace(gathered, src=name_of_sum(nodes)), node]
        return [node]

    body = [*in_front, *rewritten(host.body, change)]
    found = list(with_shared_sources(body, buffers, ()))
    assert (found == list(host.body)) == (not spoilt)
    assert (found == body) == bool(spoilt)


def name_of_sum(nodes: Sequence[Node]) -> TensorName:
    """What is delivered, term by term."""
    posted = (node for node in nodes if isinstance(node, Communicate))
    return next(node.src for node in posted if node.collective is Collective.deliver)


def test_what_a_call_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each piece the memory first, all as large on all ranks, and last its end: behind the last
    that is fetched."""
    fd, shards, _ = sum_with_epilogue(2, 8)
    ranks = ranks_of(fd, 2, Overlap.peers(2), shards[0], monkeypatch)
    for executable in ranks.executables:
        plan, _ = executable.start(shards[0])
        asked = [found.asks for found in plan.bound if found.asks is not None]
        assert [type(asks) for asks in asked[:2]] == [ReserveSlot] * 2
        pieces = [
            asks for asks in asked if isinstance(asks, ReserveSlot) and asks.piece is not None
        ]
        assert [(asks.piece, asks.chunk.most_bytes) for asks in pieces] == [(0, 24), (1, 24)]
        assert isinstance(asked[-1], GiveBackSlot) and asked[-1].slot == pieces[0].slot
        assert isinstance(asked[-2], PostTransfer) and asked[-2].transfer.is_fetch
        assert plan.meetings == plan.communications + 1


@dataclass
class Asked:
    """In place of a communicator: what a call asks of it. No peer sends anything."""

    fails: bool = False
    log: list[str] = field(default_factory=list[str])
    has_replays = False

    def entry(self, agreements: object, has_readers: bool) -> Any:
        log = SimpleNamespace(leave=lambda: None)
        return SimpleNamespace(
            is_of=lambda communicator: True, bind=lambda bound: None, enter=lambda call, inputs: log
        )

    def rank(self) -> int:
        return 0

    def reserve(self, chunk: SharedChunk) -> torch.Tensor:
        self.log.append(f"reserve {list(chunk.shape)}")
        return chunk.ordinary()

    def post(self, request: CollectiveRequest) -> Any:
        self.log.append(request.collective)
        request.out.fill_(0)
        return SimpleNamespace(wait=lambda: None, group=None, when_arrived=lambda tell: tell())

    def give_back(self, team: tuple[int, ...], memory: Sequence[torch.Tensor]) -> None:
        assert team == (0, 1)
        self.log.append(f"give back {[list(chunk.shape) for chunk in memory]}")
        if self.fails:
            raise KeyboardInterrupt

    def give_up(self, reason: str) -> None:
        self.log.append("give up")


@pytest.mark.parametrize("is_traced", [False, True])
def test_memory_is_given_back_however_a_plan_is_run(
    is_traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that cannot has other slots than its peers, and tells them."""
    fd, shards, _ = sum_with_epilogue(2, 8)
    one_stream = "number_of_streams(1)"
    ranks = ranks_of(fd, 2, Overlap.peers(2), shards[0], monkeypatch, one_stream)
    trace = Trace() if is_traced else None
    for fails in (False, True):
        asked = Asked(fails)
        with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
            run_executable(ranks.executables[0], shards[0], cast(Communicator, asked), trace)
        block = "[2, 3]"
        of_piece = [f"reserve {block}", "deliver", "deliver", "fetch", "fetch"]
        wanted = [f"reserve {block}"] * 2 + of_piece * 2 + [f"give back [{block}, {block}]"]
        assert asked.log == wanted + ["give up"] * fails
