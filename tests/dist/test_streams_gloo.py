"""Loops on worker streams between processes: exact values, whatever the number of streams, again
and again; and what an error in the middle of a loop leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import torch
import torch.distributed as dist

from gloo_run import run_ranks
from host_loops import gathered_rows
from meshfuse import DataType, DistributedTensor, FusionDefinition, ParallelType, TensorView
from meshfuse.base.errors import CommunicationError
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.communicator import Communicator
from meshfuse.dist.pending import Pending
from meshfuse.multidevice import DeviceMesh, shard_tensor
from sharded_runs import integers

STREAM, X = ParallelType.stream, ParallelType.mesh_x
REPEATS = 4
CHUNKS = 7

Case = tuple[FusionDefinition, list[torch.Tensor], torch.Tensor]


def gathered(ranks: int) -> Case:
    """Rows are gathered chunk by chunk and multiplied."""
    fd = gathered_rows(ranks, CHUNKS, 3, activated=True)
    inputs = [integers(CHUNKS, ranks, 3, 4), integers(4, 5)]
    return fd, inputs, (inputs[0] @ inputs[1]).relu()


def reduced(ranks: int, dtype: torch.dtype = torch.float32, columns: int = 5) -> Case:
    """Products of parts of the contraction are added up chunk by chunk; the last has fewer rows."""
    mesh, rows = DeviceMesh(range(ranks)), 2 * CHUNKS - 1
    type_ = {torch.float32: DataType.Float, torch.bfloat16: DataType.BFloat16}[dtype]
    with FusionDefinition() as fd:
        a = fd.define_tensor([rows, 2 * ranks], contiguity=True, dtype=type_)
        b = fd.define_tensor([2 * ranks, columns], contiguity=True, dtype=type_)
        c = fd.ops.matmul(a, b)
        for tensor in (a, b, c):
            tensor.set_device_mesh(mesh)
        a.outer_split(1, ranks).axis(1).parallelize(X)
        b.outer_split(0, ranks).axis(0).parallelize(X)
        c.outer_split(0, CHUNKS).axis(0).parallelize(STREAM)
        fd.add_output(c)
    inputs = [integers(rows, 2 * ranks, dtype=dtype), integers(2 * ranks, columns, dtype=dtype)]
    return fd, inputs, inputs[0] @ inputs[1]


def reduced_in_two_steps(ranks: int) -> Case:
    """16-bit sums that are large: each rank adds up a part, then all gather the parts."""
    return reduced(ranks, torch.bfloat16, 1 << 14)


def gathered_and_added(ranks: int) -> Case:
    """A sum along the chunks, of what is gathered."""
    mesh = DeviceMesh(range(ranks))
    with FusionDefinition() as fd:
        a = fd.define_tensor([CHUNKS, ranks, 4], contiguity=True)
        b = fd.ops.set(a)
        c = fd.ops.sum(fd.ops.mul(b, b), [0])
        for tensor in (a, b, c):
            tensor.set_device_mesh(mesh)
        a.axis(1).parallelize(X)
        c.axis(0).parallelize(STREAM)
        fd.add_output(c)
    a_data = integers(CHUNKS, ranks, 4)
    return fd, [a_data], (a_data * a_data).sum(0)


def execute(case: Case, streams: int) -> torch.Tensor:
    fd, inputs, _ = case
    views = [view for view in fd.fusion.inputs() if isinstance(view, TensorView)]
    shards = [shard_tensor(t, view) for t, view in zip(inputs, views, strict=True)]
    [out] = fd.execute(shards, _enable_options=[f"number_of_streams({streams})"])
    assert isinstance(out, DistributedTensor)
    return out.local


def run_all(rank: int, world_size: int) -> Sequence[int]:
    """Each case on 1, 2, 3 and 4 streams, several times. Returns how many calls were right."""
    right = []
    for make in (gathered, reduced, reduced_in_two_steps, gathered_and_added):
        case = make(world_size)
        found = [execute(case, n) for n in (4, 1, 2, 3) for _ in range(REPEATS)]
        right.append(sum(torch.equal(value, case[2]) for value in found))
    return right


def test_values_on_two_processes() -> None:
    assert run_ranks(run_all, 2, deadline=100) == [[4 * REPEATS] * 4] * 2


def test_values_on_three_processes() -> None:
    assert run_ranks(run_all, 3, deadline=100) == [[4 * REPEATS] * 4] * 3


def break_a_loop(rank: int, world_size: int, folder: str) -> list[str]:
    """Rank 1 fails at its third post. Returns what both are told: then, at the next call, and what
    a new process group gives."""
    case = gathered(world_size)
    execute(case, 4)
    post = Communicator.post

    def fail_late(self: Communicator, request: CollectiveRequest) -> Pending:
        if rank == 1 and request.number == 2:
            raise ValueError("no more memory")
        return post(self, request)

    told: list[str] = []
    with patch.object(Communicator, "post", fail_late):
        try:
            execute(case, 4)
        except (CommunicationError, ValueError) as error:
            told.append(str(error))
    try:
        execute(case, 4)
    except CommunicationError as error:
        told.append(str(error))
    dist.destroy_process_group()
    store = f"file://{folder}/again"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    told.append(str(torch.equal(execute(case, 4), case[2])))
    return told


def test_an_error_in_the_middle_of_a_loop(tmp_path: object) -> None:
    found = run_ranks(break_a_loop, 2, str(tmp_path), deadline=60)
    assert found[1][0] == "no more memory"
    assert "rank 1 gave up: ValueError: no more memory" in found[0][0]
    for rank in range(2):
        assert "the group failed before" in found[rank][1] or "gave up" in found[rank][1]
        assert found[rank][2] == "True"
