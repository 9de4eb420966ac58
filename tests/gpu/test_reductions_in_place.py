"""All-reduces in place on GPUs: NCCL adds where the terms were made."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gpu_run import gpu_of, on_gpus
from meshfuse.host.nodes import Communicate, all_nodes
from reduced_in_place import CASES, in_chunks, own_shards, row_parallel


def run_cases(rank: int, ranks: int) -> list[int]:
    """Values are checked; returns by how much memory grows in a call, besides the result."""
    torch.cuda.set_device(gpu_of(rank))
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    cases = [CASES[name](ranks) for name in CASES if name != "along_two_axes"]
    large = [make(ranks, 2048, 2048) for make in (row_parallel, in_chunks)]
    grown: list[int] = []
    for case in (*cases, *large):
        shards = [shard.cuda() for shard in own_shards(case, rank, ranks)]
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            [output] = case.fd.execute(shards, overlap=case.form)
            torch.cuda.synchronize()
            grown.append(torch.cuda.max_memory_allocated() - before)
            assert torch.equal(output.cpu(), case.wanted)
            del output
        posts = (n for n in all_nodes(case.fd.fec.host_program().body))
        assert all(post.in_place for post in posts if isinstance(post, Communicate))
    return [grown[-4], grown[-1]]


def test_values_and_memory() -> None:
    """The result is [2048, 2048] floats; a call needs that once."""
    for outcome in on_gpus(run_cases):
        for grown in outcome.value:
            assert grown < 1.1 * 4 * 2048 * 2048
