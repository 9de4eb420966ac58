"""Definitions run by real processes: ranks that disagree, fail, are interrupted, or start anew."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from threading import Timer

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from gloo_run import observe_ranks, run_ranks
from meshfuse import DistributedTensor, FusionDefinition, ParallelType
from meshfuse.base.errors import CommunicationError
from meshfuse.dist.communicator import Communicator
from meshfuse.host.timeline import Item, Kind, Lane
from meshfuse.multidevice import DeviceMesh, Overlap, Timeline

TEAM = (0, 1)


def gathered(scale: float = 2.0) -> FusionDefinition:
    """Shards of a vector, scaled and gathered on every rank."""
    mesh = DeviceMesh(TEAM)
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        y = fd.ops.set(fd.ops.mul(x, scale))
        fd.add_output(y)
        for tensor in (x, y):
            tensor.set_device_mesh(mesh)
        x.outer_split(0, len(TEAM))
        x.axis(0).parallelize(ParallelType.mesh_x)
    return fd


def summed_twice() -> FusionDefinition:
    """A linear on shards of the contraction, summed over the ranks, two times over."""
    mesh = DeviceMesh(TEAM)
    with FusionDefinition() as fd:
        x = fd.define_tensor([4, 4], contiguity=True)
        w = fd.define_tensor([4, 4], contiguity=True)
        y = fd.ops.linear(x, w)
        z = fd.ops.linear(fd.ops.mul(x, 2.0), w)
        fd.add_output(y)
        fd.add_output(fd.ops.add(y, z))
        for tensor in (x, w, y, z):
            tensor.set_device_mesh(mesh)
        for tensor in (x, w):
            tensor.outer_split(1, len(TEAM))
            tensor.axis(1).parallelize(ParallelType.mesh_x)
    return fd


def values(fd: FusionDefinition, shard: torch.Tensor) -> list[float]:
    [y] = fd.execute([shard])
    assert isinstance(y, DistributedTensor)
    return y.tolist()


def disagree_then_agree(rank: int, world_size: int, folder: str) -> list[list[float]]:
    """Different programs; then the same; then the same again in a new process group, in which the
    ranks have changed places."""
    scaled = gathered()
    with pytest.raises(CommunicationError) as caught:
        other = summed_twice() if rank else scaled
        other.execute([torch.ones(4, 2), torch.ones(4, 2)] if rank else [torch.ones(2)])
    message = str(caught.value)
    assert message.startswith(f"ranks {rank} and {1 - rank} run different programs")
    assert "communicate(all_gather, " in message, message
    assert "communicate(all_reduce, " in message
    seen = [values(scaled, torch.tensor([10.0 * rank, 10.0 * rank + 1])) for _ in range(2)]
    group = weakref.ref(Communicator.instance().group((0, 1), "cpu", "a test"))
    dist.destroy_process_group()
    Communicator.instance()
    gc.collect()
    assert group() is None, "what a definition keeps does not hold groups that are closed"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/again",
        rank=1 - rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    return [*seen, *(values(scaled, torch.full((2,), float(rank))) for _ in range(2))]


def test_ranks_that_run_different_programs_and_ranks_that_change_places(
    tmp_path: Path,
) -> None:
    before, after = [0.0, 2.0, 20.0, 22.0], [2.0, 2.0, 0.0, 0.0]
    results = run_ranks(disagree_then_agree, 2, str(tmp_path))
    assert results == [[before, before, after, after]] * 2


def interrupted_in_a_wait(rank: int, world_size: int) -> float:
    """Ctrl-C while rank 0 waits for rank 1. Returns how long each was held up, in seconds."""
    fd = gathered()
    fd.execute([torch.ones(2)])
    if rank == 1:
        time.sleep(1.5)
        fd.execute([torch.ones(2)])  # rank 0 had sent its part
        started = time.monotonic()
        with pytest.raises(CommunicationError, match="rank 0 gave up: interrupted in all_gather"):
            fd.execute([torch.ones(2)])
        return time.monotonic() - started
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    Timer(0.5, press).start()
    with pytest.raises(KeyboardInterrupt):
        fd.execute([torch.ones(2)])
    held_up = time.monotonic() - pressed[0]
    with pytest.raises(CommunicationError, match="the group failed before"):
        fd.execute([torch.ones(2)])
    time.sleep(3)  # rank 1 must be told, not see that this process has ended
    return held_up


def test_ctrl_c_ends_a_wait_within_a_second_and_the_peer_is_told() -> None:
    first, second = observe_ranks(interrupted_in_a_wait, 2)
    assert first.succeeded, first.error
    assert second.succeeded, second.error
    assert first.value < 1.0
    assert second.value < 5.0


def fails_between_posts(rank: int, world_size: int) -> str:
    """On rank 1 the second linear fails while the first all-reduce is under way."""
    fd = summed_twice()
    inputs = [torch.ones(4, 2), torch.ones(4, 2)]
    real, to_come = functional.linear, [-1]

    def fail_at_last(*arguments: torch.Tensor) -> torch.Tensor:
        to_come[0] -= 1
        if to_come[0] == 0:
            raise MemoryError("no room for the second")
        return real(*arguments)

    functional.linear = fail_at_last  # before the first call: later ones look up nothing
    assert fd.execute(inputs)[1].tolist() == [[12.0] * 4] * 4
    if rank == 0:
        with pytest.raises(CommunicationError) as caught:
            fd.execute(inputs)
        time.sleep(1)
        return str(caught.value)
    to_come[0] = 2
    with pytest.raises(MemoryError, match="no room for the second"):
        fd.execute(inputs)
    with pytest.raises(CommunicationError, match="the group failed before"):
        fd.execute(inputs)
    time.sleep(2)
    return ""


def test_a_rank_that_fails_between_collectives_tells_its_peers_why() -> None:
    survivor, failed = observe_ranks(fails_between_posts, 2)
    assert survivor.succeeded, survivor.error
    assert failed.succeeded, failed.error
    assert "rank 1 gave up: MemoryError: no room for the second" in survivor.value
    assert survivor.seconds < 20


def measure_a_sum_beside_a_linear(rank: int, world_size: int) -> Timeline:
    """The second call: in the first, the ranks form their group."""
    fd = summed_twice()
    inputs = [torch.randn(4, 2), torch.randn(4, 2)]
    fd.timeline(inputs, measured=True)
    return fd.timeline(inputs, measured=True)


def measure_a_sum_in_chunks(rank: int, world_size: int) -> Timeline:
    fd = summed_twice()
    inputs = [torch.randn(4, 2), torch.randn(4, 2)]
    for _ in range(2):
        found = fd.timeline(inputs, measured=True, overlap=Overlap.chunks(2))
    return found


def test_a_measured_timeline_has_the_streams_of_a_form() -> None:
    """Everything is on the stream that it is predicted on; one thread does one thing at a time."""
    predicted = summed_twice().timeline(overlap=Overlap.chunks(2))
    wanted = sorted((i.label.name, i.stream or 0) for i in predicted.items if not is_wait(i))
    for found in run_ranks(measure_a_sum_in_chunks, 2):
        assert found.worker_streams == predicted.worker_streams == (0, 1)
        done = [i for i in found.items if i.label.kind is not Kind.post and not is_wait(i)]
        assert sorted((i.label.name, i.stream or 0) for i in done) == wanted
        for before, after in pairwise(i for i in found.items if i.lane is Lane.compute):
            assert before.end <= after.start + 1e-12
        assert found.seconds >= found.bound_seconds > 0.0


def is_wait(item: Item) -> bool:
    return item.label.kind is Kind.wait


def test_a_measured_timeline_has_what_is_predicted() -> None:
    predicted = summed_twice().timeline()
    for rank, found in enumerate(run_ranks(measure_a_sum_beside_a_linear, 2)):
        assert (found.rank, found.is_measured, found.source) == (rank, True, "cpu")
        for kind in (Kind.gemm, Kind.communication, Kind.kernel):
            wanted = {item.label for item in predicted.items if item.label.kind is kind}
            assert {item.label for item in found.items if item.label.kind is kind} == wanted
        for lane in Lane:
            items = [item for item in found.items if item.lane is lane]
            for before, after in pairwise(items):
                assert before.end <= after.start + 1e-12
        sums = [item for item in found.items if item.label.kind is Kind.communication]
        posts = [item for item in found.items if item.label.kind is Kind.post]
        waits = [item for item in found.items if item.label.kind is Kind.wait]
        assert len(sums) == len(posts) == len(waits) == 2
        assert [item.bytes for item in sums] == [64, 64]
        for begun, sum_, over in zip(posts, sums, waits, strict=True):
            assert begun.start <= sum_.start and sum_.end <= over.end + 1e-12
        assert 0.0 <= found.hidden_fraction <= 1.0
        assert found.seconds >= found.bound_seconds > 0.0
