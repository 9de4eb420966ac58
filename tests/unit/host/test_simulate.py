"""The drivers: ranks that wait for one another, that never meet, and that are outside the mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import CommunicationError, InvariantError
from meshfuse.dist.communicator import Communicator
from meshfuse.expr import const
from meshfuse.facts.sharding import Digit, Sharding
from meshfuse.host.dispatch import executor_class
from meshfuse.host.executors import HostIrExecutor
from meshfuse.host.load import load
from meshfuse.host.nodes import (
    Allocate,
    Collective,
    Communicate,
    HostBuffer,
    HostOutput,
    HostProgram,
    Node,
    Wait,
)
from meshfuse.host.simulate import simulate
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.schedule import MemoryType
from meshfuse.runtime.executors import ExprEvalExecutor, KernelExecutor

A, B, C = TensorName("T0"), TensorName("T1"), TensorName("T2")
CPU = torch.device("cpu")


def program_of(ranks: int, *body: Node) -> HostProgram:
    """T1 and T2 are made of the input T0, 2 numbers each; T1 is returned."""
    mesh = make_mesh(range(ranks))
    whole = Sharding(mesh, ((Digit(const(2)),),))
    buffers = {n: HostBuffer(n, DataType.Float, (const(2),), sharding=whole) for n in (A, B, C)}
    return HostProgram((A,), (HostOutput(B),), {}, (), (), buffers, {}, body)


def allocate(buffer: TensorName) -> Allocate:
    return Allocate(buffer, MemoryType.global_, const(8))


def reduce(out: TensorName, number: int, ranks: int, function: str = "sum") -> Communicate:
    mesh, axis = make_mesh(range(ranks)), ParallelType.mesh_x
    return Communicate(
        out, Collective.all_reduce, A, number, mesh, axis, const(8), "a test", function
    )


def run(programs: dict[int, HostProgram]) -> dict[int, list[torch.Tensor]]:
    executables = {rank: load(p, {}, None, rank, CPU) for rank, p in programs.items()}
    return simulate(executables, {rank: [torch.full((2,), rank + 1.0)] for rank in programs})


def test_ranks_meet_in_collectives() -> None:
    program = program_of(
        3,
        allocate(B),
        reduce(B, 0, 3),
        allocate(C),
        reduce(C, 1, 3, "max"),
        Wait(1),
        Wait(0),
    )
    results = run(dict.fromkeys(range(3), program))
    assert all(torch.equal(outputs[0], torch.full((2,), 6.0)) for outputs in results.values())


def test_no_progress_is_a_named_deadlock() -> None:
    both = program_of(2, allocate(B), reduce(B, 0, 2), Wait(0))
    neither = replace(both, body=(allocate(B),))
    with pytest.raises(CommunicationError) as caught:
        run({0: both, 1: neither})
    lines = str(caught.value).splitlines()
    assert lines[0] == "deadlock: no rank of the simulation can go on"
    assert "rank 0 waits in all_reduce number 0" in lines[1]
    assert lines[1].endswith("for ranks (1,)")
    assert lines[2] == "  rank 1 has ended"


def test_ranks_that_disagree_are_told_how() -> None:
    first = program_of(2, allocate(B), reduce(B, 0, 2), Wait(0))
    second = program_of(2, allocate(B), reduce(B, 0, 2, "max"), Wait(0))
    with pytest.raises(CommunicationError, match="disagree on the function: sum and max"):
        run({0: first, 1: second})


def test_a_rank_outside_the_mesh_gets_empty_tensors() -> None:
    program = program_of(1, allocate(B), reduce(B, 0, 1), Wait(0))
    results = run({0: program, 1: program})
    assert torch.equal(results[0][0], torch.ones(2))
    assert results[1][0].shape == (0,)


def test_a_process_alone_runs_its_collectives_itself() -> None:
    program = program_of(1, allocate(B), reduce(B, 0, 1), Wait(0))
    executor = HostIrExecutor(program, {}, None, CPU)
    assert not executor.is_compiled(0)
    [result] = executor.run([torch.ones(2)], Communicator({}))
    assert torch.equal(result, torch.ones(2))
    assert executor.is_compiled(0)
    assert executor.compile(0) is executor.compile(0)


def test_dispatch_by_scheduler_kind() -> None:
    assert executor_class("pointwise") is executor_class("reduction") is KernelExecutor
    assert executor_class("expr_eval") is ExprEvalExecutor
    with pytest.raises(InvariantError, match="no executor for scheduler 'matmul'"):
        executor_class("matmul")
