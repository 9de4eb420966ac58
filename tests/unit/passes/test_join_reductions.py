"""rfactor undone: the reductions are what they were, and so are their values."""

from __future__ import annotations

import pytest
import torch

from loop_nests import bind, bound, logical, nest, total
from meshfuse.base.errors import Unsupported
from meshfuse.facts.sharding import reduced_mesh_axes, sharding_of
from meshfuse.ir import build, transforms
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.ops import Welford
from meshfuse.ir.printer import print_expr
from meshfuse.ir.program import Program
from meshfuse.ir.verify import verify
from meshfuse.passes.join_reductions import join_reductions
from meshfuse.runtime.evaluate_ops import evaluate_program
from program_recorder import Recorder

X, SERIAL = ParallelType.mesh_x, ParallelType.serial
PAIR = make_mesh([0, 1])


def joined(program: Program) -> Program:
    program, _ = join_reductions(program)
    verify(program)
    return program


def exprs(program: Program) -> list[str]:
    return [print_expr(expr) for expr in program.fusion.exprs]


def integers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randint(-4, 5, shape, generator=generator).float()


def check_same(before: Program, after: Program, *inputs: torch.Tensor) -> None:
    """The program before, taken apart, and joined again have one value; all of them are exact."""
    wanted = evaluate_program(before, inputs)
    for program in (after, joined(after)):
        for result, want in zip(evaluate_program(program, inputs), wanted, strict=True):
            assert torch.equal(result, want)
            assert result.dtype == want.dtype


@pytest.mark.parametrize("axes", [[1], [2], [1, 3], [2, 3]])
@pytest.mark.parametrize("function", ["sum", "max", "min", "prod"])
def test_parts_of_one_reduction(function: str, axes: list[int]) -> None:
    r = Recorder()
    y = r.add(build.reduction, function, r.input([-1, -1]), [1])
    r.output(y)
    split = transforms.split(transforms.split(r.program, y, 1, 5), y, 2, 2, inner_split=False)
    program, _ = transforms.rfactor(split, y, axes)
    check_same(r.program, program, integers(3, 13))
    after = joined(program)
    assert exprs(after) == exprs(r.program)
    assert sorted(nest(after, y)) == sorted(nest(split, y))
    assert logical(after, y) == logical(split, y)


def test_merged_axes() -> None:
    program, y = total(4, 5, 6, dims=[0, 2])
    merged = transforms.split(transforms.merge(program, y, 2, 0), y, 1, 7)
    after, _ = transforms.rfactor(merged, y, [1])
    check_same(program, after, integers(4, 5, 6))
    after, _ = transforms.rfactor(program, y, [0])
    check_same(program, after, integers(4, 5, 6))


def test_parts_of_parts() -> None:
    program, y = total(4, 12, dims=[1])
    split = transforms.split(transforms.split(program, y, 1, 2), y, 1, 3)
    once, _ = transforms.rfactor(split, y, [3])
    twice, _ = transforms.rfactor(once, y, [2])
    check_same(program, twice, integers(4, 12))
    assert exprs(joined(twice)) == ["T1 = sum(T0, [1])"]


@pytest.mark.parametrize("name", ["matmul", "linear"])
def test_contractions(name: str) -> None:
    r = Recorder()
    shape = (10, 6) if name == "matmul" else (6, 10)
    a, b = r.input([2, 3, 10]), r.input(shape)
    y = r.add(getattr(build, name), a, b)
    r.output(y)
    split = transforms.split(r.program, y, 3, 4)
    program, _ = transforms.rfactor(split, y, [3])
    check_same(r.program, program, integers(2, 3, 10), integers(*shape))


def test_outputs_defined_together() -> None:
    r = Recorder()
    variance, mean = r.add(build.var_mean, r.input([3, 16]), [1], 0)
    r.output(variance, mean)
    (expr,) = (expr for expr in r.program.fusion.exprs if isinstance(expr, Welford))
    split = transforms.split(r.program, expr.mean, 1, 4)
    program, _ = transforms.rfactor(split, expr.mean, [1])
    check_same(r.program, program, integers(3, 16))


def test_mesh_axes_stay_where_they_were() -> None:
    program, y = total(4, 12, dims=[1])
    program = transforms.set_device_mesh(program, y, PAIR)
    program = transforms.split(program, y, 1, 2, inner_split=False)
    program = bind(program, y, 1, X)
    after = joined(transforms.rfactor(program, y, [2])[0])
    assert (nest(after, y), bound(after, y)) == (["i4", "r2", "r6"], [SERIAL, X, SERIAL])
    assert sharding_of(after, y) == sharding_of(program, y)
    assert [owner for owner, _ in reduced_mesh_axes(after, y)] == [X]


def test_a_part_that_is_used_by_itself() -> None:
    program, y = total(4, 12, dims=[1])
    program, (part,) = transforms.rfactor(transforms.split(program, y, 1, 4), y, [2])
    (value,) = evaluate_program(build.add_output(program, part), [integers(4, 12)])[1:]
    assert torch.equal(value, integers(4, 12).unflatten(1, (3, 4)).sum(2))
    for other in (build.add_output(program, part), build.pointwise(program, "neg", [part])[0]):
        with pytest.raises(Unsupported, match="T2 is one part of a reduction, by rfactor, and is"):
            join_reductions(other)


def test_a_program_without_parts_stays_as_it_is() -> None:
    program, _ = total(4, 12, dims=[1])
    assert join_reductions(program) == (program, ())
