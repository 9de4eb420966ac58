"""Pieces of what peers send: the iterations of loops in one another take turns on streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from golden_text import GoldenCheck
from host_bodies import A, B, C, D, allocate, copy, reduce
from meshfuse.base.options import NO_OPTIONS, with_options
from meshfuse.expr import Symbol, const, free_symbols, substitute
from meshfuse.host.check import check_host_program
from meshfuse.host.faults import FaultKind
from meshfuse.host.load import load
from meshfuse.host.memory_use import memory_use
from meshfuse.host.nests import with_nests
from meshfuse.host.nodes import (
    Chunk,
    ForLoop,
    HostProgram,
    Node,
    OnStream,
    WaitEvent,
    all_nodes,
)
from meshfuse.host.prediction import Transmission, predict_items
from meshfuse.host.printer import print_host_program
from meshfuse.host.simulate import simulate
from meshfuse.host.timeline import Lane
from meshfuse.kernel.nodes import IndexName
from meshfuse.pipeline import compile
from meshfuse.runtime.arguments import signature_of
from peer_programs import gather_then_multiply
from sharded_runs import integers
from slow_devices import products_and_links

RATES = products_and_links(8.0)


def in_pieces(d: int, rows: int, pieces: int, streams: int = 4) -> HostProgram:
    """relu(x [rows, 4] @ w [4, 5]), of which blocks of x come in pieces."""
    program = gather_then_multiply(d, rows, pieces=pieces).fusion.recording.program
    options = with_options(NO_OPTIONS, [f"number_of_streams({streams})"])
    signature = signature_of([torch.empty(rows // d, 4), torch.empty(4, 5)])
    return compile(program, signature, kernels=False, options=options).host


def test_text(golden: GoldenCheck) -> None:
    golden("host_pieces", print_host_program(in_pieces(2, 8, 2)))


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_values(d: int, pieces: int, streams: int) -> None:
    host = in_pieces(d, 4 * d, pieces, streams)
    assert check_host_program(host) == ()
    x, w = integers(4 * d, 4), integers(4, 5)
    shards = {rank: [block.contiguous(), w] for rank, block in enumerate(x.chunk(d))}
    executables = {rank: load(host, {}, None, rank, torch.device("cpu")) for rank in range(d)}
    for [found] in simulate(executables, shards).values():
        assert torch.equal(found, (x @ w).relu())


@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_each_stream_has_one_piece(streams: int) -> None:
    """On rank 0 of 4, of 16 pieces of [1, 4] floats of which the first 4 are its own. A product of
    [1, 5] is there with each."""
    found = memory_use(in_pieces(4, 16, 4, streams), {}, 0)
    pieces = 4 * 4 + 4 * 5
    assert found.peak - found.inputs - found.outputs == streams * pieces


def transfers_and_products(streams: int) -> tuple[list[float], list[float]]:
    """When they begin on rank 0 of 2. Each of 4 products takes 10 s, as does each of 2 pieces."""
    host = in_pieces(2, 8, 2, streams)
    sent = {0: [Transmission(32, 10.0)] * 4}
    items = predict_items(host, {}, {}, 0, RATES, sent)
    lanes = {lane: [i.start for i in items if i.lane is lane] for lane in Lane}
    products = [i.start for i in items if i.lane is Lane.compute and "mat_mul" in i.label.name]
    return lanes[Lane.communication], products


def test_a_piece_is_fetched_while_the_one_before_it_is_multiplied() -> None:
    """Both pieces of the peer's block are fetched behind one another while the rank's own block is
    multiplied. One stream fetches each when the product before is done."""
    transfers, products = transfers_and_products(4)
    assert transfers == [0.0, 10.0]
    assert products == [0.0, 10.0, 20.0, 30.0]
    transfers, products = transfers_and_products(1)
    assert transfers == [20.0, 40.0]
    assert products == [0.0, 10.0, 30.0, 50.0]


# Faults.


def spoilt(host: HostProgram, change: dict[int, Node]) -> HostProgram:
    """The program with other nodes in place of some, which are told by identity."""

    def edited(body: Sequence[Node]) -> tuple[Node, ...]:
        found = (change.get(id(node), node) for node in body)
        return tuple(
            replace(node, body=edited(node.body)) if isinstance(node, ForLoop | OnStream) else node
            for node in found
        )

    return replace(host, body=edited(host.body))


def kinds(host: HostProgram) -> set[FaultKind]:
    return {fault.kind for fault in check_host_program(host)}


@pytest.mark.parametrize("index", ["j0", "j1"])
def test_pieces_that_are_written_in_one_place(index: str) -> None:
    host = in_pieces(3, 12, 2)
    chunks = [node for node in all_nodes(host.body) if isinstance(node, Chunk)]
    written = [c for c in chunks if not c.src.startswith("T0") and index in names_in(c)]
    assert written
    for chunk in written:
        start = substitute(chunk.start, {index: const(0)})
        faults = kinds(spoilt(host, {id(chunk): replace(chunk, start=start)}))
        assert faults & {FaultKind.race, FaultKind.not_joined, FaultKind.write_in_flight}


def names_in(chunk: Chunk) -> set[str]:
    return {found.name for found in free_symbols(chunk.start)}


def test_a_join_that_lacks_a_stream() -> None:
    host = in_pieces(3, 12, 2)
    join = host.body[-1]
    assert isinstance(join, ForLoop) and isinstance(join.body[0], WaitEvent)
    short = spoilt(host, {id(join): replace(join, count=join.count - 1)})
    assert FaultKind.not_joined in kinds(short)


def test_more_streams_than_are_joined() -> None:
    host = in_pieces(3, 12, 2)
    [on] = [node for node in all_nodes(host.body) if isinstance(node, OnStream)]
    number = 2 * Symbol("j0", 0, 2, 1) + Symbol("j1", 0, 1, 1)
    assert FaultKind.not_joined in kinds(spoilt(host, {id(on): replace(on, stream=number)}))


# Which loops.


def loop(index: str, *body: Node) -> ForLoop:
    return ForLoop(IndexName(index), const(2), body)


CUT = Chunk(C, A, 0, const(0))


def test_views_of_the_outer_loop_are_made_in_the_inner_one() -> None:
    posts = (allocate(D), reduce(D, C, 0))
    assert list(with_nests([copy(B, A), loop("j0", CUT, loop("j1", *posts))])) == [
        copy(B, A),
        loop("j0", loop("j1", CUT, *posts)),
    ]
    deeper = loop("j0", CUT, loop("j1", loop("j2", *posts)))
    assert list(with_nests([deeper])) == [loop("j0", loop("j1", loop("j2", CUT, *posts)))]


@pytest.mark.parametrize(
    "outer",
    [
        loop("j0", CUT, loop("j1", copy(D, C))),
        loop("j0", copy(C, A), loop("j1", allocate(D), reduce(D, C, 0))),
        loop("j0", loop("j1", allocate(D), reduce(D, C, 0)), CUT),
        loop("j0", CUT, allocate(D), reduce(D, C, 0)),
    ],
)
def test_other_loops_stay(outer: ForLoop) -> None:
    """Nothing is sent, or the outer loop has work of its own."""
    assert list(with_nests([outer])) == [outer]
