"""A communicator without peers."""

from __future__ import annotations

import pytest
import torch

from meshfuse.base.errors import CommunicationError
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
