"""Copies after and before a tensor."""

from __future__ import annotations

import pytest

from loop_nests import bind, bound, nest, total
from meshfuse.base.errors import UserError
from meshfuse.facts.sharding import sharding_of
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.printer import print_expr
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import MemoryType
from program_recorder import Recorder

X, SERIAL = ParallelType.mesh_x, ParallelType.serial
PAIR = make_mesh([0, 1])


def exprs(program: Program) -> list[str]:
    return [print_expr(expr) for expr in program.fusion.exprs]


def test_readers_read_the_copy() -> None:
    r = Recorder()
    x = r.input([4, 6])
    y = r.pointwise("neg", x)
    z = r.pointwise("add", x, y)
    r.output(y, z)
    program, copy = transforms.cache_after(r.program, x)
    assert exprs(program) == ["T3 = set(T0)", "T1 = neg(T3)", "T2 = add(T3, T1)"]
    assert program.schedule(copy).memory is MemoryType.local
    program, copy = transforms.cache_after(program, y)
    assert exprs(program)[1:] == ["T1 = neg(T3)", "T4 = set(T1)", "T2 = add(T3, T4)"]
    assert [output.tensor for output in program.fusion.outputs] == [y, z]
    assert nest(program, copy) == ["i4", "i6"]


def test_a_copy_is_placed_and_laid_out_like_the_tensor() -> None:
    r = Recorder()
    x = r.input([4, 6])
    r.output(r.pointwise("neg", x))
    r.block(PAIR, x, 1)
    a, b = (axis.name for axis in r.program.tensor(x).tensor_axes)
    program = transforms.set_allocation_domain(r.program, x, [b, a], [False, True])
    cached, copy = transforms.cache_after(program, x)
    assert nest(cached, copy) == ["i4", "i2", "i3"]
    assert sharding_of(cached, copy) == sharding_of(cached, x)
    allocation = cached.schedule(copy).allocation
    assert allocation is not None
    extents = [str(cached.all_axes(copy)[axis].extent) for axis in allocation.order]
    assert extents == ["6", "4"]
    assert allocation.contiguity == (False, True)
    cached, copy = transforms.cache_after(program, x, propagate_allocation=False)
    assert cached.schedule(copy).allocation is None


def test_the_computation_moves_before_the_copy() -> None:
    program, y = total(4, 6, dims=[0])
    program = transforms.split(program, y, 0, 2)
    program = transforms.split(program, y, 2, 3)
    program = bind(program, y, 2, ParallelType.grid_x)
    cached, made = transforms.cache_before(program, y)
    assert exprs(cached) == ["T2 = sum(T0, [0])", "T1 = set(T2)"]
    assert nest(cached, made) == ["r2", "r2", "i2", "i3"]
    assert bound(cached, made) == [SERIAL, SERIAL, ParallelType.grid_x, SERIAL]
    assert nest(cached, y) == ["i2", "i3"]
    assert bound(cached, y) == [ParallelType.grid_x, SERIAL]
    assert cached.schedule(y).leaves == program.schedule(y).leaves[2:]
    assert cached.schedule(made).memory is MemoryType.local


def test_a_part_of_a_reduction_moves_with_its_root() -> None:
    program, y = total(4, 6, dims=[1])
    program, (part,) = transforms.rfactor(transforms.split(program, y, 1, 2), y, [2])
    program, made = transforms.cache_before(program, part)
    assert exprs(program) == ["T3 = sum(T0, [1])", "T2 = set(T3)", "T1 = sum(T2, [1])"]
    assert (nest(program, made), nest(program, part)) == (["i4", "i3", "r2"], ["i4", "i3"])
    assert not program.tensor(part).root


def test_one_of_several_results_moves() -> None:
    r = Recorder()
    variance, mean = r.add(build.var_mean, r.input([4, 6]), [1], 0)
    r.output(variance, mean)
    program, made = transforms.cache_before(r.program, mean)
    assert exprs(program)[:2] == [f"{made}, T2, T3 = welford(T0, [1])", f"{mean} = set({made})"]
    assert nest(program, mean) == ["i4"]


def test_refusals() -> None:
    program, y = total(4, 6, dims=[0])
    with pytest.raises(UserError, match=r"cache_after\(T1\): nothing reads T1; cache_before"):
        transforms.cache_after(program, y)
    with pytest.raises(UserError, match=r"cache_before\(T0\): T0 is an input; cache_after copies"):
        transforms.cache_before(program, TensorName("T0"))
