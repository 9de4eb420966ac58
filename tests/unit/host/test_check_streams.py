"""The checker on loops and streams: real programs are clean, every planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest

from host_loops import STREAM, chunks, define, dense
from meshfuse import FusionDefinition
from meshfuse.base.options import NO_OPTIONS, with_options
from meshfuse.facts.overlap_form import PLAIN, Overlap
from meshfuse.host.check import check_host_program, check_ranks
from meshfuse.host.nodes import HostProgram
from meshfuse.pipeline import outline_program
from peer_programs import gather_then_multiply, multiply_then_scatter, pipelined_mlp
from planted_faults import ranks_of
from planted_stream_faults import LOOP_PLANTERS, SOUND_CHANGES
from sharded_runs import X, mesh_of, place


def outlined(fd: FusionDefinition, streams: int = 4, form: Overlap = PLAIN) -> HostProgram:
    options = with_options(NO_OPTIONS, [f"number_of_streams({streams})"])
    return outline_program(fd.fusion.recording.program, form, options).host


def gathered_rows(count: int) -> FusionDefinition:
    """A chunk is gathered over two ranks, multiplied, and put through a kernel."""
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        a, b = dense(fd, count, 2, 2, 4), dense(fd, 4, 5)
        c = fd.ops.relu(fd.ops.matmul(a, b))
        for tensor in (a, b, c):
            tensor.set_device_mesh(mesh)
        a.axis(1).parallelize(X)
        c.axis(0).parallelize(STREAM)
        fd.add_output(c)

    return define(build)


def added_columns(fd: FusionDefinition) -> None:
    total = fd.ops.sum(fd.ops.mul(dense(fd, 7, 5), dense(fd, 7, 5)), [0])
    chunks(total, 0, 3)
    fd.add_output(fd.ops.neg(total))


def two_loops(fd: FusionDefinition) -> None:
    """What one writes in 6 chunks of columns the other reads in 12 of rows, and then no more."""
    c = fd.ops.matmul(dense(fd, 12, 4), dense(fd, 4, 6))
    d = fd.ops.matmul(c, dense(fd, 6, 3))
    chunks(c, 1, 6)
    chunks(d, 0, 12)
    fd.add_output(d)


def nested(fd: FusionDefinition) -> None:
    c = fd.ops.matmul(dense(fd, 10, 7), dense(fd, 7, 6))
    chunks(c, 0, 5)
    chunks(c, 3, 3)
    fd.add_output(fd.ops.relu(c))


def of_any_size(fd: FusionDefinition) -> None:
    x = fd.define_tensor([-1, -1], contiguity=True)
    y = fd.ops.relu(x)
    z = fd.ops.sum(y, [1])
    for tensor in (y, z):
        tensor.inner_split(0, 3)
        tensor.axis(0).parallelize(STREAM)
        fd.add_output(tensor)


def updated(fd: FusionDefinition) -> None:
    x = dense(fd, 9, 4)
    y = fd.ops.mul(x, 2.0)
    chunks(y, 0, 3)
    fd.add_output(y, x)


def two_layers() -> FusionDefinition:
    """Two perceptrons in a row, of which each rank has a part of the hidden axes."""
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x = y = dense(fd, 8, 3, 4)
        for _ in range(2):
            v, w = dense(fd, 4, 4), dense(fd, 4, 4)
            y = fd.ops.linear(fd.ops.relu(fd.ops.linear(y, v)), w)
            place(mesh, {0: X}, v)
            place(mesh, {1: X}, w)
            place(mesh, {}, y)
        place(mesh, {}, x)
        fd.add_output(y)

    return define(build)


PROGRAMS: dict[str, Callable[[], HostProgram]] = {
    "gathered": lambda: outlined(gathered_rows(5), 2),
    "gathered_often": lambda: outlined(gathered_rows(24), 4),
    "gathered_on_few": lambda: outlined(gathered_rows(3), 4),
    "added": lambda: outlined(define(added_columns), 2),
    "added_on_four": lambda: outlined(define(added_columns), 4),
    "two_loops": lambda: outlined(define(two_loops), 2),
    "nested": lambda: outlined(define(nested), 2),
    "of_any_size": lambda: outlined(define(of_any_size), 4),
    "updated": lambda: outlined(define(updated), 2),
    "layers": lambda: outlined(two_layers(), 2, Overlap.chunks(4)),
    "layers_in_two": lambda: outlined(two_layers(), 4, Overlap.chunks(2)),
    "fetched": lambda: outlined(gather_then_multiply(3, 12, epilogue=True)),
    "fetched_in_pieces": lambda: outlined(gather_then_multiply(4, 16, pieces=2), 2),
    "fetched_in_order": lambda: outlined(gather_then_multiply(3, 6, rotated=False), 2),
    "delivered": lambda: outlined(multiply_then_scatter(3, 6, 6), 2),
    "pipelined": lambda: outlined(pipelined_mlp(4, 8, 8)),
}


@lru_cache(None)
def programs() -> dict[str, HostProgram]:
    return {name: make() for name, make in PROGRAMS.items()}


def test_real_programs_are_clean() -> None:
    for name, program in programs().items():
        assert check_host_program(program) == (), name
        everyone = dict.fromkeys(ranks_of(program) or [0], program)
        assert check_ranks(everyone) == (), name


@pytest.mark.parametrize("planter", LOOP_PLANTERS)
def test_planted_faults_are_found(planter: str) -> None:
    count = 0
    for name, program in programs().items():
        for planted in LOOP_PLANTERS[planter](program):
            assert planted.is_found(), (name, planted, list(map(str, planted.check())))
            count += 1
    assert count >= 2


@pytest.mark.parametrize("change", SOUND_CHANGES)
def test_what_is_still_in_order_is_sound(
    change: Callable[[HostProgram], list[HostProgram]],
) -> None:
    found = [changed for program in programs().values() for changed in change(program)]
    assert len(found) >= 2
    for program in found:
        assert check_host_program(program) == ()
