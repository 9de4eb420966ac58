"""What one rank asks of a collective: for any sizes, and for those of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

import torch

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.collectives import CollectiveRequest
from meshfuse.dist.packing import (
    Holding,
    Packing,
    RankExchange,
    Region,
    pack_exchange,
    pack_gather,
    pack_scatter,
)
from meshfuse.expr import IntExpr, const, evaluate
from meshfuse.facts.digits import Digit, Sharding
from meshfuse.facts.holdings import Coordinates, held, rank_coordinates
from meshfuse.facts.routes import Route, exchange_routes
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.runtime.allocate import as_dense


@final
@frozen_dataclass
class PlacedTensor:
    """A tensor between ranks."""

    name: TensorName
    sharding: Sharding

    @property
    def mesh(self) -> DeviceMesh:
        if self.sharding.mesh is None:
            raise InvariantError(f"{self.name} moves between ranks, but has no mesh")
        return self.sharding.mesh

    @property
    def digit_extents(self) -> tuple[IntExpr, ...]:
        return tuple(digit.extent for digits in self.sharding.axes for digit in digits)

    def at(self, symbols: Mapping[str, int]) -> PlacedTensor:
        """With numbers for the digits' extents."""
        axes = tuple(
            tuple(Digit(const(evaluate(digit.extent, symbols)), digit.owner) for digit in digits)
            for digits in self.sharding.axes
        )
        return replace(self, sharding=replace(self.sharding, axes=axes))

    def holding(self, sizes: Sequence[int], place: Coordinates) -> Holding:
        """What the rank at a place of the mesh holds of a tensor of these global sizes."""
        pairs = zip(self.sharding.axes, sizes, strict=True)
        return Holding(tuple(held(digits, size, place) for digits, size in pairs))

    def holding_of(self, rank: int, sizes: Sequence[int]) -> Holding:
        """What a rank holds; nothing outside the mesh."""
        place = rank_coordinates(self.mesh).get(rank)
        if place is None:
            return Holding(((),) * len(sizes), is_outside=True)
        return self.holding(sizes, place)


@final
@frozen_dataclass
class BoundPart:
    """What one rank is to hold of a tensor, of which it has that and more."""

    rank: int
    src: PlacedTensor
    out: PlacedTensor
    extents: tuple[IntExpr, ...]

    @property
    def all_extents(self) -> tuple[IntExpr, ...]:
        """All that must be known of a call."""
        return (*self.extents, *self.src.digit_extents, *self.out.digit_extents)

    def region(self, symbols: Mapping[str, int], device: torch.device) -> Region:
        """Where it stands in the local tensor, for the sizes of a call."""
        sizes = tuple(evaluate(extent, symbols) for extent in self.extents)
        have = self.src.at(symbols).holding_of(self.rank, sizes)
        want = self.out.at(symbols).holding_of(self.rank, sizes)
        return have.region(want.axes, device)


@final
@frozen_dataclass
class SizedCollective:
    """A collective for the sizes of a call. A straight one copies a source that lies otherwise in
    memory than in `order`; `packing` reads any."""

    number: int
    collective: str
    team: tuple[int, ...]
    order: tuple[int, ...]
    function: str | None
    cause: str
    packing: Packing | None
    in_team_order: bool
    at_once: bool = False

    def request(self, src: torch.Tensor, out: torch.Tensor) -> CollectiveRequest:
        """Ready to post."""
        return CollectiveRequest(
            self.number,
            self.collective,
            self.team,
            as_dense(src, self.order) if self.packing is None else src,
            out,
            self.function,
            self.cause,
            self.packing,
            self.in_team_order,
            at_once=self.at_once,
        )


