"""The checker: real host programs are clean, and every planted fault is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from golden_text import GoldenCheck
from meshfuse import FusionDefinition, pipeline
from meshfuse.base.errors import InvariantError
from meshfuse.base.options import NO_OPTIONS, with_options
from meshfuse.host.check import check_host_program, check_ranks
from meshfuse.host.clocks import Timelines
from meshfuse.host.lower import HostLowering
from meshfuse.host.nodes import Free, HostProgram, Wait
from meshfuse.host.verify import verify_host_program
from meshfuse.ir.program import Program
from meshfuse.multidevice import DeviceMesh
from meshfuse.pipeline import compile, outline_program
from meshfuse.runtime.arguments import signature_of
from planted_faults import PLANTERS, ranks_of
from sharded_cases import CASES
from sharded_runs import X, Y, mesh_of, place
from small_programs import in_place_update, norm_linear, sequence_parallel_mlp
from transformer_layer import Sizes, define_backward


def outlined(fd: FusionDefinition) -> HostProgram:
    return outline_program(fd.fusion.recording.program).host


def op_by_op(program: Program, *shapes: tuple[int, ...]) -> HostProgram:
    inputs = [torch.empty(shape) for shape in shapes]
    return compile(program, signature_of(inputs), kernels=False).host


def two_axes(d: int, features: int = 8) -> FusionDefinition:
    """Data- and tensor-parallel: a linear summed over y, its result gathered over x, and back."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([8, features], contiguity=True)
        w = fd.define_tensor([12, features], contiguity=True)
        y = fd.ops.linear(x, w)
        z = fd.ops.set(fd.ops.relu(y))
        total = fd.ops.sum(z, [1])
        fd.add_output(z)
        fd.add_output(total)
        mesh = mesh_of(d, d)
        place(mesh, {0: X, 1: Y}, x)
        place(mesh, {1: Y}, w)
        place(mesh, {0: X}, y)
        place(mesh, {}, z)
    return fd


def two_meshes() -> FusionDefinition:
    """A pipeline of three ranks and two, one of them in both, of axes that do not divide."""
    left, right = DeviceMesh([0, 1, 2]), DeviceMesh([2, 3])
    with FusionDefinition() as fd:
        x = fd.define_tensor([7, 4], contiguity=True)
        w = fd.define_tensor([4, 4], contiguity=True)
        hidden = fd.ops.linear(x, w)
        handed = fd.ops.set(hidden)
        fd.add_output(fd.ops.sum(fd.ops.exp(handed), [0]))
        fd.add_output(fd.ops.sum(hidden, [0]))
        place(left, {0: X}, x, hidden)
        place(left, {}, w)
        place(right, {0: X}, handed)
    return fd


def rows_to_columns(d: int) -> FusionDefinition:
    """An exchange on one mesh."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([6, 7], contiguity=True)
        y = fd.ops.set(fd.ops.neg(x))
        fd.add_output(fd.ops.exp(y))
        place(mesh_of(d), {0: X}, x)
        place(mesh_of(d), {1: X}, y)
    return fd


def sent_and_updated() -> FusionDefinition:
    """A view of an input is sent, and the input updated."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 3], contiguity=True)
        part = fd.ops.set(x)
        whole = fd.ops.set(part)
        fd.add_output(whole)
        fd.add_output(fd.ops.neg(x), x)
        place(mesh_of(2), {}, x, whole)
        place(mesh_of(2), {0: X}, part)
    return fd


def transformer() -> FusionDefinition:
    return define_backward(Sizes(batch=2, tokens=4, heads=2, features=8), mesh_of(2), True)


OTHERS: dict[str, Callable[[], HostProgram]] = {
    "two_axes": lambda: outlined(two_axes(2)),
    "two_axes_uneven": lambda: outlined(two_axes(3)),
    "two_meshes": lambda: outlined(two_meshes()),
    "rows_to_columns": lambda: outlined(rows_to_columns(3)),
    "rows_to_columns_of_two": lambda: outlined(rows_to_columns(2)),
    "sent_and_updated": lambda: outlined(sent_and_updated()),
    "transformer": lambda: outlined(transformer()),
    "uneven": lambda: outlined(CASES["sequence_parallel_mlp"](3).fd),
    "in_place_op_by_op": lambda: op_by_op(in_place_update(), (3,), (3,)),
    "norm_op_by_op": lambda: op_by_op(norm_linear(), (2, 7, 16), (16,), (16,), (32, 16)),
    "mlp_op_by_op": lambda: op_by_op(sequence_parallel_mlp(2).program, (2, 3, 8), (4, 8), (8, 4)),
}


