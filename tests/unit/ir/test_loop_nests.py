"""Schedule verbs: what they make of a loop nest, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from loop_nests import bind, leaf, nest, one, total
from meshfuse.base.errors import Unsupported, UserError, UserTypeError
from meshfuse.expr import ceildiv, symbol
from meshfuse.facts.sharding import describe, sharding_of
from meshfuse.ir import transforms
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.mesh import DeviceMesh, ParallelType, make_mesh
from meshfuse.ir.parser import parse_program
from meshfuse.ir.printer import print_program
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Swizzle1d
from meshfuse.ir.verify import verify
from meshfuse.kernel.localize import localize

X, Y, Z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z
PAIR = make_mesh([0, 1])
Verb = Callable[..., Program]


# Split, merge, reorder.


@pytest.mark.parametrize(
    ("axis", "factor", "inner_split", "wanted"),
    [
        (0, 4, True, ["i3", "i4", "ii0"]),
        (0, 4, False, ["i4", "i3", "ii0"]),
        (0, 5, True, ["i3", "i5", "ii0"]),
        (0, 5, False, ["i5", "i3", "ii0"]),
        (-1, 4, True, ["i12", f"i{ceildiv(symbol('i0'), 4)}", "i4"]),
        (1, 4, False, ["i12", "i4", f"i{ceildiv(symbol('i0'), 4)}"]),
        (0, 1, False, ["i1", "i12", "ii0"]),
    ],
)
def test_split(axis: int, factor: int, inner_split: bool, wanted: list[str]) -> None:
    program, x = one(12, -1)
    assert nest(transforms.split(program, x, axis, factor, inner_split), x) == wanted


def test_split_axes_keep_their_kind() -> None:
    program, y = total(6, 5, dims=[0])
    assert nest(transforms.split(program, y, 0, 2), y) == ["r3", "r2", "i5"]
    program, x = one(1)
    assert nest(transforms.split(program, x, 0, 1), x) == ["b1", "b1"]


def test_merge() -> None:
    program, x = one(2, 3, 1, -1)
    assert nest(transforms.merge(program, x, 0, 1), x) == ["i6", "b1", "ii0"]
    assert nest(transforms.merge(program, x, 2, 1), x) == ["i2", "i3", "ii0"]
    assert nest(transforms.merge(program, x, 0, -1), x) == ["i2*i0", "i3", "b1"]
    assert nest(transforms.merge(program, x, 3, 0), x) == ["i3", "b1", "i2*i0"]


def test_reorder() -> None:
    program, x = one(2, 3, 4, 5)
    assert nest(transforms.reorder(program, x, {0: -1}), x) == ["i3", "i4", "i5", "i2"]
    assert nest(transforms.reorder(program, x, {2: 0}), x) == ["i4", "i2", "i3", "i5"]
    assert nest(transforms.reorder(program, x, {0: 1, 1: 0}), x) == ["i3", "i2", "i4", "i5"]
    assert nest(transforms.reorder(program, x, {}), x) == ["i2", "i3", "i4", "i5"]


def inlined(program: Program, tensor: TensorName) -> Program:
    """The first leaf is shared with consumers."""
    return program.with_schedule(tensor, replace(program.schedule(tensor), inline_depth=1))


@pytest.mark.parametrize(
    ("verb", "arguments", "error", "message"),
    [
        (transforms.split, (2, 2), UserError, r"split\(T0, axis=2, .*dim 2 must lie in \[-2, 2\)"),
        (transforms.split, (-3, 2), UserError, "must lie in"),
        (transforms.split, (1.0, 2), UserTypeError, "a dim is an int"),
        (transforms.split, (0, 0), UserError, "factor must be at least 1"),
        (transforms.split, (0, -2), UserError, "factor must be at least 1"),
        (transforms.split, (0, 2.0), UserTypeError, "factor must be an int, got float"),
        (
            transforms.merge,
            (0, 0),
            UserError,
            r"outer=0, inner=0\): needs two different axes",
        ),
        (transforms.merge, (0, 2), UserError, "must lie in"),
        (transforms.reorder, ({0: 2},), UserError, r"reorder\(T0, \{0: 2\}\): dim 2 must lie in"),
        (transforms.reorder, ({0: 1, 1: 1},), UserError, "each axis moves once, and to a place"),
        (transforms.reorder, ({0: 1, -2: 0},), UserError, "each axis moves once"),
    ],
)
def test_errors_of_loop_verbs(
    verb: Verb, arguments: Any, error: type[Exception], message: str
) -> None:
    program, x = one(4, 6)
    with pytest.raises(error, match=message):
        verb(program, x, *arguments)


def test_a_bound_axis_is_not_transformed() -> None:
    program, x = one(4, 6)
    program = bind(program, x, 0, ParallelType.grid_x)
    with pytest.raises(UserError, match=r"a0:i\{4\} is bound to grid_x already; transform"):
        transforms.split(program, x, 0, 2)
    with pytest.raises(UserError, match="is bound to grid_x already"):
        transforms.merge(program, x, 1, 0)
    assert nest(transforms.reorder(program, x, {0: 1}), x) == ["i6", "i4"]
    assert nest(transforms.split(program, x, 1, 2), x) == ["i4", "i3", "i2"]


def test_an_inlined_axis_is_not_transformed() -> None:
    program, x = one(4, 6)
    with pytest.raises(UserError, match=r"axis 0 is shared with the consumers \(inlined\)"):
        transforms.split(inlined(program, x), x, 0, 2)
    assert nest(transforms.split(inlined(program, x), x, 1, 2), x) == ["i4", "i3", "i2"]


def test_a_0_dim_tensor_has_no_loops() -> None:
    program, x = one()
    for verb, arguments in ((transforms.split, (0, 2)), (transforms.merge, (0, 1))):
        with pytest.raises(UserError, match="a 0-dim tensor has no loop axes"):
            verb(program, x, *arguments)


def test_reduced_and_other_axes_do_not_merge() -> None:
    program, y = total(6, 5, dims=[0])
    with pytest.raises(UserError, match=r"a2:r\{6\} is reduction, a3:i\{5\} is iteration; both or"):
        transforms.merge(program, y, 0, 1)


# Bindings.


def test_parallelize() -> None:
    program, x = one(4, 6)
    program = bind(program, x, 0, X)
    assert program.schedule(x).binding(leaf(program, x, 0)) == X
    assert program.schedule(x).binding(leaf(program, x, 1)) == ParallelType.serial
    assert bind(program, x, 0, X) is program
    assert bind(program, x, 1, ParallelType.serial) is program


def test_an_axis_is_bound_once() -> None:
    program, x = one(4, 6)
    program = bind(program, x, 0, X)
    for other in (ParallelType.grid_x, Y, ParallelType.serial):
        with pytest.raises(UserError, match="the axis is bound to mesh_x already"):
            bind(program, x, 0, other)


def test_one_tensor_axis_has_a_mesh_axis() -> None:
    program, x = one(4, 6)
    program = bind(program, x, 0, X)
    with pytest.raises(UserError, match=r"mesh_x is bound to tensor axis a0:i\{4\} already"):
        bind(program, x, 1, X)


def test_tensor_axes_are_loops_in_one_another_and_one_reduced_axis_is_a_loop() -> None:
    program, x = one(4, 6)
    program = bind(bind(program, x, 0, ParallelType.stream), x, 1, ParallelType.stream)
    assert list(program.schedule(x).bindings.values()) == [ParallelType.stream] * 2
    program, y = total(2, 2, 2, dims=[0, 1])
    program = bind(program, y, 0, ParallelType.stream)
    with pytest.raises(UserError, match="stream is bound to reduced axis"):
        bind(program, y, 1, ParallelType.stream)


def test_a_reduced_axis_may_share_a_mesh_axis_with_a_tensor_axis() -> None:
    program, y = total(2, 2, 2, dims=[0, 1])
    program = bind(bind(program, y, 2, X), y, 0, X)
    verify(program)
    with pytest.raises(UserError, match=r"mesh_x is bound to reduced axis a3:r\{2\} already"):
        bind(program, y, 1, X)


def test_loops_inside_a_program_may_share_a_type() -> None:
    program, x = one(4, 6)
    program = bind(bind(program, x, 0, ParallelType.unroll), x, 1, ParallelType.unroll)
    assert set(program.schedule(x).bindings.values()) == {ParallelType.unroll}


def test_an_axis_that_is_no_leaf_is_not_bound() -> None:
    program, x = one(4, 6)
    whole = leaf(program, x, 0)
    split = transforms.split(program, x, 0, 2)
    with pytest.raises(UserError, match="the axis was split into a2, a3; bind one of those"):
        transforms.parallelize(split, x, whole, X)
    merged = transforms.merge(program, x, 0, 1)
    with pytest.raises(UserError, match="the axis was merged into a2; bind one of those"):
        transforms.parallelize(merged, x, whole, X)
    with pytest.raises(UserError, match=r"no such axis; the loop axes of T0 are \[a0:i\{4\}, a1:"):
        transforms.parallelize(program, x, AxisName("a9"), X)


# Meshes. Each is set before and after binding.


def place(
    program: Program, tensor: TensorName, position: int, to: ParallelType, mesh: DeviceMesh
) -> tuple[Callable[[], Program], Callable[[], Program]]:
    """Bind then place, and place then bind."""

    def bind_first() -> Program:
        return transforms.set_device_mesh(bind(program, tensor, position, to), tensor, mesh)

    def place_first() -> Program:
        return bind(transforms.set_device_mesh(program, tensor, mesh), tensor, position, to)

    return bind_first, place_first


def refused(
    program: Program, tensor: TensorName, position: int, to: ParallelType, mesh: DeviceMesh
) -> tuple[Exception, ...]:
    errors: list[Exception] = []
    for attempt in place(program, tensor, position, to, mesh):
        with pytest.raises((UserError, Unsupported)) as caught:
            attempt()
        errors.append(caught.value)
    return tuple(errors)


def test_a_block_sharding() -> None:
    program, x = one(4, -1)
    for axis in (0, 1):
        split = transforms.split(program, x, axis, 2, inner_split=False)
        for attempt in place(split, x, axis, X, PAIR):
            placed = attempt()
            assert placed.schedule(x).mesh == PAIR
            assert placed.schedule(x).bindings == {leaf(placed, x, axis): X}
            verify(placed)


def test_a_whole_axis_is_as_long_as_the_mesh() -> None:
    program, x = one(2, 6, 1)
    for attempt in place(program, x, 0, X, PAIR):
        verify(attempt())
    for error in refused(program, x, 1, X, PAIR):
        assert isinstance(error, UserError)
        assert "axis a1:i{6} has size 6 and mesh_x of DeviceMesh{0 1} has 2 ranks" in str(error)
    refused(program, x, 2, X, PAIR)
    for attempt in place(program, x, 2, X, make_mesh([3])):
        verify(attempt())


def test_a_symbolic_whole_axis_is_checked_when_run() -> None:
    program, x = one(-1)
    for attempt in place(program, x, 0, X, PAIR):
        verify(attempt())


def test_a_split_by_another_number_than_the_ranks() -> None:
    program, x = one(12)
    for error in refused(transforms.split(program, x, 0, 3, inner_split=False), x, 0, X, PAIR):
        assert "split the axis by 2 and bind the part of that size" in str(error)


@pytest.mark.parametrize("inner_split", [False, True])
def test_a_size_that_the_mesh_does_not_divide(inner_split: bool) -> None:
    """Blocks are shorter at the end, or empty."""
    program, x = one(5, 7)
    program = transforms.split(program, x, 1, 2, inner_split)
    expected = "[5, 4 mesh_x{2}]" if inner_split else "[5, mesh_x{2} 4]"
    for attempt in place(program, x, 2 if inner_split else 1, X, PAIR):
        verify(attempt())
        assert describe(sharding_of(attempt(), x)).startswith(expected)


def test_blocks_within_blocks() -> None:
    program, x = one(6)
    program = transforms.split(program, x, 0, 2, inner_split=False)
    program = transforms.split(program, x, 1, 2, inner_split=False)
    mesh = make_mesh([[0, 1], [2, 3]])
    program = transforms.set_device_mesh(program, x, mesh)
    program = bind(bind(program, x, 0, Y), x, 1, X)
    assert describe(sharding_of(program, x)).startswith("[mesh_y{2} mesh_x{2} 2]")


def test_a_merged_axis_may_be_spread() -> None:
    program, x = one(2, 3)
    program = transforms.split(transforms.merge(program, x, 0, 1), x, 0, 2, inner_split=False)
    for attempt in place(program, x, 0, X, PAIR):
        verify(attempt())


def test_a_mesh_without_such_an_axis() -> None:
    program, x = one(2, 2)
    for error in refused(program, x, 0, Y, PAIR):
        assert "a0 is bound to mesh_y, but DeviceMesh{0 1} has only mesh_x" in str(error)


def test_three_mesh_axes_and_more() -> None:
    program, x = one(2, 3, 1, 2)
    mesh = make_mesh([[[[4, 9]], [[2, 3]], [[6, 7]]], [[[0, 1]], [[12, 13]], [[16, 17]]]])
    program = transforms.set_device_mesh(program, x, mesh)
    for position, to in enumerate((ParallelType.mesh(3), Z, Y, X)):
        program = bind(program, x, position, to)
    verify(program)


# Ring order, and the order of loops.


def test_swizzle() -> None:
    program, x = one(8, 6)
    program = transforms.split(program, x, 0, 2, inner_split=False)
    program = transforms.swizzle1d(program, x, 0, X)
    assert nest(program, x) == ["i2", "i4", "i6"]
    assert program.schedule(x).steps[-1] == Swizzle1d(AxisName("a2"), leaf(program, x, 0), X)
    program = bind(program, x, 0, ParallelType.stream)
    assert nest(transforms.split(program, x, 1, 2), x) == ["i2", "i2", "i2", "i6"]


def test_an_offset_of_a_swizzle_is_in_the_text() -> None:
    program, x = one(4, 6)
    program = transforms.swizzle1d(program, x, 0, X, 1)
    assert "Swizzle1d(a0, a2, mesh_x, offset=1)" in print_program(program)
    assert parse_program(print_program(program)) == program


def test_a_swizzled_axis_has_the_sharding_that_it_had() -> None:
    """It says where a rank begins, not what it holds."""
    program, x = one(8, 6)
    program = transforms.set_device_mesh(program, x, PAIR)
    program = transforms.split(program, x, 1, 2, inner_split=False)
    program = bind(program, x, 1, X)
    swizzled = transforms.swizzle1d(program, x, 0, X)
    assert sharding_of(swizzled, x) == sharding_of(program, x)
    with pytest.raises(Unsupported, match="axis a0: it is swizzled by mesh_x, and a kernel does"):
        localize(swizzled)


def test_errors_of_swizzle() -> None:
    program, x = one(2, 6)
    with pytest.raises(UserError, match=r"swizzle1d\(T0, axis=0, grid_x\): takes a mesh axis"):
        transforms.swizzle1d(program, x, 0, ParallelType.grid_x)
    with pytest.raises(UserError, match=r"dim 2 must lie in"):
        transforms.swizzle1d(program, x, 2, X)
    with pytest.raises(UserError, match="is bound to mesh_x already"):
        transforms.swizzle1d(bind(program, x, 0, X), x, 0, X)
    swizzled = transforms.swizzle1d(program, x, 0, X)
    with pytest.raises(UserError, match="the axis is swizzled by mesh_x: the order of its iterat"):
        bind(swizzled, x, 0, X)
    with pytest.raises(UserError, match="the axis was swizzled into a2; bind one of those"):
        transforms.parallelize(swizzled, x, AxisName("a0"), ParallelType.grid_x)


def test_a_loop_domain_is_an_order_of_the_loops() -> None:
    program, x = one(2, 3)
    program = transforms.split(program, x, 1, 3, inner_split=False)
    a, b, c = program.schedule(x).leaves
    assert nest(transforms.set_loop_domain(program, x, [c, a, b]), x) == ["i1", "i2", "i3"]
    for order, message in (
        ([a, b], rf"set_loop_domain\(T0, \[a0, a2\]\): loop axis {c} is missing"),
        ([a, b, b], "a2 stands twice"),
        ([a, "a1"], r"a1 is no loop axis; those are \[a0:i\{2\}, a2:i\{3\}, a3:i\{1\}\]"),
    ):
        with pytest.raises(UserError, match=message):
            transforms.set_loop_domain(program, x, [AxisName(axis) for axis in order])
