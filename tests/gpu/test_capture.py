"""Programs as CUDA graphs: replayed exactly, with NCCL's collectives and worker streams in them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from gpu_run import gpu_of, on_gpus
from meshfuse import DataType, DistributedTensor, FusionDefinition, ParallelType
from meshfuse.base.errors import Unsupported, UserError
from meshfuse.multidevice import DeviceMesh, Overlap
from sharded_cases import integers


def statistics() -> FusionDefinition:
    """gelu of [-1, 8] times a number, its sums, and a count of the calls."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        count = fd.define_tensor([1], contiguity=True)
        y = fd.ops.mul(fd.ops.gelu(x), fd.define_scalar())
        fd.add_output(y)
        fd.add_output(fd.ops.sum(y, [1]))
        fd.add_output(fd.ops.add(count, fd.define_scalar(1.0)), count)
    return fd


@pytest.mark.parametrize("copies", [True, False])
def test_a_program_is_replayed_exactly(copies: bool) -> None:
    fd, count = statistics(), torch.zeros(1, device="cuda")
    x = integers(512, 8).cuda()
    caller = torch.cuda.Stream()
    caller.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(caller):
        captured = fd.capture([x, count, 0.5], copy_inputs=copies)
        assert torch.cuda.current_stream() == caller
        assert torch.is_grad_enabled()
        for k in range(4):
            value = integers(512, 8).cuda() - k
            if not copies:
                x.copy_(value)
            found = captured([value if copies else x, count, 0.5], clone_outputs=True)
            wanted = statistics().execute([value, torch.zeros(1, device="cuda"), 0.5])
            for result, want in zip(found, wanted, strict=True):
                assert torch.equal(result, want)
            assert count.item() == k + 1
        with pytest.raises(UserError, match=r"captured\(inputs\): input 0"):
            captured([x[:5], count, 0.5])
    torch.cuda.current_stream().wait_stream(caller)
    captured.release()


def test_a_call_from_another_stream_sees_the_one_before() -> None:
    x = torch.ones(1 << 20, 8, device="cuda")
    captured = statistics().capture([x, torch.zeros(1, device="cuda"), 1.0])
    other, count = torch.cuda.Stream(), torch.zeros(1, device="cuda")
    captured([x, count, 1.0])
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        [_, sums] = captured([2 * x, count, 1.0])
        want = torch.nn.functional.gelu(2 * x).sum(1)
        torch.testing.assert_close(sums, want)
        assert count.item() == 2


def test_loops_on_worker_streams_are_branches_of_the_graph() -> None:
    """A matmul in six chunks of rows, on four streams."""
    with FusionDefinition() as fd:
        a = fd.define_tensor([48, 16], contiguity=True)
        b = fd.define_tensor([16, 8], contiguity=True)
        c = fd.ops.matmul(a, b)
        c.outer_split(0, 6).axis(0).parallelize(ParallelType.stream)
        fd.add_output(c)
    left, right = integers(48, 16).cuda(), integers(16, 8).cuda()
    captured = fd.capture([left, right])
    for k in range(3):
        assert torch.equal(captured([left + k, right])[0], (left + k) @ right)
    assert "on_stream" in fd.explain()


def test_what_a_graph_cannot_repeat_is_refused_before_anything_runs() -> None:
    with FusionDefinition() as fd:
        low, high = fd.define_scalar(0.0), fd.define_scalar(1.0)
        fd.add_output(fd.ops.uniform(low, high, [4], dtype=DataType.Float))
    before = torch.cuda.get_rng_state()
    with pytest.raises(Unsupported, match="random numbers"):
        fd.capture([], device="cuda")
    assert torch.equal(before, torch.cuda.get_rng_state())
    with pytest.raises(Unsupported, match="lies on cpu"):
        statistics().capture([integers(4, 8), torch.zeros(1), 1.0])


def row_parallel(world_size: int) -> FusionDefinition:
    """relu of [64, 32] @ [16, 32]^T, the contraction sharded: a linear and an all-reduce."""
    mesh = DeviceMesh(range(world_size))
    with FusionDefinition() as fd:
        x = fd.define_tensor([64, 32], contiguity=True)
        w = fd.define_tensor([16, 32], contiguity=True)
        y = fd.ops.linear(x, w)
        fd.add_output(fd.ops.relu(y))
        for tensor in (x, w):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(1, world_size).axis(1).parallelize(mesh.axis(0))
        y.set_device_mesh(mesh)
    return fd


def replay_all_reduce(rank: int, world_size: int, overlap: str) -> tuple[Sequence[bool], str]:
    """Whether each replay, and an execute between them, is exact; what was captured."""
    device = gpu_of(rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    fd, form = row_parallel(world_size), Overlap.chunks(4) if overlap == "chunks" else "off"
    whole = [torch.randint(-3, 4, shape).float() for shape in ((64, 32), (16, 32))]

    def shards(k: int) -> list[torch.Tensor]:
        own = 32 // world_size
        return [(v + k)[:, rank * own : (rank + 1) * own].contiguous().to(device) for v in whole]

    def is_right(found: list[torch.Tensor], k: int) -> bool:
        [result], want = found, ((whole[0] + k) @ (whole[1] + k).T).relu()
        return isinstance(result, DistributedTensor) and torch.equal(result.local.cpu(), want)

    captured = fd.capture(shards(0), overlap=form)
    explanation = fd.explain()
    exact: list[bool] = []
    for k in range(5):
        exact.append(is_right(captured(shards(k)), k))
        if k == 2:
            exact.append(is_right(fd.execute(shards(k), overlap="off"), k))
    for _ in range(100):  # the host is ahead of the device, and of the peer
        captured()
    exact.append(is_right(captured(), 4))
    captured.release()
    dist.destroy_process_group()
    return exact, explanation


@pytest.mark.parametrize("overlap", ["off", "chunks"])
def test_collectives_are_replayed(overlap: str) -> None:
    outcomes = on_gpus(replay_all_reduce, overlap)
    for outcome in outcomes:
        exact, explanation = outcome.value
        assert all(exact), exact
        assert "all_reduce" in explanation
        assert ("on_stream" in explanation) == (overlap == "chunks")
