"""What a launcher (torchrun, Open MPI, Slurm) tells its processes through their environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from meshfuse.base.errors import UserError
from meshfuse.base.frozen import frozen_dataclass

RANK = ("OMPI_COMM_WORLD_RANK", "RANK", "SLURM_PROCID")
SIZE = ("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE", "SLURM_NTASKS")
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID")
LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")
ADDRESS = ("MESHFUSE_MASTER_ADDR", "NVFUSER_MASTER_ADDR", "MASTER_ADDR")
PORT = ("MESHFUSE_MASTER_PORT", "NVFUSER_MASTER_PORT", "MASTER_PORT")
"""Of each row the first variable that is set counts."""

DEFAULT_PORT = 29542
"""Not torch's own 29500, so that a torch store may run beside it."""


@final
@frozen_dataclass
class Place:
    """Where a process stands among all, and among those of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int


ALONE = Place(0, 1, 0, 1)


@final
@frozen_dataclass
class Launch:
    """A process started by a launcher, and where its ranks meet.

    `hosts_store`: rank 0 of ours must start the store; False where torchrun's agent runs it
    already.
    """

    place: Place
    address: str
    port: int
    hosts_store: bool


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """The launch that `environ` describes, or None: no rank, no size, or a size of 1.

    Without local values all ranks are taken to be on this host. Raises UserError for values that
    are no numbers or contradict each other, and for ranks on several hosts without an address to
    meet at.
    """
    rank, size = _number(environ, RANK), _number(environ, SIZE)
    if rank is None or size is None or size == 1:
        return None
    local_rank, local_size = _number(environ, LOCAL_RANK), _number(environ, LOCAL_SIZE)
    place = Place(
        rank,
        size,
        rank if local_rank is None else local_rank,
        size if local_size is None else local_size,
    )
    if not (0 <= rank < size and 0 <= place.local_rank < place.local_size <= size):
        raise UserError(f"the launcher's environment contradicts itself: {place}")
    address = _first(environ, ADDRESS)
    if address is None and place.local_size < size:
        raise UserError(
            f"{size} ranks on several hosts ({place.local_size} on this one) need an address to "
            f"meet at: set {ADDRESS[-1]} to a host name that all of them reach, and {PORT[-1]} "
            f"if not {DEFAULT_PORT}"
        )
    port = _number(environ, PORT)
    agent_runs_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(
        place,
        "localhost" if address is None else address,
        DEFAULT_PORT if port is None else port,
        hosts_store=rank == 0 and not agent_runs_store,
    )


def read_local_place(environ: Mapping[str, str], rank: int, size: int) -> Place:
    """The place of a rank whose process group is up already: local values from the launcher, if it
    gave any."""
    local_rank, local_size = _number(environ, LOCAL_RANK), _number(environ, LOCAL_SIZE)
    if local_rank is None or local_size is None:
        return Place(rank, size, rank, size)
    return Place(rank, size, local_rank, local_size)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = environ.get(name)
        if text:
            if not text.isdecimal():
                raise UserError(f"{name}={text!r} in the environment: must be a number")
            return int(text)
    return None
