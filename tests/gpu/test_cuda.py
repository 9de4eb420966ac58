"""CUDA tensors before there are GPU kernels: segments run op by op, collectives through NCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gpu_run import gpu_of, needs_two_gpus, on_gpus
from meshfuse import DataType, FusionDefinition, TensorView
from meshfuse.multidevice import DeviceMesh, Overlap, shard_tensor
from sharded_cases import CASES, Built, check_outputs, integers


def shards_of(built: Built, device: torch.device) -> list[torch.Tensor]:
    views = [view for view in built.fd.fusion.inputs() if isinstance(view, TensorView)]
    return [
        shard_tensor(tensor, view).to(device)
        for tensor, view in zip(built.inputs, views, strict=True)
    ]


def run_all_cases(rank: int, world_size: int) -> list[str]:
    """One process, one GPU: each sharded case on this rank's shards."""
    device = gpu_of(rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    done: list[str] = []
    for name, case in CASES.items():
        built = case(world_size)
        outputs = built.fd.execute(shards_of(built, device))
        assert all(output.device == device for output in outputs)
        check_outputs(built, world_size, rank, outputs)
        done.append(name)
    return done


def test_cases_on_gpus() -> None:
    outcomes = on_gpus(run_all_cases)
    for outcome in outcomes:
        assert outcome.value == list(CASES)


def test_one_gpu_runs_op_by_op_and_says_so() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        y = fd.ops.sum(fd.ops.gelu(x), [1])
        fd.add_output(y)
    data = integers(5, 8)
    [result] = fd.execute([data.cuda()])
    assert result.is_cuda
    torch.testing.assert_close(result.cpu(), torch.nn.functional.gelu(data).sum(1))
    assert "op_by_op" in fd.explain()


def measure_overlap(rank: int, world_size: int) -> tuple[str, float, float, float, float]:
    """A gather that a large linear hides. Returns what the device did, and how long by the host."""
    device = gpu_of(rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    mesh = DeviceMesh(range(world_size))
    with FusionDefinition() as fd:
        x = fd.define_tensor([32768, 8192], contiguity=True, dtype=DataType.BFloat16)
        w = fd.define_tensor([4096, 8192], contiguity=True, dtype=DataType.BFloat16)
        gathered = fd.ops.set(x)
        fd.add_output(fd.ops.linear(x, w))
        fd.add_output(fd.ops.neg(gathered))
        for tensor in (x, w, gathered):
            tensor.set_device_mesh(mesh)
        x.outer_split(0, world_size)
        x.axis(0).parallelize(mesh.axis(0))
    shapes = ((32768 // world_size, 8192), (4096, 8192))
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    for _ in range(3):
        found = fd.timeline(inputs, measured=True)
    print(found)
    return (
        found.source,
        found.seconds,
        found.gemm_seconds,
        found.communication_seconds,
        found.hidden_fraction or 0.0,
    )


@needs_two_gpus
def test_a_timeline_is_measured_by_the_streams() -> None:
    """1.1 TFLOP take more than 500 us on any GPU of today, and 268 MB over a link more than 250:
    longer than a host needs to post the gather, which the linear is to hide."""
    outcomes = on_gpus(measure_overlap)
    for rank, outcome in enumerate(outcomes):
        source, seconds, gemm, communication, hidden = outcome.value
        assert source == f"cuda:{rank}"
        assert seconds >= gemm > 5e-4, outcome.output
        assert communication > 2.5e-4, outcome.output
        assert 0.0 < hidden <= 1.0, outcome.output


def measure_pipeline(rank: int, world_size: int) -> tuple[tuple[int, ...], float, float, float]:
    """Gathered rows, which peers fetch block by block, by the columns that a rank has."""
    device = gpu_of(rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    mesh = DeviceMesh(range(world_size))
    with FusionDefinition() as fd:
        x = fd.define_tensor([8192, 8192], contiguity=True, dtype=DataType.BFloat16)
        w = fd.define_tensor([8192, 8192], contiguity=True, dtype=DataType.BFloat16)
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        for tensor, axis in ((x, 0), (w, 1), (y, 1)):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(axis, world_size).axis(axis).parallelize(mesh.axis(0))
    part = 8192 // world_size
    inputs = [torch.randn(part, 8192), torch.randn(8192, part)]
    inputs = [tensor.to(device, torch.bfloat16) for tensor in inputs]
    for _ in range(3):
        found = fd.timeline(inputs, measured=True, overlap=Overlap.peers())
    print(found)
    return (
        found.worker_streams,
        found.seconds,
        found.compute_seconds,
        found.hidden_fraction or 0.0,
    )


@needs_two_gpus
def test_a_timeline_shows_the_streams_of_a_pipeline() -> None:
    """The second block arrives while the first is multiplied, each on its stream."""
    outcomes = on_gpus(measure_pipeline)
    for outcome in outcomes:
        streams, seconds, computing, hidden = outcome.value
        assert streams == (1,), outcome.output  # worker stream 0 is the caller's
        assert seconds >= computing > 1e-4, outcome.output
        assert 0.0 < hidden <= 1.0, outcome.output
