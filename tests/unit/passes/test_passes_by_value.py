"""Random programs with random annotations: what all ranks compute is what one device computes.

Ranks run in step: expressions on local parts through torch, communications as torch would do them.
Data are small integers in float64, so that comparison is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfuse.base.dtypes import DataType
from meshfuse.expr import const_value
from meshfuse.facts.sharding import Sharding, local_extents, sharding_of
from meshfuse.ir import build
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.comm import AllGather, AllReduce, Communication, LocalSlice, ReduceScatter
from meshfuse.ir.mesh import DeviceMesh, ParallelType, make_mesh
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Split
from meshfuse.passes.pipeline import run_passes
from meshfuse.runtime.evaluate_ops import Environment, evaluate_program, run_expressions
from program_recorder import Recorder

SIZE = 8
MESHES = (make_mesh([0]), make_mesh([1, 0]), make_mesh([[0, 1], [2, 3]]), make_mesh([[0, 2]]))


# Programs.


@st.composite
def annotated_programs(draw: st.DrawFn) -> tuple[Program, DeviceMesh]:
    """A few operations on tensors of size 8 per axis, some of them sharded in blocks."""
    recorder, mesh = Recorder(), draw(st.sampled_from(MESHES))
    matrices = [recorder.input([SIZE, SIZE], DataType.Double) for _ in range(3)]
    vectors = [recorder.input([SIZE], DataType.Double) for _ in range(2)]
    for _ in range(draw(st.integers(1, 5))):
        _grow(draw, recorder, matrices, vectors)
    recorder.output(matrices[-1], vectors[-1])
    tensors = [*matrices, *vectors]
    for tensor in draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=5, unique=True)):
        recorder.replicate(mesh, tensor)
        for mesh_axis in mesh.parallel_types():
            axis = draw(st.integers(-1, recorder.program.tensor(tensor).ndim - 1))
            if axis >= 0:
                _block(recorder, mesh, tensor, axis, mesh_axis)
    return recorder.program, mesh


def _grow(
    draw: st.DrawFn, recorder: Recorder, matrices: list[TensorName], vectors: list[TensorName]
) -> None:
    a, b = draw(st.sampled_from(matrices)), draw(st.sampled_from(matrices))
    v = draw(st.sampled_from(vectors))
    axis = draw(st.integers(0, 1))
    match draw(st.sampled_from("relu add row permute copy sum max linear bias matmul".split())):
        case "relu":
            matrices.append(recorder.pointwise("relu", a))
        case "add":
            matrices.append(recorder.pointwise("add", a, b))
        case "row":
            row = recorder.add(build.broadcast, v, [axis == 0, axis == 1])
            matrices.append(recorder.pointwise("sub", a, row))
        case "permute":
            matrices.append(recorder.add(build.permute, a, [1, 0]))
        case "copy":
            matrices.append(recorder.add(build.set_, a))
        case "sum" | "max" as function:
            vectors.append(recorder.add(build.reduction, function, a, [axis]))
        case "linear":
            matrices.append(recorder.add(build.linear, a, b))
        case "bias":
            matrices.append(recorder.add(build.linear, a, b, v))
        case _:
            matrices.append(recorder.add(build.matmul, a, b))


def _block(
    recorder: Recorder, mesh: DeviceMesh, tensor: TensorName, axis: int, mesh_axis: ParallelType
) -> None:
    """Cut the innermost leaf of a tensor axis."""
    logical = recorder.program.tensor(tensor).tensor_axes[axis].name
    schedule = recorder.program.schedule(tensor)
    for step in schedule.steps:
        if isinstance(step, Split) and step.source == logical:
            logical = step.inner
    recorder.block(mesh, tensor, schedule.leaves.index(logical), mesh_axis)


# Ranks.


def run_ranks(
    program: Program, mesh: DeviceMesh, inputs: Sequence[torch.Tensor]
) -> dict[int, Environment]:
    """Run a program that the passes have made on every rank of its mesh."""
    fusion = program.fusion
    dtypes: dict[TensorName | ScalarName, DataType] = {
        name: definition.dtype for name, definition in fusion.tensors.items()
    }
    shapes = {name: local_extents(program, name) for name in fusion.tensors}
    ranks: dict[int, Environment] = {}
    for rank in mesh.ids:
        parts = {
            name: part_of(whole, sharding_of(program, TensorName(name)), mesh, rank)
            for name, whole in zip(fusion.inputs, inputs, strict=True)
        }
        ranks[rank] = Environment(dtypes, shapes, {}, dict(parts))
    for expr in fusion.exprs:
        if isinstance(expr, Communication):
            communicate(expr, mesh, ranks)
        else:
            for env in ranks.values():
                run_expressions([expr], env)
    return ranks


def communicate(expr: Communication, mesh: DeviceMesh, ranks: dict[int, Environment]) -> None:
    for rank, env in ranks.items():
        assert isinstance(expr, AllGather | AllReduce | ReduceScatter | LocalSlice)
        team = mesh.team(rank, expr.mesh_axis)
        terms = [ranks[peer].tensor(expr.src) for peer in team]
        place = team.index(rank)
        match expr:
            case AllGather(axis=axis):
                result = torch.cat(terms, axis)
            case AllReduce(function=function):
                result = combined(function, terms)
            case ReduceScatter(axis=axis, function=function):
                result = combined(function, terms).chunk(len(team), axis)[place]
            case LocalSlice(axis=axis):
                result = terms[place].chunk(len(team), axis)[place]
        env.define(expr.out, result)


def combined(function: str, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(list(terms))
    return stacked.sum(0) if function == "sum" else stacked.amax(0)


def part_of(whole: torch.Tensor, sharding: Sharding, mesh: DeviceMesh, rank: int) -> torch.Tensor:
    """What `rank` holds: its coordinate picks mesh digits, local digits stay."""
    shape, index, local = list[int](), list[int | slice](), list[int]()
    for digits in sharding.axes:
        here = 1
        for digit in digits:
            size = const_value(digit.extent)
            assert size is not None
            coordinate = None if digit.owner is None else mesh.coordinate(rank, digit.owner)
            shape.append(size)
            index.append(slice(None) if coordinate is None else coordinate)
            here *= size if digit.owner is None else 1
        local.append(here)
    return whole.reshape(shape)[tuple(index)].reshape(local)


@given(annotated_programs(), st.integers(0, 1000))
def test_all_ranks_together_compute_the_program(
    built: tuple[Program, DeviceMesh], seed: int
) -> None:
    program, mesh = built
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randint(-2, 3, [SIZE] * program.tensor(TensorName(name)).ndim, generator=generator)
        for name in program.fusion.inputs
    ]
    wholes = [tensor.double() for tensor in inputs]
    expected = evaluate_program(program, wholes)
    passed, _ = run_passes(program)
    ranks = run_ranks(passed, mesh, wholes)
    for output, whole in zip(passed.fusion.outputs, expected, strict=True):
        sharding = sharding_of(passed, output.tensor)
        for rank, env in ranks.items():
            assert torch.equal(env.tensor(output.tensor), part_of(whole, sharding, mesh, rank))
