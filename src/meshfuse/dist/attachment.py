"""What a process has on one default process group of torch.distributed; on another all is new."""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final
from weakref import WeakSet

import torch.distributed as dist

from meshfuse.dist.board import Board, Standing, publish_identity
from meshfuse.dist.calls import CallLog
from meshfuse.dist.deadlines import Watch
from meshfuse.dist.groups import CONTROL, Group
from meshfuse.dist.history import CallHistory
from meshfuse.dist.kept_memory import KeptMemories
from meshfuse.dist.launcher import Place, read_local_place
from meshfuse.ir.mesh import DeviceMesh


class Bound(Protocol):
    """What has looked up groups, and lets go of them when they are closed."""

    def forget(self) -> None: ...


@final
@dataclass(slots=True, eq=False, repr=False)
class Attachment:
    """What stands on one default process group: our part of its store, the groups made so far, and
    what was agreed on in them. `bound` are told when these are closed, if they still exist; who
    comes later sees that it `is_closed`."""

    world: dist.ProcessGroup
    store: dist.Store
    place: Place
    calls: CallLog
    groups: dict[tuple[tuple[int, ...], str], Group] = field(default_factory=dict)
    histories: dict[tuple[int, ...], CallHistory] = field(
        default_factory=dict[tuple[int, ...], CallHistory]
    )
    joined: dict[tuple[int, ...], Group] = field(default_factory=dict[tuple[int, ...], Group])
    kept_memory: KeptMemories = field(default_factory=KeptMemories)
    memory_histories: dict[tuple[int, ...], CallHistory] = field(
        default_factory=dict[tuple[int, ...], CallHistory]
    )
    bound: WeakSet[Bound] = field(default_factory=WeakSet)
    torch_meshes: dict[tuple[DeviceMesh, str], Any] = field(default_factory=dict)
    is_closed: bool = False

    def history(self, team: tuple[int, ...]) -> CallHistory:
        """The calls of a team."""
        found = self.histories.get(team)
        if found is None:
            found = self.histories[team] = CallHistory()
        return found

    def memory_history(self, team: tuple[int, ...]) -> CallHistory:
        """In which of the memory that users keep the inputs of a team's calls lay.

        At first in none: ranks that have none never look, nor do peers who do not use theirs.
        """
        found = self.memory_histories.get(team)
        if found is None:
            found = self.memory_histories[team] = CallHistory()
            found.note(())
        return found

    @property
    def processes(self) -> dist.Store:
        return dist.PrefixStore("processes", self.store)

    def board(self, team: tuple[int, ...], name: str) -> Board:
        key = f"{name} {' '.join(map(str, team))}"
        return Board(self.place.rank, team, dist.PrefixStore(key, self.store), self.processes)

    def watch_for(self, device_type: str) -> Watch:
        return self.find_absent if device_type == CONTROL else self.find_refusals

    def find_refusals(self, board: Board) -> Mapping[int, str]:
        """Those that do not come to the call that this rank is in."""
        return self.calls.refusals(board.peers)

    def find_absent(self, board: Board) -> Mapping[int, str]:
        """Those that do not come to an agreement: that refused the call, or wait for this rank
        elsewhere, which will not come there before they have agreed."""
        absent = self.calls.refusals(board.peers)
        control = self.groups.get((board.team, CONTROL))
        for (_, device_type), group in self.groups.items():
            if device_type == CONTROL:
                continue
            for rank in set(group.board.peers) & set(board.peers):
                has_come = control is not None and control.has_come(rank)
                text = None if has_come else _elsewhere(group, rank)
                if text is not None:
                    absent[rank] = text
        return absent

    def close(self) -> None:
        self.is_closed = True
        for bound in list(self.bound):
            bound.forget()
        for key in sorted(self.groups):
            self.groups[key].close()
        self.groups.clear()


def _elsewhere(group: Group, rank: int) -> str | None:
    """What a peer does on a group that keeps it from all else: wait for this rank, or give up."""
    notice = group.board.read(rank)
    if notice is None:
        return None
    if notice.standing is Standing.failed:
        return f"gave up: {notice.text}"
    if notice.sequence <= group.posted:
        return None
    return (
        f"does not come, but waits for {notice.text}, as this rank did in an earlier call: the "
        "two run different programs, or one program with inputs of different global sizes"
    )


def attach(world: dist.ProcessGroup, environ: Mapping[str, str]) -> Attachment:
    """Take a part of the store of a default process group, and say there who this process is."""
    place = read_local_place(environ, dist.get_rank(), dist.get_world_size())
    whole = dist.PrefixStore("meshfuse", dist.distributed_c10d._get_default_store())
    # A launcher's store outlives the process groups on it; each of them gets keys of its own.
    generation = whole.add(f"attached {place.rank}", 1)
    store = dist.PrefixStore(str(generation), whole)
    calls = CallLog(place.rank, dist.PrefixStore("calls", store))
    attachment = Attachment(world, store, place, calls)
    publish_identity(attachment.processes, place.rank)
    return attachment
