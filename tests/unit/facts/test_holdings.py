"""What ranks hold, against listing every index."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from hypothesis import given
from hypothesis import strategies as st

from meshfuse.expr import IntExpr, ceildiv, const, const_value, evaluate, symbol
from meshfuse.facts.digits import Digit, Digits
from meshfuse.facts.holdings import (
    coordinate_symbol,
    held,
    held_count,
    is_even,
    rank_coordinates,
    runs_in_both,
    runs_of,
)
from meshfuse.facts.sharding import rank_extents
from meshfuse.ir.mesh import ParallelType, make_mesh
from program_recorder import Recorder

X, Y = ParallelType.mesh_x, ParallelType.mesh_y


def digits_of(*pairs: tuple[int | IntExpr, ParallelType | None]) -> Digits:
    return tuple(Digit(e if isinstance(e, IntExpr) else const(e), owner) for e, owner in pairs)


def listed(digits: Digits, size: int, place: Mapping[ParallelType, int]) -> list[int]:
    """One index after the other, its digits taken off from below."""
    found: list[int] = []
    for index in range(size):
        rest, is_held = index, True
        for digit in reversed(digits):
            radix = const_value(digit.extent)
            assert radix is not None
            rest, number = divmod(rest, radix)
            is_held = is_held and (digit.owner is None or number == place[digit.owner])
        if is_held:
            found.append(index)
    return found


def radices() -> Iterator[tuple[Digits, dict[ParallelType, int]]]:
    """Up to three digits of 1 to 3 or four of 2 and 3, each mesh axis at most once, every place."""
    for owners in itertools.chain.from_iterable(
        itertools.product((None, X, Y), repeat=length) for length in range(1, 5)
    ):
        if owners.count(X) > 1 or owners.count(Y) > 1:
            continue
        small = (1, 2, 3) if len(owners) < 4 else (2, 3)
        for extents in itertools.product(small, repeat=len(owners)):
            pairs = list(zip(extents, owners, strict=True))
            ranges = {owner: range(extent) for extent, owner in pairs if owner is not None}
            for place in itertools.product(*ranges.values()):
                yield digits_of(*pairs), dict(zip(ranges, place, strict=True))


def test_every_small_mixed_radix() -> None:
    """Sizes from none to the whole product, so blocks are full, short and empty."""
    for digits, place in radices():
        whole = 1
        for digit in digits:
            whole *= const_value(digit.extent) or 1
        coordinates = {owner: const(number) for owner, number in place.items()}
        everything = listed(digits, whole, place)
        for size in range(0, whole + 1, 1 if len(digits) < 4 else 5):
            expected = [index for index in everything if index < size]
            runs = held(digits, size, place)
            assert [index for run in runs for index in run] == expected
            count = held_count(digits, const(size), coordinates)
            assert const_value(count) == len(expected), (digits, size, place)


def test_runs_are_maximal_or_one_stride() -> None:
    block, cyclic = digits_of((2, X), (4, None)), digits_of((4, None), (2, X))
    strided = digits_of((3, None), (2, X), (2, None))
    assert held(block, 7, {X: 1}) == (range(4, 7),)
    assert held(cyclic, 7, {X: 1}) == (range(1, 6, 2),)
    assert held(strided, 11, {X: 0}) == (range(2), range(4, 6), range(8, 10))
    assert held(strided, 11, {X: 1}) == (range(2, 4), range(6, 8), range(10, 11))
    assert held(block, 4, {X: 1}) == ()
    big = held(digits_of((1 << 40, None), (2, X)), 1 << 41, {X: 1})
    assert big == (range(1, 1 << 41, 2),)


STRIDES = st.builds(
    lambda first, step, count: (range(first, first + step * (count - 1) + 1, step),),
    st.integers(0, 9),
    st.integers(1, 7),
    st.integers(2, 9),
)
RUNS = STRIDES | st.builds(lambda found: runs_of(sorted(found)), st.sets(st.integers(0, 30)))


@given(RUNS, RUNS)
def test_what_stands_in_both(left: tuple[range, ...], right: tuple[range, ...]) -> None:
    members = [{k for run in runs for k in run} for runs in (left, right)]
    both = runs_in_both(left, right)
    assert [k for run in both for k in run] == sorted(members[0] & members[1])
    assert both == runs_of(sorted(members[0] & members[1]))


def test_counts_of_sizes_and_places_that_are_not_known() -> None:
    """The same expression is right for every size, on every rank."""
    mesh = make_mesh([[0, 1, 2], [3, 4, 5]])
    size = symbol("i0")
    x, y = coordinate_symbol(mesh, X), coordinate_symbol(mesh, Y)
    six = ceildiv(size, 6)
    for digits in (
        digits_of((3, X), (ceildiv(size, 3), None)),
        digits_of((ceildiv(size, 3), None), (3, X)),
        digits_of((2, None), (3, X), (six, None)),
        digits_of((2, Y), (3, X), (six, None)),
        digits_of((3, X), (six, None), (2, Y)),
        digits_of((six, None), (2, Y), (3, X)),
    ):
        count = held_count(digits, size, {X: x, Y: y})
        for n in range(20):
            numbers = [Digit(const(evaluate(d.extent, {"i0": n})), d.owner) for d in digits]
            for place in rank_coordinates(mesh).values():
                known = {"i0": n, x.name: place[X], y.name: place[Y]}
                assert evaluate(count, known) == len(listed(tuple(numbers), n, place))


def test_an_even_axis_has_its_local_extent() -> None:
    mesh, size = make_mesh(range(2)), symbol("i0", multiple=2)
    even = digits_of((2, X), (size // 2, None))
    assert is_even(even, size) and not is_even(digits_of((2, X), (4, None)), const(7))
    assert held_count(even, size, {X: coordinate_symbol(mesh, X)}) is size // 2
    uneven = digits_of((2, X), (4, None))
    assert str(held_count(uneven, const(7), {X: symbol("x", 0, 1)})) == "min(7 - 4*x, 4)"


def test_coordinates_have_names_of_their_mesh() -> None:
    assert str(coordinate_symbol(make_mesh(range(2)), X)) == "x_2_0"
    square = make_mesh([[4, 5], [6, 7]])
    assert [str(coordinate_symbol(square, axis)) for axis in (X, Y)] == ["x_2x2_4", "y_2x2_4"]
    deep = make_mesh([[[[0, 1]]]])
    assert str(coordinate_symbol(deep, ParallelType.mesh(3))) == "m3_1x1x1x2_0"
    odd, other = make_mesh([0, 2]), make_mesh([0, 3])
    assert coordinate_symbol(odd, X) is not coordinate_symbol(other, X)
    assert coordinate_symbol(square, X).high == 1


def test_what_the_running_rank_holds_of_a_tensor() -> None:
    recorder = Recorder()
    tensor = recorder.input([7, 6])
    recorder.block(make_mesh(range(2)), tensor, 0)
    sizes = [str(extent) for extent in rank_extents(recorder.program, tensor)]
    assert sizes == ["min(7 - 4*x_2_0, 4)", "6"]
