"""Who sends what to whom, for a tensor to get from one sharding to any other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import final

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.facts.digits import Sharding
from meshfuse.facts.holdings import (
    Coordinates,
    Runs,
    held,
    rank_coordinates,
    run_length,
    runs_in_both,
)
from meshfuse.ir.mesh import DeviceMesh, ParallelType


@final
@frozen_dataclass
class Route:
    """What `sender` gives to `receiver`, which may be itself: per axis, global indices.

    The elements are all combinations of the indices of the axes, in row-major order.
    """

    sender: int
    receiver: int
    indices: tuple[Runs, ...]

    @property
    def elements(self) -> int:
        return math.prod(map(run_length, self.indices))


@lru_cache(32)
def exchange_routes(src: Sharding, dst: Sharding, sizes: tuple[int, ...]) -> tuple[Route, ...]:
    """Who sends what to whom for a tensor of `sizes` to get from `src` to `dst`.

    Sorted by receiver, then sender, in the order of the meshes; each element that a receiver is to
    hold comes once. It is copied by a rank that holds it. Else the replica sends it that has the
    receiver's coordinates on the mesh axes that do not matter, for a receiver on the mesh of `src`;
    for others the replicas take turns.

    Terms of a reduction stay on their place along its mesh axis: `dst` must have those of `src`.
    Raises InvariantError where it has not.
    """
    if src.mesh is None or dst.mesh is None:
        raise InvariantError("an exchange needs a mesh on both sides")
    if src.partial != dst.partial or (src.partial and src.mesh != dst.mesh):
        raise InvariantError("an exchange combines no terms of a reduction")
    sources = _Sources(src, src.mesh, sizes)
    routes: list[Route] = []
    for receiver, place in rank_coordinates(dst.mesh).items():
        axes = zip(dst.axes, sizes, strict=True)
        wanted = tuple(held(digits, size, place) for digits, size in axes)
        routes.extend(sources.routes(receiver, place, wanted))
    return tuple(routes)


class _Sources:
    """Where the parts of a tensor lie, and whose turn it is to send: private to one exchange."""

    def __init__(self, sharding: Sharding, mesh: DeviceMesh, sizes: tuple[int, ...]) -> None:
        self._sharding, self._mesh, self._sizes = sharding, mesh, sizes
        self._places = rank_coordinates(mesh)
        self._order = {rank: position for position, rank in enumerate(mesh.ids)}
        owners = {d.owner for digits in sharding.axes for d in digits}
        self._free = [
            owner
            for owner in mesh.parallel_types()
            if owner not in owners and owner not in sharding.partial
        ]
        self._turns: dict[tuple[int, ...], int] = {}
        self._pieces: dict[tuple[int, Runs], list[tuple[Coordinates, Runs]]] = {}

    def routes(
        self, receiver: int, place: Coordinates, wanted: tuple[Runs, ...]
    ) -> Sequence[Route]:
        """Where the rank at `place` of the other mesh gets what it wants, by the senders' order."""
        found: list[Route] = []
        for pieces in product(*(self._holding(axis, runs) for axis, runs in enumerate(wanted))):
            sender = {owner: place[owner] for owner in self._sharding.partial}
            for owners, _ in pieces:
                sender.update(owners)
            sender.update(self._replica(receiver, tuple(sender.values())))
            rank = self._mesh.ids[self._position(sender)]
            found.append(Route(rank, receiver, tuple(runs for _, runs in pieces)))
        return sorted(found, key=lambda route: self._order[route.sender])

    def _holding(self, axis: int, wanted: Runs) -> Sequence[tuple[Coordinates, Runs]]:
        """The places along the mesh axes of a tensor axis where some of `wanted` lies, and what."""
        key = (axis, wanted)
        if key not in self._pieces:
            digits, size = self._sharding.axes[axis], self._sizes[axis]
            owners = [digit.owner for digit in digits if digit.owner is not None]
            found: list[tuple[Coordinates, Runs]] = []
            for numbers in product(*(range(self._mesh.axis_size(owner)) for owner in owners)):
                place = dict(zip(owners, numbers, strict=True))
                runs = runs_in_both(wanted, held(digits, size, place))
                if runs:
                    found.append((place, runs))
            self._pieces[key] = found
        return self._pieces[key]

    def _replica(self, receiver: int, part: tuple[int, ...]) -> Coordinates:
        """Which of the ranks that hold the same part is to send it."""
        if receiver in self._places:
            return {owner: self._places[receiver][owner] for owner in self._free}
        turn = self._turns.get(part, 0)
        self._turns[part] = turn + 1
        chosen: dict[ParallelType, int] = {}
        for owner in reversed(self._free):
            turn, chosen[owner] = divmod(turn, self._mesh.axis_size(owner))
        return chosen

    def _position(self, place: Coordinates) -> int:
        position = 0
        for owner in self._mesh.parallel_types():
            position = position * self._mesh.axis_size(owner) + place[owner]
        return position
