"""Loops in host programs: what the verifier and the checker say of them, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from meshfuse.base.errors import InvariantError
from meshfuse.base.options import NO_OPTIONS, with_options
from meshfuse.expr import const, symbol
from meshfuse.host.check import check_host_program
from meshfuse.host.faults import FaultKind
from meshfuse.host.memory_use import memory_use
from meshfuse.host.nodes import (
    Communicate,
    ForLoop,
    Free,
    HostProgram,
    Node,
    Wait,
    all_nodes,
)
from meshfuse.host.traffic import traffic_of
from meshfuse.host.unroll import iterations, unrolled
from meshfuse.host.uses import names_needed, names_written
from meshfuse.host.verify import verify_host_program
from meshfuse.ir import build, transforms
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.kernel.nodes import IndexName
from meshfuse.pipeline import compile
from meshfuse.runtime.arguments import signature_of
from program_recorder import Recorder

LINE = make_mesh(range(2))


@pytest.fixture(scope="module")
def host() -> HostProgram:
    """Rows of [7, 8] @ [8, 5] in 3 chunks, each summed over two ranks, on one stream."""
    recorder = Recorder()
    a, b = recorder.input([7, 8]), recorder.input([8, 5])
    c = recorder.add(build.matmul, a, b)
    recorder.output(c)
    recorder.block(LINE, a, 1)
    recorder.block(LINE, b, 0)
    recorder.replicate(LINE, c)
    program = transforms.split(recorder.program, c, 0, 3, inner_split=False)
    leaf = program.schedule(c).leaves[0]
    program = transforms.parallelize(program, c, leaf, ParallelType.stream)
    options = with_options(NO_OPTIONS, ["number_of_streams(1)"])
    inputs = [torch.zeros(7, 4), torch.zeros(4, 5)]
    return compile(program, signature_of(inputs), options=options).host


def with_body(host: HostProgram, change: Callable[[tuple[Node, ...]], list[Node]]) -> HostProgram:
    return replace(
        host,
        body=tuple(
            replace(node, body=tuple(change(node.body))) if isinstance(node, ForLoop) else node
            for node in host.body
        ),
    )


def without(host: HostProgram, kind: type[Node]) -> HostProgram:
    return with_body(host, lambda body: [node for node in body if not isinstance(node, kind)])


def test_a_sound_loop(host: HostProgram) -> None:
    verify_host_program(host)
    assert check_host_program(host) == ()
    [loop] = [node for node in host.body if isinstance(node, ForLoop)]
    assert names_needed(loop) == ("T0", "T2", "T1")
    assert names_written(loop, host.kernels) == ("T2",)


def test_an_iteration_frees_what_it_makes(host: HostProgram) -> None:
    with pytest.raises(InvariantError, match="loop j0: an iteration makes and does not free"):
        verify_host_program(without(host, Free))
    assert FaultKind.double_allocation in {f.kind for f in check_host_program(without(host, Free))}


def test_an_iteration_leaves_what_was_there(host: HostProgram) -> None:
    freeing = with_body(host, lambda body: [*body, Free((host.outputs[0].buffer,))])
    with pytest.raises(InvariantError, match="an iteration frees what it did not make, T2"):
        verify_host_program(freeing)
    kinds = {fault.kind for fault in check_host_program(freeing)}
    assert FaultKind.use_after_free in kinds


def test_a_wait_that_is_missing_in_each_iteration(host: HostProgram) -> None:
    spoilt = without(host, Wait)
    with pytest.raises(InvariantError, match="T3_j0 is under way in number 0"):
        verify_host_program(spoilt)
    kinds = [fault.kind for fault in check_host_program(spoilt)]
    assert kinds.count(FaultKind.never_awaited) == 3


def test_iterations_have_numbers_of_their_own(host: HostProgram) -> None:
    posts = [node.number for node in unrolled(host).program.body if isinstance(node, Communicate)]
    assert posts == [0, 1, 2]
    assert sum(isinstance(node, Communicate) for node in all_nodes(host.body)) == 1


def test_loops_within_loops() -> None:
    inner = ForLoop(IndexName("j1"), symbol("j0") + 1, (Wait(0),))
    nest = (ForLoop(IndexName("j0"), const(2), (inner,)),)
    found = [(sizes["j0"], sizes["j1"]) for _, sizes in iterations(nest, {})]
    assert found == [(0, 0), (1, 0), (1, 1)]


def test_traffic_and_memory_are_those_of_all_iterations(host: HostProgram) -> None:
    """Of [3, 5], [3, 5] and [1, 5] a rank receives half both ways; terms are made in
    the chunk where their sum is to be."""
    moved = [found.received for found in traffic_of(host, {})]
    assert moved == [64, 64, 24]
    inputs, result = 4 * (28 + 20), 4 * 35
    assert memory_use(host, {}, 0).peak == inputs + result
