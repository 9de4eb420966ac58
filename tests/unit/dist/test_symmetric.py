"""Symmetric memory where there is none: what torch is told of a team, and what ranks agree on."""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshfuse.dist import symmetric
from meshfuse.dist.symmetric import _CudaLink, join_transport, name_group

resolve: Any = dist.distributed_c10d._resolve_process_group


def test_torch_resolves_a_team_by_its_name() -> None:
    """As CUDASymmetricMemory does to open a window: place, size, store, and no other way than the
    store."""
    store = dist.HashStore()
    group = name_group("meshfuse test", 1, 3, store)
    found = resolve("meshfuse test")
    assert (found.rank(), found.size()) == (1, 3)
    if hasattr(found, "use_pg_for_symm_mem_rendezvous"):  # since torch 2.13
        assert not found.use_pg_for_symm_mem_rendezvous
    found.get_group_store().set("key", "value")
    assert store.get("key") == b"value"
    del group, found
    with pytest.raises(RuntimeError, match="already been destroyed"):
        resolve("meshfuse test")


def joined(monkeypatch: pytest.MonkeyPatch, missing: str, *others: list[int]) -> str:
    """Why rank 4, first of its team, has no transport; None on all ranks if for any."""
    monkeypatch.setattr(symmetric, "_missing_here", lambda: missing)

    def gather(mine: Sequence[int], purpose: str) -> list[list[int]]:
        assert purpose == "symmetric memory"
        return [list(mine), *(other if len(mine) == 2 else [1] for other in others)]

    team = tuple(range(4, 5 + len(others)))
    transport, reason = join_transport(gather, team, 4, torch.device("cpu"), dist.HashStore())
    assert transport is None
    return reason


def test_one_rank_without_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joined(monkeypatch, "there is no CUDA device", [1, 7]) == "there is no CUDA device"
    assert joined(monkeypatch, "", [1, 7], [0, 7]) == "rank 6 has no symmetric memory"


def test_hosts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joined(monkeypatch, "", [1, 7]) == "they are not on one host"


def test_a_failure_to_open_memory_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """All were able to, but here the driver is missing when it comes to it."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr(symmetric, "SymmetricTransport", fail)
    monkeypatch.setattr(symmetric, "identify_process", lambda: SimpleNamespace(host_number=7))
    assert joined(monkeypatch, "", [1, 7]) == "no memory"


class Driver:
    """In place of StreamMemory: what is put on which stream, in rows, and what stands beside."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def put(self, stream: int, operations: Sequence[tuple[int, int, int]]) -> None:
        self.log.append([value for _, _, value in operations])

    def put_beside(
        self, stream: int, operations: Sequence[tuple[int, int, int]]
    ) -> tuple[int, ...]:
        self.log.append(["beside", *[value for _, _, value in operations]])
        return (len(self.log),)

    def follow(self, stream: int, nodes: Sequence[int]) -> None:
        self.log += [("follow", *nodes)] * bool(nodes)


@pytest.mark.parametrize("is_recording", [False, True])
def test_only_what_is_raised_in_a_graph_stands_beside(
    is_recording: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other streams there is no beside, and what follows a flag that is awaited waits for it.
    Flags of one stream stay in order."""
    monkeypatch.setattr(symmetric, "current_handle", lambda device: 3)
    link: Any = object.__new__(_CudaLink)
    link.device, link._driver = torch.device("cpu"), Driver()
    link._queue, link._addresses, link._place = [], [0x1000, 0x2000], 0
    link.log, link.beside = [] if is_recording else None, {}
    link.raise_flag(1, 2, 7)
    link.flush(is_beside=True)
    link.raise_flag(1, 2, 8)
    link.await_flag(3, 9)
    link.flush(is_beside=True)
    link.raise_flag(1, 2, 10)
    link.flush()
    link.flush(is_beside=True)
    first = [["beside", 7], ("follow", 1)] if is_recording else [[7]]
    assert link._driver.log == [*first, [8, 9], [10]]
    told = [(0x2008, 7), (0x2008, 8), (0x100C, 9), (0x2008, 10)]
    assert link.log == (told if is_recording else None)
