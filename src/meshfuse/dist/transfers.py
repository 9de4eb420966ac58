"""Chunks that ranks of a team send one another: who sends to whom, for any sizes and for a call.

Each rank gets the chunk of one, maybe its own, which then does not move; a rank may send its chunk
to none, to some, or to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.collectives import CollectiveRequest, Transfer
from meshfuse.expr import IntExpr, evaluate
from meshfuse.facts.holdings import value_at
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.runtime.allocate import as_dense, dense_strides


@final
@frozen_dataclass
class SharedChunk:
    """Memory that a rank asks for to make what `team` reads: all ranks of it ask alike.
    `most_bytes`: of the largest that any asks for. `lasts`: until it is given back; else until it
    is delivered."""

    team: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    most_bytes: int
    cause: str
    lasts: bool = False

    def ordinary(self) -> torch.Tensor:
        """Memory that no peer reaches: what is in it is copied to be sent."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


@final
@frozen_dataclass
class SizedTransfer:
    """A fetch or delivery for the sizes of a call. `shape`: of what the rank gets, which lies in
    memory by `order`."""

    number: int
    collective: str
    team: tuple[int, ...]
    transfer: Transfer
    shape: tuple[int, ...]
    order: tuple[int, ...]
    strides: tuple[int, ...]
    cause: str

    @property
    def is_fetch(self) -> bool:
        return self.collective == "fetch"

    def buffers(
        self, src: torch.Tensor, into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The source, dense, and where the result comes: `into`, or fresh memory, or the source
        itself where the rank gets its own."""
        src = as_dense(src, self.order)
        if self.transfer.is_own:
            return src, src
        if into is not None:
            return src, into
        return src, torch.empty_strided(
            self.shape, self.strides, dtype=src.dtype, device=src.device
        )

    def request(self, src: torch.Tensor, into: torch.Tensor | None = None) -> CollectiveRequest:
        """Ready to post, from and into `buffers`."""
        src, out = self.buffers(src, into)
        return CollectiveRequest(
            self.number,
            self.collective,
            self.team,
            src,
            out,
            None,
            self.cause,
            transfer=self.transfer,
        )


@final
@frozen_dataclass
class BoundTransfer:
    """A fetch or delivery as one rank of `mesh` asks for it. `shape` is what it gets, and `owner`
    the place along `mesh_axis` whose chunk it fetches, or to which it delivers.

    `bytes`: of the largest chunk. `pieces`: indices of loops that choose no owner, but a piece.
    """

    number: int
    collective: str
    rank: int
    mesh: DeviceMesh
    mesh_axis: ParallelType
    out: TensorName
    shape: tuple[IntExpr, ...]
    order: tuple[int, ...]
    owner: IntExpr
    cause: str
    bytes: IntExpr
    pieces: tuple[str, ...]

    @property
    def all_extents(self) -> tuple[IntExpr, ...]:
        """All that must be known of a call."""
        return (*self.shape, self.owner, self.bytes)

    def at(self, symbols: Mapping[str, int]) -> SizedTransfer:
        """For the sizes of a call. Raises InvariantError where a rank would be delivered less or
        more than one chunk."""
        team = self.mesh.team(self.rank, self.mesh_axis)
        sources = self._sources(len(team), symbols)
        shape = tuple(evaluate(extent, symbols) for extent in self.shape)
        return SizedTransfer(
            self.number,
            self.collective,
            team,
            Transfer(
                team.index(self.rank),
                sources,
                evaluate(self.bytes, symbols),
                (self.number, *(symbols[name] for name in self.pieces)),
            ),
            shape,
            self.order,
            dense_strides(shape, self.order),
            self.cause,
        )

    def _sources(self, ranks: int, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """For each place of the team, the place whose chunk it gets."""
        owners = tuple(
            value_at(self.owner, self.mesh, self.mesh_axis, place, symbols)
            for place in range(ranks)
        )
        if self.collective == "fetch":
            return owners
        if sorted(owners) != list(range(ranks)):
            raise InvariantError(f"{self.out}: the ranks deliver to {owners}")
        return tuple(owners.index(place) for place in range(ranks))
