"""Plans: their text; that moves lead where they say, on sets of indices; that none is cheaper."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from index_sets import Steps, holdings, is_possible, moved, shardings, with_terms
from meshfuse.expr import IntExpr, const, const_value, symbol
from meshfuse.facts.digits import Digit, Sharding
from meshfuse.facts.redistribute import Move, communication_of, leads, plan
from meshfuse.facts.refusal import Refusal
from meshfuse.facts.sharding import canonical
from meshfuse.ir.axes import TensorName
from meshfuse.ir.comm import (
    AllGather,
    AllReduce,
    Communication,
    Exchange,
    LocalSlice,
    ReduceScatter,
)
from meshfuse.ir.mesh import DeviceMesh, ParallelType, make_mesh

X, Y, Z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z
MESH = make_mesh([[0, 1, 2], [3, 4, 5]])
LINE = make_mesh(range(4))
SIZES = (12, 18)


def sharding(
    mesh: DeviceMesh,
    sizes: Sequence[int | IntExpr],
    *axes: Sequence[ParallelType | int],
    partial: dict[ParallelType, str] | None = None,
) -> Sharding:
    """Per axis its digits: mesh axes and local extents; what is left of a block is local, too."""
    found = []
    for size, digits in zip(sizes, axes, strict=True):
        extent = const(size) if isinstance(size, int) else size
        made = [
            Digit(const(d)) if isinstance(d, int) else Digit(const(mesh.axis_size(d)), d)
            for d in digits
        ]
        if not digits or not isinstance(digits[0], int):
            made.append(Digit(extent))
        found.append(canonical(made, extent, mesh))
    return Sharding(mesh, tuple(found), partial or {})


def text(src: Sharding, dst: Sharding, sizes: Sequence[int | IntExpr] = SIZES) -> str:
    moves = plan(src, dst, [const(n) if isinstance(n, int) else n for n in sizes])
    assert not isinstance(moves, Refusal), moves
    return "; ".join(f"{_words(m)} [{m.elements}]" for m in moves)


def _words(move: Move) -> str:
    axis = None if move.axis < 0 else move.axis
    words = (move.kind, move.mesh_axis, axis, move.function)
    return " ".join(str(word) for word in words if word is not None and word != "")


def test_each_kind_of_move_on_one_mesh_axis() -> None:
    whole, rows = sharding(LINE, SIZES, (), ()), sharding(LINE, SIZES, (X,), ())
    cyclic, columns = sharding(LINE, SIZES, (3, X), ()), sharding(LINE, (12, 18), (), (X,))
    partial = sharding(LINE, SIZES, (), (), partial={X: "max"})
    assert text(rows, rows) == ""
    assert text(rows, whole) == "all_gather mesh_x 0 [162]"
    assert text(whole, rows) == "local_slice mesh_x 0 [0]"
    assert text(partial, whole) == "all_reduce mesh_x max [324]"
    assert text(partial, rows) == "reduce_scatter mesh_x 0 max [162]"
    assert text(partial, cyclic) == "reduce_scatter mesh_x 0 max [162]"
    assert text(rows, columns) == "all_to_all [45]"
    assert text(rows, cyclic) == "all_to_all [36]"
    assert text(columns, whole) == "all_gather mesh_x 1 [180]"


def test_slices_come_before_reductions() -> None:
    partial = sharding(MESH, SIZES, (), (), partial={X: "sum"})
    assert text(partial, sharding(MESH, SIZES, (), (Y,))) == (
        "local_slice mesh_y 1 [0]; all_reduce mesh_x sum [144]"
    )
    assert text(partial, sharding(MESH, SIZES, (X,), (Y,))) == (
        "local_slice mesh_y 1 [0]; reduce_scatter mesh_x 0 sum [72]"
    )


def test_a_reduction_spreads_over_mesh_axes_that_hold_the_same() -> None:
    """288 elements in an all-reduce by all; 252 if each row of the mesh reduces a half."""
    partial = sharding(MESH, SIZES, (), (), partial={X: "sum"})
    assert text(partial, sharding(MESH, SIZES, (), ())) == (
        "local_slice mesh_y 0 [0]; all_reduce mesh_x sum [144]; all_gather mesh_y 0 [108]"
    )
    of_two = sharding(MESH, SIZES, (), (), partial={Y: "sum"})
    assert text(of_two, sharding(MESH, SIZES, (), ())) == "all_reduce mesh_y sum [216]"


def test_equal_terms_are_reduced_in_one_order_however_they_are_written() -> None:
    """Plans are kept by value: the first of two equal shardings must not decide for the other."""
    whole = sharding(MESH, SIZES, (), ())
    one, other = (replace(whole, partial=dict.fromkeys(axes, "sum")) for axes in ((X, Y), (Y, X)))
    assert one == other
    assert list(one.partial) == list(other.partial) == [Y, X]


def test_terms_on_both_sides_ride_along() -> None:
    src = sharding(MESH, SIZES, (Y,), (), partial={X: "sum"})
    dst = sharding(MESH, SIZES, (), (Y,), partial={X: "sum"})
    assert text(src, dst) == "all_to_all [54]"
    both = sharding(MESH, SIZES, (), (), partial={X: "sum", Y: "sum"})
    assert text(both, src) == "reduce_scatter mesh_y 0 sum [108]"


def test_several_mesh_axes_on_one_axis() -> None:
    blocks = sharding(MESH, SIZES, (Y, X), ())
    assert text(blocks, sharding(MESH, SIZES, (), ())) == (
        "all_gather mesh_x 0 [72]; all_gather mesh_y 0 [108]"
    )
    assert text(blocks, sharding(MESH, SIZES, (X, Y), ())) == "all_to_all [36]"
    assert text(sharding(MESH, SIZES, (X,), ()), sharding(MESH, SIZES, (X, Y), ())) == (
        "local_slice mesh_y 0 [0]"
    )


def test_other_meshes() -> None:
    pair, other, one = make_mesh([0, 1]), make_mesh([2, 3]), make_mesh([5])
    rows, whole = sharding(pair, SIZES, (X,), ()), sharding(pair, SIZES, (), ())
    alone = sharding(one, SIZES, (), ())
    assert text(rows, sharding(other, SIZES, (X,), ())) == "send_recv [108]"
    assert text(alone, whole) == "broadcast [216]"
    assert text(alone, rows) == "scatter [108]"
    assert text(rows, alone) == "gather [216]"
    assert text(rows, sharding(other, SIZES, (), (X,))) == "exchange [108]"
    assert text(sharding(MESH, SIZES, (X,), ()), rows) == "exchange [72]"
    terms = sharding(pair, SIZES, (), (), partial={X: "sum"})
    assert text(terms, alone) == "reduce_scatter mesh_x 0 sum [108]; gather [216]"


def test_sizes_may_be_unknown() -> None:
    size = symbol("i0")
    sizes = (size, 8)
    rows, whole = sharding(LINE, sizes, (X,), ()), sharding(LINE, sizes, (), ())
    columns = sharding(LINE, sizes, (), (X,))
    partial = sharding(LINE, sizes, (), (), partial={X: "sum"})
    assert text(rows, whole, sizes) == "all_gather mesh_x 0 [24*((i0 + 3) // 4)]"
    assert text(partial, rows, sizes) == "reduce_scatter mesh_x 0 sum [24*((i0 + 3) // 4)]"
    assert text(rows, columns, sizes) == "all_to_all [i0 + i0 // 2]"
    first = sharding(make_mesh([0, 4]), sizes, (), ())  # rank 4 lacks all, rank 0 a part
    assert text(rows, first, sizes) == "exchange [8*i0]"


def test_gathers_of_parts_that_digits_cannot_say_are_exchanges() -> None:
    """[2@y, 3@x, 1] over 5 has blocks of 3 along y, the blocks of [2@y, 3]; over 7 of 6, not 4."""
    for size, expected in ((5, "all_gather mesh_x 0 [2]"), (7, "all_to_all [4]")):
        src, dst = sharding(MESH, (size,), (Y, X)), sharding(MESH, (size,), (Y,))
        assert text(src, dst, (size,)) == expected
    unknown = (symbol("i0"),)
    src, dst = sharding(MESH, unknown, (Y, X)), sharding(MESH, unknown, (Y,))
    assert text(src, dst, unknown).startswith("all_to_all")


def test_what_is_impossible_is_refused() -> None:
    whole = sharding(LINE, SIZES, (), ())
    terms, products = (
        sharding(LINE, SIZES, (), (), partial={X: function}) for function in ("sum", "prod")
    )
    elsewhere = Sharding(make_mesh(range(4, 8)), terms.axes, terms.partial)
    for src, dst, reason in (
        (whole, terms, "terms of a reduction over mesh_x come of computing"),
        (terms, products, "terms of a sum over mesh_x are no terms of a prod"),
        (terms, elsewhere, "terms of a reduction stay on their mesh"),
        (whole, Sharding(None, whole.axes), "one of them has no mesh"),
    ):
        refusal = plan(src, dst, [const(n) for n in SIZES])
        assert isinstance(refusal, Refusal)
        assert "[12, 18] on DeviceMesh{0 1 2 3}" in refusal.reason and reason in refusal.reason


def test_communications_that_lead_elsewhere() -> None:
    whole, rows = sharding(LINE, SIZES, (), ()), sharding(LINE, SIZES, (X,), ())
    cyclic, terms = (
        sharding(LINE, SIZES, (3, X), ()),
        sharding(LINE, SIZES, (), (), partial={X: "sum"}),
    )
    out, src = TensorName("T1"), TensorName("T0")
    wrong: tuple[tuple[Communication, Sharding, Sharding], ...] = (
        (AllGather(out, src, X, 0), whole, rows),
        (AllGather(out, src, X, 0), rows, cyclic),
        (AllGather(out, src, X, 1), rows, whole),
        (AllGather(out, src, Y, 0), rows, whole),
        (LocalSlice(out, src, X, 0), terms, rows),
        (AllReduce(out, src, X, "max"), terms, whole),
        (AllReduce(out, src, X), terms, rows),
        (ReduceScatter(out, src, X, 0), terms, whole),
        (Exchange(out, src), terms, rows),
    )
    for expr, have, want in wrong:
        assert not leads(expr, have, want), expr
    assert leads(ReduceScatter(out, src, X, 0), terms, cyclic)
    assert leads(Exchange(out, src), rows, cyclic)


def test_large_meshes_are_planned_without_visiting_ranks() -> None:
    sizes = (8192, 4096)
    mesh = make_mesh([[32 * row + column for column in range(32)] for row in range(32)])
    rows, blocks = sharding(mesh, sizes, (X,), ()), sharding(mesh, sizes, (Y, X), ())
    turned = sharding(mesh, sizes, (X, Y), ())
    begun = time.perf_counter()
    assert text(rows, sharding(mesh, sizes, (), (X,)), sizes) == "all_to_all [1015808]"
    assert text(blocks, turned, sizes) == "all_to_all [32768]"
    assert text(blocks, sharding(mesh, sizes, (Y,), ()), sizes) == "all_gather mesh_x 0 [1015808]"
    assert time.perf_counter() - begun < 0.1


# By value and by brute force.


def check(src: Sharding, dst: Sharding, sizes: tuple[int, ...], steps: Steps | None) -> None:
    """The plan leads from what `src` says to what `dst` says, costs what it says, and not more than
    the cheapest sequence of steps.
    """
    moves = plan(src, dst, [const(size) for size in sizes])
    assert not isinstance(moves, Refusal), moves
    held, current, total = holdings(src, sizes, src), src, 0
    for move in moves:
        assert leads(
            communication_of(move, TensorName("T1"), TensorName("T0")), current, move.after
        )
        held, received = moved(held, current, move, sizes)
        assert held == holdings(move.after, sizes, src), (src, dst, move)
        assert const_value(move.elements) == received, (src, dst, move)
        current = move.after
        total += received
    assert current == dst
    if steps is not None:
        assert total <= steps.cheapest(src, dst), (src, dst, moves)


def pairs(mesh: DeviceMesh, sizes: Sequence[int]) -> Iterator[tuple[Sharding, Sharding]]:
    places = shardings(mesh, sizes)
    for src in with_terms(places):
        for dst in with_terms(places):
            if is_possible(src, dst):
                yield src, dst


def sample(
    found: Iterator[tuple[Sharding, Sharding]], count: int
) -> list[tuple[Sharding, Sharding]]:
    everything = list(found)
    return random.Random(0).sample(everything, min(count, len(everything)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [(1,), (3,), (7,), (8,), (12,), (3, 4), (4, 5), (2, 3, 4)])
def test_every_pair_on_one_mesh_axis(ranks: int, sizes: tuple[int, ...]) -> None:
    mesh = make_mesh(range(ranks))
    steps = Steps(mesh, sizes, shardings(mesh, sizes))
    for src, dst in pairs(mesh, sizes):
        check(src, dst, sizes, steps)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pairs_of_tensors_of_four_axes(ranks: int) -> None:
    mesh, sizes = make_mesh(range(ranks)), (2, 4, 3, 5)
    steps = Steps(mesh, sizes, shardings(mesh, sizes))
    for src, dst in sample(pairs(mesh, sizes), 40):
        check(src, dst, sizes, steps)


SQUARE, WIDE, TALL = make_mesh([[0, 1], [2, 3]]), MESH, make_mesh([[4, 1], [0, 5], [2, 3]])
TWO_AXES = [(SQUARE, (8,)), (WIDE, (7,)), (TALL, (12,)), (SQUARE, (4, 6)), (WIDE, (6, 6))]
TWO_AXES += [(WIDE, (5, 4)), (TALL, (6, 4)), (SQUARE, (2, 4, 4))]


@pytest.mark.parametrize(("mesh", "sizes"), TWO_AXES, ids=str)
def test_pairs_on_two_mesh_axes(mesh: DeviceMesh, sizes: tuple[int, ...]) -> None:
    steps = Steps(mesh, sizes, shardings(mesh, sizes))
    for src, dst in sample(pairs(mesh, sizes), 60):
        check(src, dst, sizes, steps)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "sizes"), [*TWO_AXES, (WIDE, (7, 5)), (TALL, (3, 5)), (TALL, (11,))], ids=str
)
def test_every_pair_on_two_mesh_axes(mesh: DeviceMesh, sizes: tuple[int, ...]) -> None:
    steps = Steps(mesh, sizes, shardings(mesh, sizes))
    for src, dst in pairs(mesh, sizes):
        check(src, dst, sizes, steps)


def test_pairs_on_three_mesh_axes() -> None:
    mesh, sizes = make_mesh([[[0, 1], [2, 3]], [[4, 5], [6, 7]]]), (4, 6)
    for src, dst in sample(pairs(mesh, sizes), 60):
        check(src, dst, sizes, None)


def test_pairs_between_meshes() -> None:
    """Disjoint, overlapping and nested ones; terms are combined where they are."""
    sizes = (5, 4)
    meshes = [make_mesh([0, 1, 2]), make_mesh([2, 0]), make_mesh([7, 8]), make_mesh([3]), SQUARE]
    places = {mesh: list(with_terms(shardings(mesh, sizes))) for mesh in meshes}
    chosen = random.Random(0)
    for have in meshes:
        for want in meshes:
            if have != want:
                targets = [place for place in places[want] if not place.partial]
                for _ in range(8):
                    check(chosen.choice(places[have]), chosen.choice(targets), sizes, None)
