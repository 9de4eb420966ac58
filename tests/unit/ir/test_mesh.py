"""Meshes: made of nested lists, asked for axes, coordinates and teams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.ir.mesh import PARALLEL_TYPE_NAMES, DeviceMesh, ParallelType, make_mesh

X, Y, Z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z
CUBE = make_mesh([[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]])


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ([0], "DeviceMesh{0}"),
        (range(3), "DeviceMesh{0 1 2}"),
        ([[0, 1], [2, 3]], "DeviceMesh{{0 1} {2 3}}"),
        ([[5], [2]], "DeviceMesh{{5} {2}}"),
        (torch.arange(4).reshape(2, 2), "DeviceMesh{{0 1} {2 3}}"),
        (torch.arange(4).reshape(2, 2).numpy(), "DeviceMesh{{0 1} {2 3}}"),
        (torch.arange(8, 1032).reshape(128, 8), "DeviceMesh{128x8 ranks from 8}"),
        (range(33), "DeviceMesh{33 ranks from 0}"),
        ([*range(33), 99], f"DeviceMesh{{{' '.join(map(str, range(33)))} 99}}"),
    ],
)
def test_made_of(devices: object, text: str) -> None:
    assert str(make_mesh(devices)) == text


def test_shape_matters() -> None:
    assert make_mesh([[0, 1]]) != make_mesh([0, 1])
    assert make_mesh([[0, 1]]) == DeviceMesh((0, 1), (1, 2), ("", ""))
    assert make_mesh([0, 1], ["tp"]) != make_mesh([0, 1])


@pytest.mark.parametrize(
    ("devices", "names", "error", "message"),
    [
        ([], (), UserError, "a mesh needs at least one rank"),
        (3, (), UserError, r"DeviceMesh\(3\): a mesh is a list of ranks"),
        ([0, 1, 0], (), UserError, r"DeviceMesh\(\[0, 1, 0\]\): each rank may stand once"),
        ([[0, 1], [2]], (), UserError, "all rows must have the same length"),
        ([0, -1], (), UserError, "a rank must not be negative"),
        ([0, 1.0], (), UserTypeError, "ranks must be integers, got float"),
        ([True], (), UserTypeError, "ranks must be integers, got bool"),
        ("01", (), UserTypeError, "ranks must be integers, got str"),
        ([0, 1], ("dp", "tp"), UserError, "one name for each axis of the mesh, 1 in all"),
    ],
)
def test_errors(devices: Any, names: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_mesh(devices, names)


def test_axes_count_from_the_last() -> None:
    assert CUBE.parallel_types() == (Z, Y, X)
    assert [CUBE.axis_size(axis) for axis in (Z, Y, X)] == [2, 2, 3]
    assert [CUBE.has(axis) for axis in (X, Z, ParallelType.mesh(3))] == [True, True, False]
    assert not CUBE.has(ParallelType.grid_x)
    assert (CUBE.axis(0), CUBE.axis(-1)) == (Z, X)
    named = make_mesh([[0, 1], [2, 3]], ["dp", "tp"])
    assert (named.axis("dp"), named.axis("tp")) == (Y, X)
    for wrong in (2, -3, "pp", ""):
        with pytest.raises(UserError, match="axis"):
            named.axis(wrong)


def test_coordinates_and_teams() -> None:
    assert [CUBE.coordinate(10, axis) for axis in (Z, Y, X)] == [1, 1, 1]
    assert CUBE.coordinate(12, X) is None
    assert [CUBE.team(10, axis) for axis in (Z, Y, X)] == [(4, 10), (7, 10), (9, 10, 11)]
    assert CUBE.teams(X) == ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11))
    assert CUBE.teams(Z)[:2] == ((0, 6), (1, 7))


def test_parallel_types() -> None:
    assert [ParallelType.mesh(k) for k in range(3)] == [X, Y, Z]
    assert ParallelType.mesh(4).name == "mesh_4"
    assert [ParallelType.mesh(k).mesh_position for k in range(6)] == list(range(6))
    assert [name for name in PARALLEL_TYPE_NAMES if ParallelType(name).is_mesh] == [
        "mesh_x", "mesh_y", "mesh_z"
    ]  # fmt: skip
    assert ParallelType.grid_y.is_grid
    assert not ParallelType.stream.is_grid
    assert ParallelType("stream") == ParallelType.stream
