"""Pipelines between two GPUs through symmetric memory: exact for any sizes, whoever is late."""

from __future__ import annotations

import random
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from gpu_run import gpu_of, on_gpus
from meshfuse.base.errors import Unsupported, UserError
from meshfuse.dist.communicator import Communicator
from meshfuse.host.replays import Replay
from meshfuse.multidevice import DeviceMesh, Overlap, symmetric_empty
from peer_programs import (
    gather_then_multiply,
    multiply_then_scatter,
    multiply_then_sum,
    pipelined_mlp,
    scatter_pieces,
)
from sharded_runs import integers

DEADLINE = 150


def block(tensor: torch.Tensor, rank: int, ranks: int, axis: int = 0) -> torch.Tensor:
    """What a rank holds, on its GPU: blocks of equal size but for the last."""
    size = -(-tensor.shape[axis] // ranks)
    start = min(rank * size, tensor.shape[axis])
    return tensor.narrow(axis, start, min(size, tensor.shape[axis] - start)).contiguous().cuda()


def begin(rank: int, ranks: int) -> None:
    torch.cuda.set_device(gpu_of(rank))
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    warnings.simplefilter("error", UserWarning)  # a fallback to NCCL
    warnings.filterwarnings("ignore", "meshfuse: there are no kernels")
    warnings.filterwarnings("ignore", "barrier")


def pipelines(rank: int, ranks: int) -> str:
    begin(rank, ranks)
    d = ranks
    x, w = integers(7, 4), integers(4, 5).cuda()
    for rotated in (True, False):
        fd = gather_then_multiply(d, 7, rotated=rotated)
        for _ in range(6):
            (found,) = fd.execute([block(x, rank, d), w])
            assert torch.equal(found, (x.cuda() @ w).relu())
    x = integers(4 * d, 4)
    for pieces in (2, 4):
        fd = gather_then_multiply(d, 4 * d, pieces=pieces)
        for _ in range(6):
            (found,) = fd.execute([block(x, rank, d), w])
            assert torch.equal(found, (x.cuda() @ w).relu())
    x, w = integers(13, 4 * d), integers(4 * d, 3)
    fd = multiply_then_scatter(d, 13, 4 * d)
    for _ in range(6):
        (found,) = fd.execute([block(x, rank, d, axis=1), block(w, rank, d)])
        assert torch.equal(found, block(x @ w, rank, d))
    x, v, w = integers(7, 4), integers(4, 36), integers(36, 4)
    fd = pipelined_mlp(d, 7, 36)
    for _ in range(6):
        (found,) = fd.execute([block(x, rank, d), block(v, rank, d, axis=1), block(w, rank, d)])
        assert torch.equal(found, block((x @ v).relu() @ w, rank, d))
    x, w = integers(8 * d, 4 * d), integers(3, 4 * d)
    for pieces in (1, 2, 4):
        fd = multiply_then_sum(d, 8 * d, 4 * d)
        own = [block(x, rank, d, axis=1), block(w, rank, d, axis=1)]
        for _ in range(6):
            (found,) = fd.execute(own, overlap=Overlap.peers(pieces))
            assert torch.equal(found, (x @ w.T).cuda())
        fd, b = multiply_then_sum(d, 8 * d, 4 * d, epilogue=True), integers(3)
        for _ in range(6):
            (found,) = fd.execute([*own, b.cuda()], overlap=Overlap.peers(pieces))
            assert torch.equal(found, (x @ w.T + b).relu().half().cuda())
        fd = scatter_pieces(d, 8 * d, 4 * d)
        for _ in range(6):
            (found,) = fd.execute(own, overlap=Overlap.peers(pieces))
            assert torch.equal(found, block(x @ w.T, rank, d))
    group = Communicator.instance().group(tuple(range(d)), "cuda", "a test")
    assert group.transport is not None
    return "done"


def test_pipelines_are_exact() -> None:
    on_gpus(pipelines, deadline=DEADLINE)


def dawdle(draw: random.Random, rank: int) -> None:
    """One rank is late, now on the host, now on the device."""
    if draw.random() < 0.2 and draw.randrange(2) == rank:
        time.sleep(draw.random() / 100)
    if draw.random() < 0.3 and draw.randrange(2) == rank:
        torch.cuda._sleep(int(draw.random() * 5e6))


def random_sizes(rank: int, ranks: int) -> list[int]:
    """Memory allocated and reserved in the middle and at the end."""
    begin(rank, ranks)
    d, draw, late = ranks, random.Random(3), random.Random(rank)
    memory: list[int] = []
    sizes = [draw.choice([1, 2, 5, 64, 300, 1000]) for _ in range(12)]
    gathers = {n: gather_then_multiply(d, n) for n in sizes}
    scatters = {n: multiply_then_scatter(d, n, 4 * d) for n in sizes}
    w, v = integers(4, 5), integers(4 * d, 3)
    for step in range(200):
        rows = draw.choice(sizes)
        x = integers(rows, 4) + step
        dawdle(late, rank)
        (found,) = gathers[rows].execute([block(x, rank, d), w.cuda()])
        dawdle(late, rank)
        assert torch.equal(found, (x @ w).relu().cuda())
        x = integers(rows, 4 * d) - step
        (found,) = scatters[rows].execute([block(x, rank, d, axis=1), block(v, rank, d)])
        dawdle(late, rank)
        assert torch.equal(found, block(x @ v, rank, d))
        if step in (100, 199):
            torch.cuda.synchronize()
            memory += [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
    return memory


def test_any_sizes_in_any_order_and_one_rank_late() -> None:
    for outcome in on_gpus(random_sizes, deadline=DEADLINE):
        early, late = outcome.value[:2], outcome.value[2:]
        assert late[0] <= early[0] + (1 << 20) and late[1] <= early[1] + (1 << 22)


def captured(rank: int, ranks: int) -> str:
    begin(rank, ranks)
    fd, x, w = gather_then_multiply(ranks, 8), integers(8, 4), integers(4, 5).cuda()
    part = block(x, rank, ranks)
    fd.execute([part, w])
    torch.cuda.synchronize()
    warnings.filterwarnings("ignore", "The CUDA Graph is empty")
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(Unsupported, match="capture"):
        fd.execute([part, w])
    return "refused"


def test_transfers_are_not_captured() -> None:
    on_gpus(captured, deadline=DEADLINE)


def replays_counted() -> list[int]:
    """How many calls this process has replayed from here on, in its only place."""
    count, run = [0], Replay.run

    def counted(self: Replay, stream: int) -> None:
        count[0] += 1
        run(self, stream)

    Replay.run = counted
    return count


def replayed(rank: int, ranks: int) -> int:
    """How many of 210 calls were replayed; all of them have new values, most of them where the old
    ones were. For a while tensors of rank 1 lie elsewhere each time."""
    begin(rank, ranks)
    d, late, count = ranks, random.Random(rank), replays_counted()
    gather, scatter = gather_then_multiply(d, 300), multiply_then_scatter(d, 300, 4 * d)
    x, w = integers(300, 4), integers(4, 5)
    y, v = integers(300, 4 * d), integers(4 * d, 3)
    parts = [block(x, rank, d), w.cuda(), block(y, rank, d, axis=1), block(v, rank, d)]
    elsewhere: list[torch.Tensor] = []
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(120):
        dawdle(late, rank)
        here = parts
        if rank == 1 and 60 <= step < 80:
            here = [part.clone() for part in parts]
            elsewhere += here
        here[0].copy_(block(x + step, rank, d))
        here[2].copy_(block(y - step, rank, d, axis=1))
        (found,) = gather.execute(here[:2])
        kept.append((found, ((x + step) @ w).relu().cuda()))
        if step % 40 < 30:
            (found,) = scatter.execute(here[2:])
            kept.append((found, block((y - step) @ v, rank, d)))
        for found, wanted in kept if step % 10 == 9 else kept[-1:]:
            assert torch.equal(found, wanted), step
        del kept[:-3]
    return count[0]


def test_calls_that_come_again_are_replayed() -> None:
    first, second = (outcome.value for outcome in on_gpus(replayed, deadline=DEADLINE))
    assert 120 < second < first


def sums_in_turns(rank: int, ranks: int) -> int:
    """Sums that are made where peers read them, each of its own values and beside others, whoever
    is late: how many calls of 150 were replayed."""
    begin(rank, ranks)
    d, late, count = ranks, random.Random(rank), replays_counted()
    x, w, b = integers(64 * d, 4 * d), integers(3, 4 * d), integers(3)
    own = [block(x, rank, d, axis=1), block(w, rank, d, axis=1), b.cuda()]
    forms = [Overlap.peers(), Overlap.peers(2), Overlap.peers(4)]
    programs = [multiply_then_sum(d, 64 * d, 4 * d, epilogue=True) for _ in forms]
    for step in range(50):
        for fd, form in zip(programs, forms, strict=True):
            dawdle(late, rank)
            own[0].copy_(block(x + step % 7, rank, d, axis=1))
            (found,) = fd.execute(own, overlap=form)
            wanted = ((x + step % 7) @ w.T + b).relu().half()
            assert torch.equal(found, wanted.cuda()), step
    return count[0]


def test_sums_that_peers_fetch_come_again() -> None:
    for outcome in on_gpus(sums_in_turns, deadline=DEADLINE):
        assert outcome.value > 20


def kept_inputs(rank: int, ranks: int) -> str:
    begin(rank, ranks)
    mesh = DeviceMesh(range(ranks))
    fd, w = gather_then_multiply(ranks, 8), integers(4, 5).cuda()
    memories = [symmetric_empty((6, 4), torch.float32, mesh) for _ in range(2)]
    for step in range(12):
        x = integers(8, 4) + step
        part = memories[step % 2][step % 3 :][:4].copy_(block(x, rank, ranks))
        (found,) = fd.execute([part, w])
        assert torch.equal(found, (x.cuda() @ w).relu())
        torch.cuda.synchronize()
        dist.barrier()  # a peer may still read the part that the next step writes
    with pytest.raises(UserError, match="different symmetric memory"):
        fd.execute([memories[rank][2:], w])
    return "done"


def test_inputs_are_sent_from_symmetric_memory() -> None:
    on_gpus(kept_inputs, deadline=DEADLINE)
