"""Setting up torch's default process group, as a launcher says, for a process that has none."""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import atexit

import torch
import torch.distributed as dist

from meshfuse.base.errors import CommunicationError
from meshfuse.dist.board import Board, publish_identity
from meshfuse.dist.deadlines import Deadline, await_arrival, backend_limit
from meshfuse.dist.launcher import Launch


def join_launch(launch: Launch, seconds: float, purpose: object) -> None:
    """Set up torch's default process group from the launcher's environment.

    All ranks are called by name first: torch alone would wait deaf to Ctrl-C, and not say for whom.
    """
    place, limit = launch.place, backend_limit(seconds)
    try:
        store = dist.TCPStore(
            launch.address,
            launch.port,
            place.size,
            is_master=launch.hosts_store,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise CommunicationError(
            f"{purpose}: rank {place.rank} cannot reach the store of rank 0 or the launcher at "
            f"{launch.address}:{launch.port}: {str(error).splitlines()[0]}"
        ) from error
    if place.local_rank < torch.cuda.device_count():  # programs of CPU tensors need none
        torch.cuda.set_device(place.local_rank)
    calls = dist.PrefixStore("meshfuse launch", store)
    processes = dist.PrefixStore("processes", calls)
    generation = calls.add(f"joined {place.rank}", 1)
    publish_identity(processes, place.rank)
    notices = dist.PrefixStore(f"roll {generation}", calls)
    board = Board(place.rank, tuple(range(place.size)), notices, processes)
    await_arrival(board, Deadline.after(seconds), purpose)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"torch {generation}", store),
        rank=place.rank,
        world_size=place.size,
        timeout=limit,
    )
    atexit.register(_leave_launch)


def _leave_launch() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
