"""Exchanges bring each rank all that it is to hold, once, from a rank that has it."""

from __future__ import annotations

from collections import Counter

import pytest

from index_sets import digits, part
from meshfuse.base.errors import InvariantError
from meshfuse.expr import const
from meshfuse.facts.digits import Sharding
from meshfuse.facts.routes import exchange_routes
from meshfuse.facts.sharding import canonical
from meshfuse.ir.mesh import DeviceMesh, ParallelType, make_mesh

X, Y = ParallelType.mesh_x, ParallelType.mesh_y


def sharding(mesh: DeviceMesh, size: int, *parts: int | tuple[int, ParallelType]) -> Sharding:
    return Sharding(mesh, (canonical(digits(*parts), const(size), mesh),))


LINE, SQUARE = make_mesh(range(4)), make_mesh([[0, 1], [2, 3]])
ELSEWHERE = make_mesh([5, 3, 9])
SIZE = 11
SHARDINGS = [
    sharding(LINE, SIZE, (4, X), 3),
    sharding(LINE, SIZE, 3, (4, X)),
    sharding(LINE, SIZE, SIZE),
    sharding(SQUARE, SIZE, (2, X), (2, Y), 3),
    sharding(SQUARE, SIZE, (2, Y), 6),
    sharding(SQUARE, SIZE, 2, (2, X), 3),
    sharding(ELSEWHERE, SIZE, (3, X), 4),
    sharding(ELSEWHERE, SIZE, SIZE),
    sharding(make_mesh([7]), SIZE, SIZE),
]


def held_by(sharding: Sharding, rank: int) -> set[int]:
    return {index for (index,) in part(sharding, rank, (SIZE,))}


@pytest.mark.parametrize("src", SHARDINGS, ids=str)
def test_an_exchange_brings_what_is_lacking_once(src: Sharding) -> None:
    for dst in SHARDINGS:
        assert src.mesh is not None and dst.mesh is not None
        routes = exchange_routes(src, dst, (SIZE,))
        parts = {rank: held_by(src, rank) for rank in src.mesh.ids}
        for rank in dst.mesh.ids:
            got: list[int] = []
            for route in routes:
                if route.receiver == rank:
                    indices = [index for run in route.indices[0] for index in run]
                    assert set(indices) <= parts[route.sender]
                    own = rank in parts and set(indices) & parts[rank]
                    assert not own or route.sender == rank
                    got += indices
            assert sorted(got) == sorted(held_by(dst, rank))


def test_replicas_take_turns_for_ranks_outside_the_mesh() -> None:
    src = Sharding(make_mesh(range(4)), (digits(6),))
    dst = Sharding(make_mesh(range(10, 18)), (digits(6),))
    senders = Counter(route.sender for route in exchange_routes(src, dst, (6,)))
    assert senders == dict.fromkeys(range(4), 2)


def test_terms_stay_on_their_place() -> None:
    """[2@y, 3] to [2@y cyclic], partial over x: nothing crosses columns of the mesh."""
    src = Sharding(SQUARE, (digits((2, Y), 3),), {X: "sum"})
    dst = Sharding(SQUARE, (digits(3, (2, Y)),), {X: "sum"})
    routes = exchange_routes(src, dst, (6,))
    assert all(route.sender % 2 == route.receiver % 2 for route in routes)
    assert sum(route.elements for route in routes) == 12
    with pytest.raises(InvariantError, match="combines no terms"):
        exchange_routes(src, Sharding(SQUARE, dst.axes), (6,))


def test_a_tensor_without_axes_is_one_element() -> None:
    src, dst = Sharding(make_mesh([0]), ()), Sharding(make_mesh([0, 1]), ())
    routes = exchange_routes(src, dst, ())
    assert [(route.sender, route.receiver, route.elements) for route in routes] == [
        (0, 0, 1),
        (0, 1, 1),
    ]
