"""Reductions taken apart: what the two halves reduce, and how they lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loop_nests import bind, bound, logical, nest, total
from meshfuse.base.errors import UserError
from meshfuse.facts.sharding import describe, sharding_of
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.ops import Welford
from meshfuse.ir.printer import print_expr
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Allocation
from program_recorder import Recorder

X, Y, SERIAL = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.serial
GRID, VECTOR = ParallelType.grid_x, ParallelType.vectorize
PAIR = make_mesh([0, 1])


def exprs(program: Program) -> list[str]:
    return [print_expr(expr) for expr in program.fusion.exprs]


def root(program: Program, tensor: TensorName) -> list[str]:
    return [f"{axis.kind.value}{axis.extent}" for axis in program.tensor(tensor).root]


# One output.


def test_the_inner_part_of_a_split_axis() -> None:
    """What is documented: [i, i, r{d}, r{K/d}] -> [i, i, i{d}, r{K/d}] and [i, i, r{d}]."""
    program, y = total(4, 6, 12, dims=[2])
    program = transforms.split(program, y, 2, 3, inner_split=False)
    names = program.schedule(y).leaves
    program, (part,) = transforms.rfactor(program, y, [-1])
    assert nest(program, part) == logical(program, part) == ["i4", "i6", "i3", "r4"]
    assert root(program, part) == ["i4", "i6", "r12"]
    assert nest(program, y) == logical(program, y) == ["i4", "i6", "r3"]
    assert root(program, y) == []
    assert program.schedule(y).leaves == names[:-1]
    assert exprs(program) == ["T2 = sum(T0, [2])", "T1 = sum(T2, [2])"]
    assert [output.tensor for output in program.fusion.outputs] == [y]


def test_the_outer_part_of_a_split_axis() -> None:
    program, y = total(4, 12, dims=[1])
    program, (part,) = transforms.rfactor(transforms.split(program, y, 1, 3), y, [1])
    assert nest(program, part) == ["i4", "r4", "i3"]
    assert nest(program, y) == ["i4", "r3"]
    assert exprs(program) == ["T2 = sum(T0, [1])", "T1 = sum(T2, [1])"]


def test_one_of_two_reduced_axes() -> None:
    program, y = total(4, 5, 6, dims=[0, 2])
    program, (part,) = transforms.rfactor(program, y, [2])
    assert nest(program, part) == ["i4", "i5", "r6"]
    assert root(program, part) == ["r4", "i5", "r6"]
    assert nest(program, y) == ["r4", "i5"]
    assert exprs(program) == ["T2 = sum(T0, [0, 2])", "T1 = sum(T2, [0])"]


def test_merged_axes() -> None:
    program, y = total(4, 5, 6, dims=[0, 2])
    program = transforms.merge(program, y, 0, 2)
    program = transforms.split(program, y, 0, 8)
    program = transforms.reorder(program, y, {2: 0})
    assert nest(program, y) == ["i5", "r3", "r8"]
    program, (part,) = transforms.rfactor(program, y, [2])
    assert nest(program, part) == ["i5", "i3", "r8"]
    assert logical(program, part) == ["i3", "r8", "i5"]
    assert root(program, part) == ["r4", "i5", "r6"]
    assert nest(program, y) == ["i5", "r3"]
    assert logical(program, y) == ["r3", "i5"]
    assert exprs(program)[1] == "T1 = sum(T2, [0])"


def test_a_size_that_does_not_divide() -> None:
    program, y = total(4, -1, dims=[1])
    program, (part,) = transforms.rfactor(transforms.split(program, y, 1, 8), y, [2])
    assert nest(program, part) == ["i4", "i(i0 + 7) // 8", "r8"]
    assert nest(program, y) == ["i4", "r(i0 + 7) // 8"]


def test_steps_that_are_not_above_stay_loops() -> None:
    """Only what leads to the axes that are taken becomes a part of the definition."""
    program, y = total(8, 12, 5, dims=[1])
    program = transforms.split(program, y, 0, 2)
    program = transforms.split(program, y, 2, 6)
    program = transforms.split(program, y, 2, 1)
    assert nest(program, y) == ["i4", "i2", "r2", "r1", "r6", "i5"]
    program, (part,) = transforms.rfactor(program, y, [4])
    assert logical(program, part) == ["i8", "i2", "r6", "i5"]
    assert nest(program, part) == ["i4", "i2", "i2", "i1", "r6", "i5"]
    assert len(program.tensor(part).root_steps) == 1
    assert logical(program, y) == ["i8", "r2", "i5"]
    assert nest(program, y) == ["i4", "i2", "r2", "r1", "i5"]


def test_bindings_stand_where_they_stood() -> None:
    program, y = total(8, 12, dims=[1])
    program = transforms.split(program, y, 1, 4)
    program = bind(bind(program, y, 0, GRID), y, 2, VECTOR)
    lanes, (part,) = transforms.rfactor(program, y, [1])
    assert (nest(lanes, part), bound(lanes, part)) == (["i8", "r3", "i4"], [GRID, SERIAL, VECTOR])
    assert (nest(lanes, y), bound(lanes, y)) == (["i8", "r4"], [GRID, VECTOR])
    program, (part,) = transforms.rfactor(program, y, [2])
    assert bound(program, part) == [GRID, SERIAL, VECTOR]
    assert (nest(program, y), bound(program, y)) == (["i8", "r3"], [GRID, SERIAL])


# Contractions.


@pytest.mark.parametrize(("contraction", "name"), [("matmul", "mat_mul"), ("linear", "linear")])
def test_contractions(contraction: str, name: str) -> None:
    r = Recorder()
    a = r.input([8, 12])
    b = r.input([12, 6] if contraction == "matmul" else [6, 12])
    y = r.add(getattr(build, contraction), a, b)
    r.output(y)
    program = transforms.split(r.program, y, 2, 3, inner_split=False)
    program, (part,) = transforms.rfactor(program, y, [-1])
    assert nest(program, part) == ["i8", "i6", "i3", "r4"]
    assert nest(program, y) == ["i8", "i6", "r3"]
    assert exprs(program) == [f"T3 = {name}(T0, T1)", "T2 = sum(T3, [2])"]


# On a mesh.


def sharded_sum(*dims: int) -> tuple[Program, TensorName]:
    """T1 [i{4}, r{12}]: the reduced axis in blocks over mesh_x."""
    program, y = total(4, 12, dims=[1])
    program = transforms.set_device_mesh(program, y, PAIR)
    program = transforms.split(program, y, 1, 2, inner_split=False)
    return bind(program, y, 1, X), y


def test_the_part_across_ranks_stays_behind() -> None:
    program, y = sharded_sum()
    program, (part,) = transforms.rfactor(program, y, [2])
    assert (nest(program, part), bound(program, part)) == (["i4", "i2", "r6"], [SERIAL, X, SERIAL])
    assert (nest(program, y), bound(program, y)) == (["i4", "r2"], [SERIAL, X])
    assert describe(sharding_of(program, part)) == "[4, mesh_x{2}] on DeviceMesh{0 1}"
    assert describe(sharding_of(program, y)) == "[4] on DeviceMesh{0 1}"


def test_reduce_scatter() -> None:
    """Each rank reduces its part of all of the result; what it keeps of the result is less."""
    program, y = sharded_sum()
    program = transforms.split(program, y, 0, 2, inner_split=False)
    program = bind(program, y, 0, X)
    program, (part,) = transforms.rfactor(program, y, [3])
    assert nest(program, part) == ["i2", "i2", "i2", "r6"]
    assert bound(program, part) == [SERIAL, SERIAL, X, SERIAL]
    assert bound(program, y) == [X, SERIAL, X]


def test_memory_order() -> None:
    program, y = total(4, 5, 12, dims=[2])
    program = transforms.split(program, y, 2, 3)
    a, b = (axis.name for axis in program.tensor(y).tensor_axes)
    program = transforms.set_allocation_domain(program, y, [b, a], [False, True])
    program, (part,) = transforms.rfactor(program, y, [3])
    assert program.schedule(y).allocation == Allocation((b, a), (False, True))
    allocation = program.schedule(part).allocation
    assert allocation is not None
    extents = {axis.name: str(axis.extent) for axis in program.tensor(part).tensor_axes}
    assert [extents[axis] for axis in allocation.order] == ["5", "4", "4"]
    assert allocation.contiguity == (True, True, True)
    assert nest(program, part) == ["i4", "i5", "i4", "r3"]


# Outputs that are defined together.


def statistics(*sizes: int, dims: list[int]) -> tuple[Program, list[TensorName]]:
    r = Recorder()
    variance, mean = r.add(build.var_mean, r.input(list(sizes)), dims, 0)
    r.output(variance, mean)
    (expr,) = (expr for expr in r.program.fusion.exprs if isinstance(expr, Welford))
    return r.program, [TensorName(out) for out in expr.outs]


def lay_out(program: Program, tensor: TensorName) -> Program:
    """Rows in blocks on mesh_x, the last row axis slowest in memory."""
    program = transforms.set_device_mesh(program, tensor, PAIR)
    program = transforms.split(program, tensor, 0, 2, inner_split=False)
    program = bind(program, tensor, 0, X)
    program = transforms.reorder(program, tensor, {2: 0})
    return transforms.set_allocation_as_loop(program, tensor)


@pytest.mark.parametrize("placed", [lay_out, lambda program, tensor: program])
@pytest.mark.parametrize("called_on", [0, 1, 2])
def test_siblings_carry_the_schedule_of_the_one_called_on(
    called_on: int, placed: Callable[[Program, TensorName], Program]
) -> None:
    program, outs = statistics(8, 5, 12, dims=[2])
    program = placed(program, outs[called_on])
    program = transforms.split(program, outs[called_on], -1, 3, inner_split=False)
    program, parts = transforms.rfactor(program, outs[called_on], [-1])
    assert len(parts) == 3
    for out, part in zip(outs, parts, strict=True):
        schedule = program.schedule(out)
        assert nest(program, out) == nest(program, outs[called_on])
        assert nest(program, part) == [*nest(program, out)[:-1], "i3", "r4"]
        assert bound(program, out) == bound(program, outs[called_on])
        assert bound(program, part) == [*bound(program, out), SERIAL]
        assert schedule.mesh == program.schedule(part).mesh
        assert sharding_of(program, out) == sharding_of(program, outs[0])
        assert sharding_of(program, part).axes[:2] == sharding_of(program, out).axes
        assert program.schedule(part).mesh == program.schedule(outs[called_on]).mesh
        if placed is lay_out:
            places = [axis.name for axis in program.tensor(out).tensor_axes]
            assert schedule.allocation == Allocation((places[1], places[0]), (True, True))
            layout = program.schedule(part).allocation
            assert layout is not None
            kinds = {axis.name: str(axis.extent) for axis in program.tensor(part).tensor_axes}
            assert [kinds[axis] for axis in layout.order] == ["5", "8", "3"]
    assert exprs(program)[:2] == [
        f"{', '.join(parts)} = welford(T0, [2])",
        f"{', '.join(outs)} = welford({parts[0]}, [2], src_m2={parts[1]}, src_count={parts[2]})",
    ]
    assert {axis.kind for axis in program.tensor(outs[2]).logical[:2]} == {AxisKind.iteration}


def test_a_sibling_that_is_scheduled_otherwise() -> None:
    program, (mean, m2, _) = statistics(8, 12, dims=[1])
    alike = transforms.split(transforms.split(program, mean, 1, 3), m2, 1, 3)
    _, parts = transforms.rfactor(alike, mean, [2])
    assert len(parts) == 3
    program = transforms.split(transforms.split(program, mean, 1, 3), m2, 1, 4)
    with pytest.raises(UserError, match=rf"self_replay\({mean}, {m2}\): {m2} is scheduled already"):
        transforms.rfactor(program, mean, [2])


# Refused.


def test_refusals() -> None:
    program, y = total(4, 12, dims=[1])
    split = transforms.split(program, y, 1, 3)
    factored, (part,) = transforms.rfactor(split, y, [2])
    r = Recorder()
    biased = r.add(build.linear, r.input([8, 12]), r.input([6, 12]), r.input([6]))
    for subject, tensor, axes, message in (
        (program, y, [1], r"rfactor\(T1, \[1\]\): takes 1 of the 1 reduced axes of T1; at least"),
        (split, y, [], "takes 0 of the 2 reduced axes"),
        (split, y, [1, 2], "takes 2 of the 2 reduced axes"),
        (split, y, [0], r"axis a2:i\{4\} is not reduced; \[a4:r\{4\}, a5:r\{3\}\] are"),
        (split, y, [3], "must lie in"),
        (split, TensorName("T0"), [0], "T0 is an input; reductions, welford, matmul and linear"),
        (factored, part, [2], "T2 is the inner part of a reduction that was taken apart"),
        (r.program, biased, [2], "T3 has a bias, which is to be added once, after the sum"),
        (transforms.swizzle1d(program, y, 1, X), y, [1], "takes 1 of the 1 reduced axes"),
        (transforms.swizzle1d(split, y, 2, X), y, [2], "an axis above is swizzled"),
    ):
        with pytest.raises(UserError, match=message):
            transforms.rfactor(subject, tensor, axes)


def test_what_stays_can_be_taken_apart_again() -> None:
    program, y = total(4, 12, dims=[1])
    program = transforms.split(transforms.split(program, y, 1, 2), y, 1, 3)
    program, (first,) = transforms.rfactor(program, y, [3])
    program, (second,) = transforms.rfactor(program, y, [2])
    assert nest(program, first) == ["i4", "i2", "i3", "r2"]
    assert nest(program, second) == ["i4", "i2", "r3"]
    assert nest(program, y) == ["i4", "r2"]
    assert exprs(program) == ["T2 = sum(T0, [1])", "T3 = sum(T2, [1])", "T1 = sum(T3, [1])"]
