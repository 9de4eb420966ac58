"""A communicator without peers."""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator
from threading import RLock
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshfuse.base.errors import CommunicationError
from meshfuse.dist.agreement import CommunicationSequence
from meshfuse.dist.attachment import Attachment
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.communicator import Communicator


def request(team: tuple[int, ...], count: int) -> CollectiveRequest:
    out = torch.empty(count * len(team))
    return CollectiveRequest(0, "all_gather", team, torch.ones(count), out, None, "T1 = set(T0)")


def test_alone() -> None:
    communicator = Communicator({})
    assert (communicator.size(), communicator.rank()) == (1, 0)
    assert (communicator.local_size(), communicator.local_rank()) == (1, 0)
    communicator.barrier()
    assert communicator.device().type in ("cpu", "cuda")


def test_team_of_one_and_empty_tensors_need_no_peers() -> None:
    communicator = Communicator({})
    assert communicator.run(request((0,), 2)).tolist() == [1.0, 1.0]
    assert communicator.run(request((0, 1), 0)).tolist() == []


def test_collective_of_a_process_that_is_alone() -> None:
    with pytest.raises(CommunicationError, match=r"all_gather number 0.*alone.*torchrun"):
        Communicator({}).run(request((0, 1), 2))


def test_rank_and_size_are_known_before_the_ranks_meet() -> None:
    communicator = Communicator({"RANK": "1", "WORLD_SIZE": "2", "MESHFUSE_TIMEOUT": "7"})
    assert (communicator.rank(), communicator.size(), communicator.timeout) == (1, 2, 7.0)


def test_instance_is_one() -> None:
    assert Communicator.instance() is Communicator.instance()


def test_the_option_multidevice_disabled_leaves_a_process_alone() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "NVFUSER_DISABLE": "multidevice"}
    communicator = Communicator(environ)
    assert (communicator.size(), communicator.rank()) == (1, 0)
    assert (communicator.local_size(), communicator.local_rank()) == (1, 0)
    communicator.barrier()
    with pytest.raises(CommunicationError, match="MESHFUSE_DISABLE says multidevice"):
        communicator.run(request((0, 1), 2))


class SimpleBound:
    def __init__(self, told: list[str]) -> None:
        self._told = told

    def forget(self) -> None:
        self._told.append("forget")


def make_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A default process group of one rank, or one that was made in its place."""
    make_group()
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_what_another_thread_has_attached_to_stays() -> None:
    """It comes between the look at a process group and the lock: there is a new one by then. Peers
    would look for a rank that attaches again where it stood first."""
    communicator = Communicator({})
    seen: list[Attachment | None] = []

    class OtherThread:
        def __enter__(self) -> None:
            communicator._lock = RLock()
            dist.destroy_process_group()
            make_group()
            seen.append(communicator._find_attachment())

        def __exit__(self, *error: object) -> None: ...

    other: Any = OtherThread()
    communicator._lock = other
    assert communicator._find_attachment() is seen[0] is communicator._attachment
    assert seen[0] is not None and not seen[0].is_closed
    communicator.close()
    assert seen[0].is_closed


@pytest.mark.usefixtures("process_group")
def test_who_binds_to_what_was_closed_meanwhile_is_told() -> None:
    communicator, told = Communicator({}), list[str]()
    entry = communicator.entry([CommunicationSequence.of((0,), ["a program"]).at({})])
    bound = SimpleBound(told)
    entry.bind(bound)
    assert not told
    communicator.close()
    assert told == ["forget"]
    entry.bind(bound)
    assert told == ["forget", "forget"]
