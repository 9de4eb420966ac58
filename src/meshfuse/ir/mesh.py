"""Device meshes, and one type for device, stream, block and thread parallelism (law 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, cast, final, runtime_checkable

from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.base.frozen import frozen_dataclass

_MESH_LETTERS = "xyz"
_MESH_PLACES = {f"mesh_{letter}": place for place, letter in enumerate(_MESH_LETTERS)}
_MOST_RANKS = 1 << 31
"""Ranks are int32 in torch.distributed and NCCL."""
_LONGEST_LIST = 32
"""Ranks that the text of a mesh lists, where they are no consecutive numbers."""


@final
@frozen_dataclass
class ParallelType:
    """How the iterations of a loop axis are spread.

    `mesh_x`, `mesh_y`, `mesh_z` are the last, second to last and third to last axis of the tensor's
    mesh; `ParallelType.mesh(k)` names any further one. `stream` is a host loop over streams,
    `grid_*` a parallel loop over independent programs, `block_*`, `vectorize` and `unroll` lie
    inside one program, `serial` is a plain loop.
    """

    name: str

    mesh_x: ClassVar[ParallelType]
    mesh_y: ClassVar[ParallelType]
    mesh_z: ClassVar[ParallelType]
    grid_x: ClassVar[ParallelType]
    grid_y: ClassVar[ParallelType]
    grid_z: ClassVar[ParallelType]
    block_x: ClassVar[ParallelType]
    block_y: ClassVar[ParallelType]
    block_z: ClassVar[ParallelType]
    mma: ClassVar[ParallelType]
    serial: ClassVar[ParallelType]
    tma: ClassVar[ParallelType]
    unroll: ClassVar[ParallelType]
    unswitch: ClassVar[ParallelType]
    vectorize: ClassVar[ParallelType]
    stream: ClassVar[ParallelType]

    @staticmethod
    def mesh(from_last: int) -> ParallelType:
        """The mesh axis `from_last` places before the last one: 0 is mesh_x."""
        return ParallelType(
            f"mesh_{_MESH_LETTERS[from_last] if from_last < len(_MESH_LETTERS) else from_last}"
        )

    @property
    def is_mesh(self) -> bool:
        return self.name.startswith("mesh_")

    @property
    def is_grid(self) -> bool:
        return self.name.startswith("grid_")

    @property
    def mesh_position(self) -> int:
        """Places before the last mesh axis. Only for mesh types."""
        place = _MESH_PLACES.get(self.name)
        return int(self.name.removeprefix("mesh_")) if place is None else place

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"ParallelType.{self.name}"


PARALLEL_TYPE_NAMES = (
    "mesh_x mesh_y mesh_z grid_x grid_y grid_z block_x block_y block_z "
    "mma serial tma unroll unswitch vectorize stream"
).split()
for _name in PARALLEL_TYPE_NAMES:
    setattr(ParallelType, _name, ParallelType(_name))


@final
@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """An array of distinct ranks: `ids` in row-major order, and a name per axis ("" for none).

    `places` has the place of each rank among them.
    """

    ids: tuple[int, ...]
    shape: tuple[int, ...]
    names: tuple[str, ...]
    places: Mapping[int, int] = field(init=False, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Found once: a mesh has thousands of ranks, and every tensor of a program names it."""
        object.__setattr__(self, "places", {rank: place for place, rank in enumerate(self.ids)})
        object.__setattr__(self, "_hash", hash((self.ids, self.shape, self.names)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return len(self.ids)

    def parallel_types(self) -> tuple[ParallelType, ...]:
        """The mesh axes, first to last: `(..., mesh_z, mesh_y, mesh_x)`."""
        return tuple(ParallelType.mesh(self.ndim - 1 - dim) for dim in range(self.ndim))

    def axis(self, name_or_index: str | int) -> ParallelType:
        """The mesh axis of this name, or at this position (negatives count from the last)."""
        if not isinstance(name_or_index, str | int) or isinstance(name_or_index, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  # users' values
            raise UserTypeError(
                f"axis({name_or_index!r}) on {self}: takes the name of an axis or its number"
            )
        if isinstance(name_or_index, str):
            if name_or_index not in self.names or not name_or_index:
                known = ", ".join(repr(name) for name in self.names if name)
                raise UserError(
                    f"axis({name_or_index!r}) on {self}: "
                    + (f"its axes are named {known}" if known else "its axes have no names")
                    + f"; a number in [-{self.ndim}, {self.ndim}) is accepted, too"
                )
            return ParallelType.mesh(self.ndim - 1 - self.names.index(name_or_index))
        if not -self.ndim <= name_or_index < self.ndim:
            raise UserError(
                f"axis({name_or_index}) on {self}: must lie in [-{self.ndim}, {self.ndim})"
            )
        return ParallelType.mesh(self.ndim - 1 - name_or_index % self.ndim)

    def has(self, parallel_type: ParallelType) -> bool:
        return parallel_type.is_mesh and parallel_type.mesh_position < self.ndim

    def axis_size(self, parallel_type: ParallelType) -> int:
        """Number of ranks along a mesh axis that this mesh has."""
        return self.shape[self.ndim - 1 - parallel_type.mesh_position]

    def coordinate(self, rank: int, parallel_type: ParallelType) -> int | None:
        """Position of `rank` along a mesh axis; None for a rank outside the mesh."""
        place = self.places.get(rank)
        if place is None:
            return None
        inner = math.prod(self.shape[self.ndim - parallel_type.mesh_position :])
        return place // inner % self.axis_size(parallel_type)

    def team(self, rank: int, parallel_type: ParallelType) -> tuple[int, ...]:
        """The ranks met by walking along one mesh axis through `rank`, in mesh order."""
        inner = math.prod(self.shape[self.ndim - parallel_type.mesh_position :])
        size = self.axis_size(parallel_type)
        flat = self.places[rank]
        first = flat - flat // inner % size * inner
        return tuple(self.ids[first + k * inner] for k in range(size))

    def teams(self, parallel_type: ParallelType) -> tuple[tuple[int, ...], ...]:
        """All teams along one mesh axis, ordered by their first member's place in the mesh."""
        return tuple(
            self.team(rank, parallel_type)
            for rank in self.ids
            if self.coordinate(rank, parallel_type) == 0
        )

    def __str__(self) -> str:
        """`DeviceMesh{{0 1} {2 3}}`; `DeviceMesh{128x8 ranks from 0}` for many that follow."""
        first = self.ids[0]
        if self.size > _LONGEST_LIST and self.ids == tuple(range(first, first + self.size)):
            return f"DeviceMesh{{{'x'.join(map(str, self.shape))} ranks from {first}}}"
        return f"DeviceMesh{_braces(self.ids, self.shape)}"

    def __repr__(self) -> str:
        return str(self)


@runtime_checkable
class ArrayLike(Protocol):
    """Arrays of torch and numpy, without importing either."""

    def tolist(self) -> object: ...


def make_mesh(devices: object, names: Sequence[str] = ()) -> DeviceMesh:
    """Build a mesh from a nested list, a range, or anything with `.tolist()`.

    Raises UserError for a bare number, an empty or ragged nest, a repeated or negative rank, or a
    wrong number of names; UserTypeError for what are no integers.
    """
    nest = devices.tolist() if isinstance(devices, ArrayLike) else devices
    shape, ids = _flatten(nest, devices)
    if not shape:
        raise UserError(f"DeviceMesh({devices}): a mesh is a list of ranks, as [0, 1] or range(2)")
    if not ids:
        raise UserError(f"DeviceMesh({devices}): a mesh needs at least one rank")
    if min(ids) < 0:
        raise UserError(f"DeviceMesh({devices}): a rank must not be negative")
    if max(ids) >= _MOST_RANKS:
        raise UserError(f"DeviceMesh({devices}): a rank must be less than {_MOST_RANKS}")
    if len(set(ids)) != len(ids):
        raise UserError(f"DeviceMesh({devices}): each rank may stand once; got {ids}")
    _check_names(devices, names)
    if names and len(names) != len(shape):
        raise UserError(
            f"DeviceMesh({devices}, names={tuple(names)}): takes one name for each axis of "
            f"the mesh, {len(shape)} in all"
        )
    return DeviceMesh(ids, shape, tuple(names) or ("",) * len(shape))


def _check_names(devices: object, names: object) -> None:
    """A list of distinct strings, of which "" is for no name."""
    call = f"DeviceMesh({devices}, names={names!r})"
    if not isinstance(names, Sequence) or isinstance(names, str | bytes):
        raise UserTypeError(f"{call}: names are a list of strings, one for each axis of the mesh")
    given: list[str] = []
    for name in cast(Sequence[object], names):
        if not isinstance(name, str):
            raise UserTypeError(f"{call}: names are strings, got {name!r} among them")
        if name and name in given:
            raise UserError(f"{call}: the name {name!r} stands twice")
        given.append(name)


def _flatten(nest: object, devices: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(nest, int) and not isinstance(nest, bool):
        return (), (nest,)
    if not isinstance(nest, Sequence | range) or isinstance(nest, str | bytes):
        raise UserTypeError(
            f"DeviceMesh({devices}): ranks must be integers, got {type(nest).__name__}"
        )
    parts = [_flatten(part, devices) for part in cast(Sequence[object], nest)]
    if len({shape for shape, _ in parts}) > 1:
        raise UserError(f"DeviceMesh({devices}): all rows must have the same length")
    inner = parts[0][0] if parts else ()
    return (len(parts), *inner), tuple(rank for _, ids in parts for rank in ids)


def _braces(ids: Sequence[int], shape: Sequence[int]) -> str:
    if len(shape) <= 1:
        return "{" + " ".join(map(str, ids)) + "}"
    step = len(ids) // shape[0]
    rows = (_braces(ids[k * step : (k + 1) * step], shape[1:]) for k in range(shape[0]))
    return "{" + " ".join(rows) + "}"
