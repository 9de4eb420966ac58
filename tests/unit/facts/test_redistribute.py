"""Plans: their text, and that doing the moves on real blocks gives what the target says."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfuse.expr import const, const_value, symbol
from meshfuse.facts.redistribute import Move, plan
from meshfuse.facts.refusal import Refusal
from meshfuse.facts.sharding import Digit, Sharding, canonical
from meshfuse.ir.comm import AllGather
from meshfuse.ir.mesh import DeviceMesh, ParallelType, make_mesh

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
MESH = make_mesh([[0, 1, 2], [3, 4, 5]])
SIZES = (12, 18)
EXTENTS = [const(size) for size in SIZES]


def blocks(*owners: tuple[ParallelType, ...], mesh: DeviceMesh = MESH) -> Sharding:
    """Axis k cut into blocks by the k-th owners, outermost first."""
    axes = []
    for extent, mesh_axes in zip(EXTENTS, owners, strict=True):
        digits = [Digit(const(mesh.axis_size(owner)), owner) for owner in mesh_axes]
        axes.append(canonical((*digits, Digit(const(1000))), extent, mesh))
    return Sharding(mesh, tuple(axes))


def text(moves: tuple[Move, ...] | Refusal) -> str:
    assert not isinstance(moves, Refusal)
    return "; ".join(
        f"{m.communication.__name__} {m.mesh_axis} {m.axis} {m.function} [{m.elements}]"
        for m in moves
    )


def test_each_kind_of_move() -> None:
    whole, rows, columns = blocks((), ()), blocks((X,), ()), blocks((), (X,))
    partial = Sharding(MESH, whole.axes, {X: "max"})
    assert text(plan(rows, rows, EXTENTS)) == ""
    assert text(plan(rows, whole, EXTENTS)) == "AllGather mesh_x 0  [144]"
    assert text(plan(whole, columns, EXTENTS)) == "LocalSlice mesh_x 1  [0]"
    assert text(plan(partial, whole, EXTENTS)) == "AllReduce mesh_x -1 max [288]"
    assert text(plan(partial, rows, EXTENTS)) == "ReduceScatter mesh_x 0 max [144]"
    assert text(plan(rows, columns, EXTENTS)) == (
        "AllGather mesh_x 0  [144]; LocalSlice mesh_x 1  [0]"
    )


def test_reductions_shrink_before_gathers_grow() -> None:
    whole, rows = blocks((), ()), blocks((), (Y,))
    partial = Sharding(MESH, rows.axes, {X: "sum"})
    assert text(plan(partial, whole, EXTENTS)) == (
        "AllReduce mesh_x -1 sum [144]; AllGather mesh_y 1  [108]"
    )


def test_sizes_may_be_unknown() -> None:
    size = symbol("i0")
    have = Sharding(MESH, ((Digit(const(3), X), Digit((size + 2) // 3)),))
    want = Sharding(MESH, ((Digit(size),),))
    assert text(plan(have, want, [size])) == "AllGather mesh_x 0  [2*((i0 + 2) // 3)]"


def test_other_meshes_and_cyclic_targets_are_refused() -> None:
    whole = blocks((), ())
    refusal = plan(whole, blocks((), (), mesh=make_mesh([7, 8])), EXTENTS)
    assert isinstance(refusal, Refusal) and "the meshes differ" in refusal.reason
    cyclic = Sharding(MESH, ((Digit(const(4)), Digit(const(3), X)), whole.axes[1]))
    for pair in ((whole, cyclic), (cyclic, whole)):
        refusal = plan(*pair, EXTENTS)
        assert isinstance(refusal, Refusal) and "only block shardings move" in refusal.reason


# By value.


def part_of(whole: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    """What `rank` holds: the coordinate picks mesh digits, local digits stay."""
    shape, index, local = list[int](), list[int | slice](), list[int]()
    for digits in sharding.axes:
        here = 1
        for digit in digits:
            size = const_value(digit.extent)
            assert size is not None
            shape.append(size)
            coordinate = digit.owner and MESH.coordinate(rank, digit.owner)
            index.append(slice(None) if coordinate is None else coordinate)
            here *= 1 if digit.owner else size
        local.append(here)
    return whole.reshape(shape)[tuple(index)].reshape(local)


def moved(parts: dict[int, torch.Tensor], move: Move) -> dict[int, torch.Tensor]:
    """The move as torch does it: blocks are concatenated, or one is cut out."""
    after: dict[int, torch.Tensor] = {}
    for rank in MESH.ids:
        team = MESH.team(rank, move.mesh_axis)
        if move.communication is AllGather:
            after[rank] = torch.cat([parts[peer] for peer in team], move.axis)
        else:
            after[rank] = parts[rank].chunk(len(team), move.axis)[team.index(rank)]
    return after


OWNERS = ((), (X,), (Y,), (X, Y), (Y, X))
PLACEMENTS = [
    blocks(rows, columns)
    for rows, columns in itertools.product(OWNERS, OWNERS)
    if not set(rows) & set(columns)
]


@given(st.sampled_from(PLACEMENTS), st.sampled_from(PLACEMENTS))
def test_moves_lead_from_every_block_sharding_to_every_other(src: Sharding, dst: Sharding) -> None:
    whole = torch.arange(SIZES[0] * SIZES[1]).reshape(SIZES)
    parts = {rank: part_of(whole, src, rank) for rank in MESH.ids}
    moves = plan(src, dst, EXTENTS)
    assert not isinstance(moves, Refusal)
    for move in moves:
        parts = moved(parts, move)
        for rank, part in parts.items():
            assert torch.equal(part, part_of(whole, move.after, rank))
    for rank, part in parts.items():
        assert torch.equal(part, part_of(whole, dst, rank))