@final
@frozen_dataclass
class BoundCollective:
    """A collective of one rank, from a tensor into an existing one, over axes of global `extents`.

    `order` is the memory order of the source, axes slowest first, and that of what moves. Straight
    ones (not `is_packed`) have the axis that is gathered or scattered slowest in memory, and
    otherwise one order on both sides: each rank's block is one piece of memory where blocks are
    equal. Where a call's sizes make them unequal they are packed. An exchange has no `mesh_axis`.
    `has_room`: see Packing.
    """

    number: int
    collective: str
    rank: int
    mesh_axis: ParallelType | None
    src: PlacedTensor
    out: PlacedTensor
    extents: tuple[IntExpr, ...]
    order: tuple[int, ...]
    function: str | None
    cause: str
    is_packed: bool = False
    in_team_order: bool = False
    has_room: bool = False

    @property
    def all_extents(self) -> tuple[IntExpr, ...]:
        """All that must be known of a call."""
        return (*self.extents, *self.src.digit_extents, *self.out.digit_extents)

    def at(self, symbols: Mapping[str, int], device: torch.device) -> SizedCollective:
        """For the sizes of a call."""
        sizes = tuple(evaluate(extent, symbols) for extent in self.extents)
        numeric = replace(self, src=self.src.at(symbols), out=self.out.at(symbols))
        if self.mesh_axis is None:
            team, packing = numeric._exchange(sizes, device)
        else:
            team = self.src.mesh.team(self.rank, self.mesh_axis)
            packing = numeric._packing(sizes, self.mesh_axis, device)
            if packing is not None and self.has_room:
                packing = replace(packing, has_room=True)
        return SizedCollective(
            self.number,
            self.collective,
            team,
            self.order,
            self.function,
            self.cause,
            packing,
            self.in_team_order,
        )

    def padding(self, symbols: Mapping[str, int]) -> tuple[int, int]:
        """Elements that come behind what is sent and what is received, for the sizes of a call."""
        if self.mesh_axis is None or self.collective == "all_reduce":
            return 0, 0
        sizes = tuple(evaluate(extent, symbols) for extent in self.extents)
        numeric = replace(self, src=self.src.at(symbols), out=self.out.at(symbols))
        place, parts, whole = numeric._parts(sizes, self.mesh_axis)
        length = max(part.elements for part in parts)
        behind_own = length - parts[place].elements
        behind_all = length * len(parts) - whole.elements
        return (behind_own, behind_all) if self._is_gather else (behind_all, behind_own)

    @property
    def _is_gather(self) -> bool:
        return self.collective == "all_gather"

    def _packing(
        self, sizes: tuple[int, ...], mesh_axis: ParallelType, device: torch.device
    ) -> Packing | None:
        if self.collective == "all_reduce":
            return None
        place, parts, whole = self._parts(sizes, mesh_axis)
        if not self.is_packed and len({part.shape for part in parts}) == 1:
            return None
        pack = pack_gather if self._is_gather else pack_scatter
        return pack(parts, place, whole, self.order, device)

    def _parts(
        self, sizes: tuple[int, ...], mesh_axis: ParallelType
    ) -> tuple[int, list[Holding], Holding]:
        """Where the rank stands along a mesh axis; what each rank there has, or is to get; and all
        of that."""
        side, other = (self.src, self.out) if self._is_gather else (self.out, self.src)
        place = rank_coordinates(side.mesh)[self.rank]
        parts = [
            side.holding(sizes, {**place, mesh_axis: member})
            for member in range(side.mesh.axis_size(mesh_axis))
        ]
        whole = other.holding(sizes, place)
        if sum(part.elements for part in parts) != whole.elements:
            raise InvariantError(
                f"{self.collective} {self.src.name} -> {self.out.name}: ranks along {mesh_axis} "
                f"have {[part.elements for part in parts]} elements of {whole.elements}"
            )
        return place[mesh_axis], parts, whole

    def _exchange(
        self, sizes: tuple[int, ...], device: torch.device
    ) -> tuple[tuple[int, ...], Packing]:
        routes = exchange_routes(self.src.sharding, self.out.sharding, sizes)
        team = exchange_team(routes, self.rank)
        exchange = RankExchange(
            self.rank,
            {r.receiver: r.indices for r in routes if r.sender == self.rank and r.elements},
            {r.sender: r.indices for r in routes if r.receiver == self.rank and r.elements},
        )
        have = self.src.holding_of(self.rank, sizes)
        want = self.out.holding_of(self.rank, sizes)
        return team, pack_exchange(exchange, have, want, team, self.order, device)


def exchange_team(routes: Sequence[Route], rank: int) -> tuple[int, ...]:
    """The ranks that exchange with `rank`, or with one that does, ascending; and itself."""
    links: dict[int, set[int]] = {}
    for route in routes:
        if route.elements and route.sender != route.receiver:
            links.setdefault(route.sender, set()).add(route.receiver)
            links.setdefault(route.receiver, set()).add(route.sender)
    team, reached = {rank}, [rank]
    while reached:
        found = links.get(reached.pop(), set()) - team
        team |= found
        reached += found
    return tuple(sorted(team))
