"""Reading a launcher's environment."""

from __future__ import annotations

import pytest

from meshfuse.base.errors import UserError
from meshfuse.dist.launcher import DEFAULT_PORT, Launch, Place, read_launch, read_local_place

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host-a",
    "MASTER_PORT": "1234",
}


def test_torchrun() -> None:
    assert read_launch(TORCHRUN) == Launch(Place(3, 4, 1, 2), "host-a", 1234, hosts_store=False)
    first = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}
    assert read_launch(first) == Launch(Place(0, 4, 0, 2), "host-a", 1234, hosts_store=True)
    agent = {**first, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert read_launch(agent) == Launch(Place(0, 4, 0, 2), "host-a", 1234, hosts_store=False)


def test_open_mpi_goes_before_torchrun_and_own_address_before_others() -> None:
    environ = {
        **TORCHRUN,
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "NVFUSER_MASTER_ADDR": "host-b",
        "MESHFUSE_MASTER_PORT": "77",
    }
    assert read_launch(environ) == Launch(Place(1, 2, 1, 2), "host-b", 77, hosts_store=False)


def test_slurm_on_one_host_meets_locally() -> None:
    environ = {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    launch = read_launch(environ)
    assert launch == Launch(Place(1, 2, 1, 2), "localhost", DEFAULT_PORT, hosts_store=False)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"RANK": "", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_no_launch(environ: dict[str, str]) -> None:
    assert read_launch(environ) is None


def test_contradictions() -> None:
    with pytest.raises(UserError, match=r"WORLD_SIZE='two' in the environment: must be a number"):
        read_launch({"RANK": "0", "WORLD_SIZE": "two"})
    with pytest.raises(UserError, match="contradicts itself"):
        read_launch({"RANK": "2", "WORLD_SIZE": "2"})
    apart = {k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}
    with pytest.raises(UserError, match=r"4 ranks on several hosts \(2 on this one\).*MASTER_ADDR"):
        read_launch(apart)


def test_local_place_of_a_process_group() -> None:
    assert read_local_place(TORCHRUN, 3, 4) == Place(3, 4, 1, 2)
    assert read_local_place({}, 1, 2) == Place(1, 2, 1, 2)
