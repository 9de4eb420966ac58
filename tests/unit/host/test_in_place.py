"""All-reduces in the memory of their source: where they are, where not, what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from golden_text import GoldenCheck
from host_bodies import A, B, C, D, E, F, allocate, buffer_of, copy, program_of, reduce
from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import InvariantError
from meshfuse.expr import const
from meshfuse.host.check import check_host_program
from meshfuse.host.in_place import with_reductions_in_place
from meshfuse.host.lifetimes import with_frees, with_waits
from meshfuse.host.load import load
from meshfuse.host.memory_use import memory_use
from meshfuse.host.nodes import (
    Chunk,
    Collective,
    Communicate,
    Evaluate,
    ForLoop,
    HostBuffer,
    HostProgram,
    Node,
    Wait,
    all_nodes,
)
from meshfuse.host.parser import parse_host_program
from meshfuse.host.printer import print_host_program
from meshfuse.host.simulate import simulate as simulate_host
from meshfuse.host.verify import verify_host_program
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Permute, Pointwise
from meshfuse.kernel.nodes import IndexName
from meshfuse.multidevice import simulate
from meshfuse.pipeline import compile, outline_program
from meshfuse.runtime.arguments import signature_of
from reduced_in_place import CASES, Reduced, in_chunks, row_parallel
from sharded_runs import without_kernels

BUFFERS = {name: buffer_of(name) for name in (A, B, C, D, E, F)}
KEPT = {A, B}


def outlined(case: Reduced) -> HostProgram:
    return outline_program(case.fd.fusion.recording.program, case.form).host


def op_by_op(case: Reduced) -> HostProgram:
    program = case.fd.fusion.recording.program
    signature = signature_of([torch.empty(shard.shape) for shard in case.inputs])
    return compile(program, signature, kernels=False, form=case.form).host


def reductions(host: HostProgram) -> list[Communicate]:
    posts = (node for node in all_nodes(host.body) if isinstance(node, Communicate))
    return [post for post in posts if post.collective is Collective.all_reduce]


# Whole programs.


def test_texts(golden: GoldenCheck) -> None:
    """A result of its own, and chunks of one."""
    hosts = (op_by_op(make(2)) for make in (row_parallel, in_chunks))
    golden("host_reductions_in_place", "\n".join(map(print_host_program, hosts)))


@pytest.mark.parametrize("name", CASES)
def test_programs_reduce_in_place(name: str) -> None:
    for host in (outlined(CASES[name](3)), op_by_op(CASES[name](3))):
        posts = reductions(host)
        assert posts and all(post.in_place for post in posts)
        assert check_host_program(host) == ()
    assert parse_host_program(print_host_program(host)) == host


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_simulated_values(name: str, d: int) -> None:
    """Between post and wait what is under way is poisoned."""
    case = CASES[name](d)
    for [output] in simulate(case.fd, case.inputs, overlap=case.form):
        assert torch.equal(output, case.wanted)
    with without_kernels():
        for [output] in simulate(case.fd, case.inputs, overlap=case.form):
            assert torch.equal(output, case.wanted)


@pytest.mark.parametrize("make", [row_parallel, in_chunks])
def test_there_is_no_memory_besides_inputs_and_result(make: Callable[[int], Reduced]) -> None:
    """Of x [8, 8], w [8, 5] a rank has half, of y [8, 5] all."""
    found = memory_use(op_by_op(make(2)), {}, 0)
    assert (found.inputs, found.outputs) == (4 * (8 * 4 + 4 * 5), 4 * 8 * 5)
    assert found.peak == found.inputs + found.outputs


def test_an_iteration_has_its_chunk_once() -> None:
    """Three iterations at once, which have all [7, 5] terms, or sums in their place."""
    found = memory_use(outlined(CASES["activated_in_chunks"](2)), {}, 0)
    assert found.peak == found.inputs + found.outputs + 4 * 7 * 5


# Bodies.


def placed(body: list[Node], buffers: dict[TensorName, HostBuffer] = BUFFERS) -> list[bool]:
    """For each all-reduce, whether it is in place."""
    found = with_reductions_in_place(body, buffers, KEPT)
    return [node.in_place for node in all_nodes(found) if isinstance(node, Communicate)]


def view(out: TensorName, src: TensorName) -> Evaluate:
    return Evaluate(body=(Permute(out, src, (0,)),))


def in_loop(*body: Node) -> ForLoop:
    return ForLoop(IndexName("j0"), const(2), body)


REDUCED = (allocate(D), reduce(D, C, 0))


@pytest.mark.parametrize(
    "body",
    [
        [copy(C, A), *REDUCED],
        [copy(C, A), copy(E, C), *REDUCED],
        [copy(E, A), view(C, E), *REDUCED],
        [allocate(C), copy(C, A, into=C), *REDUCED],
        [in_loop(copy(C, A), *REDUCED)],
        [copy(C, A), *REDUCED, allocate(E), reduce(E, D, 1)],
    ],
)
def test_memory_of_the_programs_own_that_is_over_with(body: list[Node]) -> None:
    assert all(placed(body))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ([allocate(D), reduce(D, A, 0)], "an input"),
        ([view(C, A), *REDUCED], "a view of an input"),
        ([copy(B, A), allocate(D), reduce(D, B, 0)], "an output"),
        ([copy(B, A), view(C, B), *REDUCED], "a view of an output"),
        ([copy(C, A), view(B, C), *REDUCED], "an output is a view of it"),
        ([copy(C, A), *REDUCED, copy(E, C)], "it is read later"),
        ([copy(C, A), view(E, C), *REDUCED, copy(F, E)], "a view of it is read later"),
        ([copy(E, A), view(C, E), *REDUCED, copy(F, E)], "what it is a view of is read later"),
        ([copy(C, A), *REDUCED, in_loop(copy(E, C))], "it is read later in a loop"),
        ([copy(C, A), *REDUCED, allocate(E), reduce(E, C, 1)], "it is reduced twice"),
        ([copy(C, A), in_loop(*REDUCED)], "each iteration reads it"),
        ([copy(E, A), in_loop(Chunk(C, E, 0, const(0)), *REDUCED)], "a part of what is outside"),
        ([copy(E, A), Chunk(C, E, 0, const(0)), *REDUCED], "a part of something"),
        ([copy(C, A), allocate(D), replace(reduce(D, C, 0), packed=True)], "it is packed"),
        ([copy(C, A), allocate(D), replace(reduce(D, C, 0), collective=Collective.exchange)], ""),
    ],
)
def test_other_memory(body: list[Node], why: str) -> None:
    assert not any(placed(body)), why


@pytest.mark.parametrize(
    "buffer",
    [
        replace(buffer_of(C), dtype=DataType.Int),
        replace(buffer_of(C), shape=(const(2), const(2))),
        replace(buffer_of(C), gaps=True),
    ],
)
def test_a_source_that_lies_otherwise(buffer: HostBuffer) -> None:
    assert placed([copy(C, A), *REDUCED], {**BUFFERS, C: buffer}) == [False]


def test_another_order_in_memory() -> None:
    shape = (const(2), const(2))
    straight = {name: replace(buffer_of(name), shape=shape) for name in (C, D)}
    assert placed([copy(C, A), *REDUCED], straight) == [True]
    across = {**straight, C: replace(straight[C], order=(1, 0))}
    assert placed([copy(C, A), *REDUCED], across) == [False]


def test_a_chunk_of_what_is_made_later_stays_where_it_is() -> None:
    late = [copy(C, A), allocate(E), Chunk(D, E, 0, const(0)), reduce(D, C, 0)]
    assert placed(list(late)) == [False]
    early = [allocate(E), copy(C, A), Chunk(D, E, 0, const(0)), reduce(D, C, 0)]
    found = with_reductions_in_place(early, BUFFERS, KEPT)
    assert found == [
        allocate(E),
        Chunk(C, E, 0, const(0)),
        copy(C, A, into=C),
        replace(reduce(D, C, 0), in_place=True),
    ]


def test_terms_that_are_read_once_more_keep_their_value() -> None:
    """B = the sum + the rank's own term."""
    added = Evaluate(body=(Pointwise(B, "add", (D, C)),))
    doubled = Evaluate(body=(Pointwise(C, "add", (A, A)),))
    body = with_reductions_in_place([doubled, *REDUCED, added], BUFFERS, KEPT)
    host = program_of(*with_frees(list(with_waits(body)), KEPT), names=(A, B, C, D))
    verify_host_program(host)
    shards = {rank: [torch.arange(4.0) + rank] for rank in range(2)}
    executables = {rank: load(host, {}, None, rank, torch.device("cpu")) for rank in range(2)}
    for rank, [found] in simulate_host(executables, shards).items():
        assert torch.equal(found, 2 * (torch.arange(4.0) * 2 + 1) + 2 * shards[rank][0])


# What must not be.


def test_the_source_is_under_way_until_the_wait() -> None:
    posted = [copy(C, A), replace(reduce(B, C, 0), in_place=True)]
    verify_host_program(program_of(*posted, Wait(0), Evaluate(None, ())))
    with pytest.raises(InvariantError, match="T2 is under way in number 0"):
        verify_host_program(program_of(*posted, copy(D, C), Wait(0), names=(A, B, C, D)))
    gathered = replace(posted[1], collective=Collective.all_gather)
    with pytest.raises(InvariantError, match="only an all-reduce runs in place"):
        verify_host_program(program_of(posted[0], gathered, Wait(0)))
