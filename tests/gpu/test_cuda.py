"""CUDA tensors before there are GPU kernels: segments run op by op, collectives through NCCL."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from gloo_run import observe_ranks
from meshfuse import FusionDefinition, TensorView
from meshfuse.multidevice import shard_tensor
from sharded_cases import CASES, Built, check_outputs, integers

PORT = "29571"


def shards_of(built: Built, device: torch.device) -> list[torch.Tensor]:
    views = [view for view in built.fd.fusion.inputs() if isinstance(view, TensorView)]
    return [
        shard_tensor(tensor, view).to(device)
        for tensor, view in zip(built.inputs, views, strict=True)
    ]


def run_all_cases(rank: int, world_size: int) -> list[str]:
    """One process, one GPU: each sharded case on this rank's shards."""
    device = torch.device("cuda", rank)
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


def environment(rank: int) -> dict[str, str]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    return {**os.environ, **address, "LOCAL_RANK": str(rank)}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_cases_on_two_gpus() -> None:
    outcomes = observe_ranks(run_all_cases, 2, deadline=110, initialise=False, environ=environment)
    for outcome in outcomes:
        assert outcome.succeeded, f"{outcome.error}\n{outcome.output}"
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
