"""Host programs as text, and what the verifier refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from golden_text import GoldenCheck
from host_bodies import A, B, C, D, E, F, allocate, copy, program_of, reduce
from meshfuse.base.errors import InvariantError
from meshfuse.base.text import TextError
from meshfuse.host.lifetimes import with_early_posts, with_frees, with_waits
from meshfuse.host.nodes import (
    Free,
    HostProgram,
    KernelName,
    Launch,
    Node,
    Wait,
)
from meshfuse.host.parser import parse_host_program
from meshfuse.host.printer import print_host_program, print_node
from meshfuse.host.verify import verify_host_program
from meshfuse.ir.axes import TensorName
from meshfuse.ir.program import Program
from meshfuse.pipeline import compile
from meshfuse.runtime.arguments import signature_of
from small_programs import in_place_update, norm_linear, sequence_parallel_mlp


def host_program(program: Program, inputs: list[torch.Tensor], *, kernels: bool) -> HostProgram:
    return compile(program, signature_of(inputs), kernels=kernels).host


def without_kernels(host: HostProgram) -> str:
    """The text of the host program alone; kernels have goldens of their own."""
    return print_host_program(replace(host, kernels={}))


def test_a_sequence_parallel_mlp(golden: GoldenCheck) -> None:
    case = sequence_parallel_mlp(2)
    host = host_program(case.program, case.shards(0), kernels=True)
    golden("host_sequence_parallel_mlp", without_kernels(host))


def test_op_by_op_with_a_free_after_each_last_use(golden: GoldenCheck) -> None:
    inputs = [torch.zeros(shape) for shape in ((2, 7, 16), (16,), (16,), (32, 16))]
    host = host_program(norm_linear(), inputs, kernels=False)
    golden("host_op_by_op", print_host_program(host))


def test_an_update_in_place_comes_last(golden: GoldenCheck) -> None:
    host = host_program(in_place_update(), [torch.zeros(3)] * 2, kernels=True)
    golden("host_in_place_update", without_kernels(host))


@pytest.mark.parametrize("kernels", [True, False])
def test_text_parses_back(kernels: bool) -> None:
    case = sequence_parallel_mlp(3)
    host = host_program(case.program, case.shards(0), kernels=kernels)
    assert parse_host_program(print_host_program(host)) == host


def test_text_that_is_no_host_program() -> None:
    with pytest.raises(TextError, match=r"expected host\(\), found"):
        parse_host_program("wait(0)")
    with pytest.raises(TextError, match="line 2"):
        parse_host_program("host() {\n  launch(S0)\n}")


# The verifier, on bodies over buffers T0 (an input), T1 and T2.


def test_sound_programs_pass() -> None:
    verify_host_program(program_of(copy(B, A), copy(A, B, into=A)))
    verify_host_program(program_of(allocate(C), reduce(C, A, 0), Wait(0), copy(B, C), Free((C,))))


def order_of(*body: Node) -> list[str]:
    """The lines of a body whose posts, waits and frees are placed; T1 is kept."""
    placed = with_waits(with_early_posts(body, {}))
    return [print_node(node) for node in with_frees(list(placed), {A, B})]


def test_a_collective_is_posted_as_early_as_its_source_is_ready_and_awaited_at_first_use() -> None:
    """Work that does not depend on it runs in between."""
    body = (copy(C, A), copy(E, A), copy(F, E), allocate(D), reduce(D, C, 0), copy(B, D))
    mesh = "DeviceMesh{0 1}, mesh_x"
    assert order_of(*body) == [
        "evaluate() {\n  T2 = set(T0)\n}",
        "T3 = allocate(global, 16)",
        f'T3 = communicate(all_reduce, T2, 0, {mesh}, 16, "a test", function="sum")',
        "evaluate() {\n  T4 = set(T0)\n}",
        "evaluate() {\n  T5 = set(T4)\n}",
        "free(T4, T5)",
        "wait(0)",
        "free(T2)",
        "evaluate() {\n  T1 = set(T3)\n}",
        "free(T3)",
    ]


def test_collectives_keep_their_order() -> None:
    """The second's source is ready first; all ranks must post alike."""
    body = (copy(C, A), copy(E, A), allocate(D), reduce(D, E, 0), allocate(B), reduce(B, C, 1))
    posts = [line[:2] for line in order_of(*body) if "communicate" in line]
    assert posts == ["T3", "T1"]


def test_a_collective_of_a_collective_waits_for_the_first() -> None:
    body = (allocate(C), reduce(C, A, 0), copy(D, A), allocate(B), reduce(B, C, 1))
    lines = order_of(*body)
    assert lines.index("wait(0)") < next(i for i, x in enumerate(lines) if x.startswith("T1 = com"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([copy(B, C)], "T2 does not exist here"),
        ([copy(C, A), Free((C,)), copy(B, C)], "T2 does not exist here"),
        ([copy(B, A), copy(B, A)], "T1 exists already"),
        ([copy(TensorName("T9"), A)], "T9 is neither a buffer nor a scalar"),
        ([copy(B, A), Free((A,))], "an input belongs to the caller"),
        ([copy(B, A), Launch(KernelName("S0"), (A, B))], "there is no such kernel"),
        ([copy(C, A)], "output T1 does not exist at the end"),
        ([allocate(B), reduce(B, A, 0)], "never awaited: T1 = communicate"),
        ([copy(B, A), Wait(0)], "no collective of this number is under way"),
        ([allocate(B), reduce(B, A, 0), copy(C, B), Wait(0)], "T1 is under way in number 0"),
        (
            [allocate(B), reduce(B, A, 0), copy(C, A), copy(A, C, into=A), Wait(0)],
            "T0 is under way in number 0",
        ),
        (
            [copy(C, A), allocate(B), reduce(B, C, 0), Free((C,)), Wait(0)],
            "T2 is under way in number 0",
        ),
        (
            [allocate(B), reduce(B, A, 0), Wait(0), allocate(C), reduce(C, A, 0), Wait(0)],
            "number 0 stands twice",
        ),
    ],
)
def test_unsound_programs_are_refused(body: list[Node], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        verify_host_program(program_of(*body))