@lru_cache(None)
def programs() -> dict[str, HostProgram]:
    """Each is on 1 to 9 ranks, with kernels of which only the arguments are known, or without."""
    found = {name: outlined(case(2).fd) for name, case in CASES.items()}
    return {**found, **{name: make() for name, make in OTHERS.items()}}


def test_real_programs_are_clean() -> None:
    for name, program in programs().items():
        assert check_host_program(program) == (), name
        everyone = dict.fromkeys(ranks_of(program) or [0], program)
        assert check_ranks(everyone) == (), name


@pytest.mark.parametrize("planter", PLANTERS)
def test_planted_faults_are_found_and_named(planter: str) -> None:
    count = 0
    for name, program in programs().items():
        for planted in PLANTERS[planter](program):
            faults = planted.check()
            assert any(map(planted.is_named_by, faults)), (name, planted, list(map(str, faults)))
            count += 1
    assert count >= 2


ALONE = (
    "wait_twice",
    "allocated_twice",
    "freed_twice",
    "free_removed",
    "input_freed",
    "result_freed",
    "rank_asks_for_another_function",
    "rank_sends_more",
)


@pytest.mark.parametrize("planter", ALONE)
def test_nothing_else_is_reported(planter: str) -> None:
    for program in programs().values():
        for planted in PLANTERS[planter](program):
            faults = planted.check()
            assert all(map(planted.is_named_by, faults)), list(map(str, faults))


def test_a_fault_is_one_line(golden: GoldenCheck) -> None:
    """The first place of each planter in these programs."""
    chosen = ("two_axes", "sent_and_updated", "two_meshes", "rows_to_columns", "mlp_op_by_op")
    lines: list[str] = []
    for name, plant in PLANTERS.items():
        spoilt = (planted for key in chosen for planted in plant(programs()[key]))
        planted = next(spoilt, None)
        if planted is not None:
            fault = next(filter(planted.is_named_by, planted.check()))
            lines += [f"{name}:", f"  {fault}"]
    golden("host_faults", "\n".join(lines))


def test_one_rank_is_looked_at_for_all_that_do_the_same() -> None:
    """Faults name all of them; of two meshes, ranks of both are looked at."""
    program = outlined(two_axes(16))
    planted = next(PLANTERS["wait_twice"](program))
    [fault] = planted.check()
    assert fault.ranks == tuple(range(256))
    assert "ranks 0 to 255" in str(fault)
    [fault] = check_host_program(planted.program, ranks=[7, 3])
    assert fault.ranks == (7, 3)

    program = programs()["two_meshes"]
    planted = next(PLANTERS["input_freed"](program))
    assert [fault.ranks for fault in planted.check()] == [(0, 1), (2,), (3,)]


def test_clocks_are_as_long_as_there_are_transfers_at_once() -> None:
    time = Timelines()
    for number in range(100):
        first, second = time.begin(2 * number), time.begin(2 * number + 1)
        assert not time.knows(first.moment)
        time.end(first)
        assert time.knows(first.moment) and not time.knows(second.moment)
        time.end(second)
    assert len(time.begin(200).clock) == 3


def test_a_transfer_lets_know_what_its_post_knew() -> None:
    """A timeline is not used again for a post that does not know its last transfer to be over."""
    time = Timelines()
    first = time.begin(0)
    time.end(first)
    second = time.begin(1)
    assert second.moment.timeline == first.moment.timeline
    assert second.clock[first.moment.timeline] > first.clock[first.moment.timeline]
    assert time.knows(first.moment) and not time.knows(second.moment)


def test_the_option_checks_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the verifier, which looks at names, does not see: a view of what is under way."""
    sound = programs()["sent_and_updated"]
    late = sorted(sound.body, key=lambda node: isinstance(node, Wait | Free))
    broken = replace(sound, body=tuple(late))
    monkeypatch.setattr(pipeline, "verify_host_program", verify_host_program)
    monkeypatch.setattr(pipeline, "lower_to_host", lambda *_: HostLowering(broken, ()))
    program = sent_and_updated().fusion.recording.program
    inputs = signature_of([torch.empty(4, 3)])
    assert pipeline.compile(program, inputs, kernels=False).host is broken
    options = with_options(NO_OPTIONS, enable=["check_host_program"])
    with pytest.raises(InvariantError, match="the host program is not sound:\n  write in flight"):
        pipeline.compile(program, inputs, kernels=False, options=options)
