"""What the ranks of a team tell one another through the store when something takes long or fails.

Nothing is written while communications go well: a rank that waits longer than usual says for what,
a rank that gives up says why. Whether a process still lives is read from the operating system,
which sees it at once; a process on another host is known only by what it writes.
"""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import socket
from dataclasses import field
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import final

import torch.distributed as dist

from meshfuse.base.frozen import frozen_dataclass

_ANY_FAILED = "any failed"


@final
@frozen_dataclass
class ProcessIdentity:
    """A process as its peers can recognise it. `namespace` tells apart process numbers of
    different hosts and containers."""

    host: str
    namespace: str
    pid: int
    started: str

    def encode(self) -> str:
        return "\n".join((self.host, self.namespace, str(self.pid), self.started))

    @staticmethod
    def decode(text: str) -> ProcessIdentity:
        host, namespace, pid, started = text.split("\n")
        return ProcessIdentity(host, namespace, int(pid), started)

    @property
    def host_number(self) -> int:
        """64 bits, signed: the same for processes that know one another by their numbers."""
        text = f"{self.host}\n{self.namespace}"
        digest = blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def identify_process(pid: int | None = None) -> ProcessIdentity:
    """The identity of a process of this host, by default of this one."""
    pid = os.getpid() if pid is None else pid
    return ProcessIdentity(socket.gethostname(), _namespace(), pid, _process_state(pid)[1])


def has_ended(identity: ProcessIdentity) -> bool:
    """Whether a process has ended for sure. False where this host cannot tell."""
    if (identity.host, identity.namespace) != (socket.gethostname(), _namespace()):
        return False
    if not identity.started:
        return False
    state, started = _process_state(identity.pid)
    return state in ("", "Z", "X") or started != identity.started


def _namespace() -> str:
    """Boot and process-number namespace; "" where the system has no such files."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _process_state(pid: int) -> tuple[str, str]:
    """State letter and start time of a process, from /proc; both "" if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return fields[0], fields[19]


class Standing(Enum):
    """What a rank has last said about itself."""

    arrived = "arrived"
    waits = "waits"
    failed = "failed"


@final
@frozen_dataclass
class Notice:
    """One rank's last word to its team: `sequence` counts the collectives of the group, from 1."""

    standing: Standing
    sequence: int
    text: str

    def encode(self) -> str:
        return f"{self.standing.value} {self.sequence} {self.text}"

    @staticmethod
    def decode(text: str) -> Notice:
        standing, sequence, rest = text.split(" ", 2)
        return Notice(Standing(standing), int(sequence), rest)


@final
@frozen_dataclass
class Board:
    """The page of one team, as `rank` reads and writes it.

    `notices` is the team's part of the store, `processes` the part where every process says who it
    is; what was read of the latter is kept in `known`. Methods raise RuntimeError, as torch's
    stores do, when the process that holds the store is gone.
    """

    rank: int
    team: tuple[int, ...]
    notices: dist.Store
    processes: dist.Store
    known: dict[int, ProcessIdentity] = field(default_factory=dict)

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.team if rank != self.rank)

    def announce(self, notice: Notice) -> None:
        """Replace this rank's notice."""
        self.notices.set(str(self.rank), notice.encode())
        if notice.standing is Standing.failed:
            self.notices.set(_ANY_FAILED, "yes")

    def read(self, rank: int) -> Notice | None:
        text = _read(self.notices, str(rank))
        return None if text is None else Notice.decode(text)

    def failures(self) -> dict[int, str]:
        """Peers that gave up, with their reasons. One look at the store while all goes well."""
        if not self.notices.check([_ANY_FAILED]):
            return {}
        notices = {rank: self.read(rank) for rank in self.peers}
        return {
            rank: notice.text
            for rank, notice in notices.items()
            if notice is not None and notice.standing is Standing.failed
        }

    def ended(self) -> dict[int, ProcessIdentity]:
        """Peers whose process has ended."""
        for rank in self.peers:
            if rank not in self.known:
                identity = read_identity(self.processes, rank)
                if identity is not None:
                    self.known[rank] = identity
        return {rank: identity for rank, identity in self.known.items() if has_ended(identity)}

    def describe_absence(self, sequence: int) -> dict[int, str]:
        """For each peer that does not wait in the `sequence`-th collective: what is known of it."""
        ended = self.ended()
        absent: dict[int, str] = {}
        for rank in self.peers:
            notice = self.read(rank)
            if rank in ended:
                absent[rank] = f"has ended ({ended[rank]})"
            elif notice is None or notice.standing is Standing.arrived:
                absent[rank] = "does not wait for it"
            elif notice.standing is Standing.failed:
                absent[rank] = f"gave up: {notice.text}"
            elif notice.sequence != sequence:
                absent[rank] = f"does not wait for it; it last waited for {notice.text}"
        return absent


def publish_identity(processes: dist.Store, rank: int) -> None:
    processes.set(str(rank), identify_process().encode())


def read_identity(processes: dist.Store, rank: int) -> ProcessIdentity | None:
    text = _read(processes, str(rank))
    return None if text is None else ProcessIdentity.decode(text)


def _read(store: dist.Store, key: str) -> str | None:
    """A value without waiting for it to be set."""
    return store.get(key).decode() if store.check([key]) else None
