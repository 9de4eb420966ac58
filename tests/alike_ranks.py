"""Two ranks which have the same, on tensors of this process in place of a GPU's."""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from meshfuse.dist import deadlines, groups
from meshfuse.dist.board import Board, publish_identity
from meshfuse.dist.collectives import CollectiveBackend, CollectiveRequest
from meshfuse.dist.groups import Group
from meshfuse.dist.pending import Pending

TEAM = (0, 1)


@dataclass
class Backend:
    """That of two ranks which have the same. What it is asked is done at once, or by its work."""

    log: list[str] = field(default_factory=list[str])
    has_work: bool = False
    fails: bool = False

    def _allgather_base(self, out: torch.Tensor, src: torch.Tensor, *options: object) -> Any:
        if self.fails:
            raise RuntimeError("the other rank is away")
        self.log.append(f"gather {src.numel()}")
        out.view(2, -1).copy_(src.reshape(1, -1).expand(2, -1))
        return self._work()

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> Any:
        self.log.append("reduce")
        tensors[0].mul_(2)
        return self._work()

    def _work(self) -> Any:
        return SimpleNamespace(wait=lambda: self.log.append("wait")) if self.has_work else None

    def abort(self) -> None:
        self.log.append("abort")


@dataclass
class Peers:
    """In place of a communicator. `requests`: how often it was asked the long way; `told`: of what
    peers were told that this rank gives up for."""

    group: Group
    requests: int = 0
    told: list[str] = field(default_factory=list[str])

    def post(self, request: CollectiveRequest) -> Pending:
        self.requests += 1
        return Pending(self.group.post(request), self.group, 5.0)

    def give_up(self, reason: str) -> None:
        self.told.append(reason)


def seem_to_be_on_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of this process' tensors are taken for those of a CUDA stream."""
    monkeypatch.setattr(groups, "is_on_stream", lambda request: True)
    for module in (deadlines, groups):
        monkeypatch.setattr(module, "current_handle", lambda index: 7)
    monkeypatch.setattr(deadlines, "mark_stream", lambda stream: lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)


def peers_over(backend: Backend) -> Peers:
    store = HashStore()
    notices, processes = PrefixStore("n", store), PrefixStore("p", store)
    for rank in TEAM:
        publish_identity(processes, rank)
    return Peers(Group(Board(0, TEAM, notices, processes), cast(CollectiveBackend, backend)))
