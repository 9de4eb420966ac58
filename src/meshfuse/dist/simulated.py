"""All ranks' collectives inside this process, with the meaning that they have between processes.

`perform` runs one collective for a whole team at once. SimulatedTransport lets each rank post and
wait in its own time, and is stricter than a network: between post and wait `out` is poisoned and
`src` must not change, so that a missing wait shows as an error or as NaN in the results. What ranks
send is packed at the post and unpacked at the wait, as between processes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch

from meshfuse.base.errors import CommunicationError, InvariantError
from meshfuse.dist.collectives import (
    CollectiveRequest,
    check_request,
    reduce_blocks,
)
from meshfuse.dist.wires import Wire


def perform(requests: Mapping[int, CollectiveRequest]) -> None:
    """Fill every rank's `out`, given the requests of all ranks of one team.

    Raises CommunicationError, naming ranks, if they do not ask for the same thing, and what
    check_request raises.
    """
    first = next(iter(requests.values()))
    missing = [rank for rank in first.team if rank not in requests]
    if missing or len(requests) != len(first.team):
        raise CommunicationError(
            f"{first}: posted by ranks {tuple(requests)}; missing: {tuple(missing)}"
        )
    for place, rank in enumerate(first.team):
        check_request(requests[rank])
        for other in first.team[:place] if _is_by_pairs(first) else first.team[:1]:
            _check_same(other, requests[other], rank, requests[rank])
    wires = [requests[rank].wire() for rank in first.team]
    for wire, result in zip(wires, _results([requests[r] for r in first.team], wires), strict=True):
        wire.receive.copy_(result)
        wire.finish()


def _results(
    requests: Sequence[CollectiveRequest], wires: Sequence[Wire]
) -> Sequence[torch.Tensor]:
    """What each rank receives, in team order; none of it is memory of what one sends."""
    ranks, collective = len(wires), requests[0].collective
    if collective == "exchange":
        sent = [wire.send.split(_lengths(r)[0]) for r, wire in zip(requests, wires, strict=True)]
        return [torch.cat(blocks) for blocks in zip(*sent, strict=True)]
    sources = [wire.send for wire in wires]
    transfer = requests[0].transfer
    if transfer is not None:
        return [sources[source] for source in transfer.sources]
    if collective == "all_gather":
        return [torch.cat(sources)] * ranks
    reduced = torch.empty_like(sources[0])
    reduce_blocks(sources, requests[0].function, reduced)
    if collective == "all_reduce":
        return [reduced] * ranks
    return list(reduced.view(ranks, -1))


def _lengths(request: CollectiveRequest) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of an exchange: how much goes to each rank and comes from it."""
    packing = request.packing
    assert packing is not None
    return packing.sends.lengths, packing.receives.lengths


def _is_by_pairs(request: CollectiveRequest) -> bool:
    """Whether what goes from one rank to another depends on both."""
    return request.collective in ("exchange", "fetch", "deliver")


def _check_same(rank: int, a: CollectiveRequest, other: int, b: CollectiveRequest) -> None:
    """Two ranks of a team must ask for the same; the error names them and the first difference."""
    facts: dict[str, tuple[object, object]] = {
        "number": (a.number, b.number),
        "collective": (a.collective, b.collective),
        "team": (a.team, b.team),
        "function": (a.function, b.function),
        "element type": (a.src.dtype, b.src.dtype),
    }
    if a.transfer is not None and b.transfer is not None:
        facts["senders"] = (a.transfer.sources, b.transfer.sources)
        if b.transfer.place in a.transfer.receivers:
            facts["elements sent"] = (a.src.numel(), b.out.numel())
        if a.transfer.place in b.transfer.receivers:
            facts["elements received"] = (a.out.numel(), b.src.numel())
    elif a.collective != "exchange":
        facts["bytes"] = (a.bytes, b.bytes)
    elif a.team == b.team and a.collective == b.collective:
        sent, received = _lengths(a)[0], _lengths(b)[1]
        facts["elements sent"] = (sent[a.team.index(other)], received[a.team.index(rank)])
        sent, received = _lengths(b)[0], _lengths(a)[1]
        facts["elements received"] = (received[a.team.index(other)], sent[a.team.index(rank)])
    for name, (mine, theirs) in facts.items():
        if mine != theirs:
            raise CommunicationError(
                f"ranks {rank} and {other} disagree on the {name}: {mine} and {theirs}; "
                f"rank {rank} posted {a}; rank {other} posted {b}"
            )


@final
@dataclass(slots=True, eq=False, repr=False)
class _Round:
    """The k-th collective of a team: who posted it, what they send, with checksums of where it came
    from, and the results."""

    requests: dict[int, CollectiveRequest] = field(default_factory=dict)
    wires: dict[int, Wire] = field(default_factory=dict)
    checksums: dict[int, int | None] = field(default_factory=dict)
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    delivered: int = 0

    def outcome(self, team: Sequence[int]) -> Sequence[torch.Tensor]:
        """What each rank receives, in team order."""
        return _results([self.requests[r] for r in team], [self.wires[r] for r in team])


@final
class SimulatedTransport:
    """The collectives of all ranks of a mesh, stepped by one thread."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[int, ...], list[_Round]] = {}
        self._posted: dict[tuple[tuple[int, ...], int], int] = {}
        self._outstanding: dict[tuple[int, int], _Round] = {}

    def post(self, rank: int, request: CollectiveRequest) -> None:
        """Start `rank`'s part. Poisons `out`, unless that is what it has and keeps.

        Raises CommunicationError if another rank's collective in this place differs,
        InvariantError for a number posted again before its wait.
        """
        if rank not in request.team:
            raise InvariantError(f"{request}: rank {rank} is not in the team")
        if (rank, request.number) in self._outstanding:
            raise InvariantError(f"rank {rank} posted again, without a wait between: {request}")
        check_request(request)
        current = self._join(rank, request)
        in_place = request.src.data_ptr() == request.out.data_ptr() and request.src.numel() > 0
        current.requests[rank] = request
        current.checksums[rank] = None if in_place else _checksum(request.src)
        self._outstanding[rank, request.number] = current
        wire = request.wire()
        if in_place and request.transfer is None:
            wire = replace(wire, send=wire.send.clone())
        if not in_place or request.transfer is None:
            _poison(request.out)
        current.wires[rank] = wire

    def missing(self, rank: int, number: int) -> tuple[int, ...]:
        """The ranks whose post `rank` must still wait for; empty: the wait succeeds."""
        current = self._find(rank, number)
        team = current.requests[rank].team
        return tuple(other for other in team if other not in current.requests)

    def wait(self, rank: int, number: int) -> None:
        """Deliver to `rank` the collective of this number.

        Raises CommunicationError naming the ranks that have not posted it, or the rank whose send
        buffer changed under way; InvariantError for a number that is not outstanding.
        """
        missing = self.missing(rank, number)
        current = self._find(rank, number)
        request = current.requests[rank]
        if missing:
            raise CommunicationError(f"{request}: rank {rank} waits for ranks {missing} for ever")
        if not current.results:
            for sender in request.team:
                _check_unchanged(current, sender)
            current.results = dict(zip(request.team, current.outcome(request.team), strict=True))
        _check_unchanged(current, rank)
        current.wires[rank].receive.copy_(current.results[rank])
        current.wires[rank].finish()
        del self._outstanding[rank, number]
        current.delivered += 1
        if current.delivered == len(request.team):  # let go of the tensors
            current.requests.clear()
            current.wires.clear()
            current.results.clear()

    def unfinished(self) -> tuple[str, ...]:
        """Collectives that a rank posted and never waited for: one line each."""
        return tuple(
            f"rank {rank} never waited for {current.requests[rank]}"
            for (rank, _), current in self._outstanding.items()
        )

    def _find(self, rank: int, number: int) -> _Round:
        try:
            return self._outstanding[rank, number]
        except KeyError:
            raise InvariantError(
                f"rank {rank} waits for number {number}, which it has not posted"
            ) from None

    def _join(self, rank: int, request: CollectiveRequest) -> _Round:
        """The round that is `rank`'s next on this team."""
        rounds = self._rounds.setdefault(request.team, [])
        place = self._posted.get((request.team, rank), 0)
        if place == len(rounds):
            rounds.append(_Round())
        current = rounds[place]
        for other, posted in current.requests.items():
            _check_same(other, posted, rank, request)
            if not _is_by_pairs(request):
                break  # all others are like the first
        self._posted[request.team, rank] = place + 1
        return current


def _poison(tensor: torch.Tensor) -> None:
    """Fill with what nobody takes for a result: NaN, the largest integer, True."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _checksum(tensor: torch.Tensor) -> int:
    dense = tensor.contiguous()  # one element may have any stride, which no view of bytes takes
    return zlib.crc32(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).cpu().numpy().data)


def _check_unchanged(current: _Round, rank: int) -> None:
    checksum = current.checksums[rank]
    request = current.requests[rank]
    if checksum is not None and checksum != _checksum(request.src):
        raise CommunicationError(
            f"{request}: rank {rank} changed its send buffer between post and wait"
        )
