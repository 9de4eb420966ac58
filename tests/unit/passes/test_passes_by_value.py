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
from meshfuse.facts.holdings import coordinate_symbol, held
from meshfuse.facts.sharding import Sharding, rank_extents, sharding_of
from meshfuse.ir import build
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.comm import Communication, LocalSlice
from meshfuse.ir.mesh import DeviceMesh, ParallelType, make_mesh
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Split
from meshfuse.passes.pipeline import run_passes
from meshfuse.runtime.evaluate_ops import Environment, evaluate_program, run_expressions
from program_recorder import Recorder

SIZE = 8
MESHES = (
    make_mesh([0]),
    make_mesh([1, 0]),
    make_mesh([2, 0, 1]),
    make_mesh([[0, 1], [2, 3]]),
    make_mesh([[0, 2]]),
    make_mesh([[0, 1, 2], [3, 4, 5]]),
)


# Programs.


@st.composite
def annotated_programs(draw: st.DrawFn) -> tuple[Program, DeviceMesh]:
    """A few operations on tensors of size 8 per axis, some of them sharded, evenly or not."""
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
    shapes = {name: rank_extents(program, name) for name in fusion.tensors}
    ranks: dict[int, Environment] = {}
    for rank in mesh.ids:
        parts = {
            name: part_of(whole, sharding_of(program, TensorName(name)), rank)
            for name, whole in zip(fusion.inputs, inputs, strict=True)
        }
        sizes = {
            coordinate_symbol(mesh, owner).name: place
            for owner, place in coordinates(mesh, rank).items()
        }
        ranks[rank] = Environment(dtypes, shapes, sizes, dict(parts))
    for expr in fusion.exprs:
        if isinstance(expr, Communication):
            communicate(program, expr, ranks)
        else:
            for env in ranks.values():
                run_expressions([expr], env)
    return ranks


def communicate(program: Program, expr: Communication, ranks: dict[int, Environment]) -> None:
    """By what the shardings say: the terms of each whole put together, reduced, and cut again."""
    have, want = sharding_of(program, expr.src), sharding_of(program, expr.out)
    assert have.mesh is not None
    assert not isinstance(expr, LocalSlice) or not set(want.partial) - set(have.partial)
    sizes = [const_value(axis.extent) or 0 for axis in program.tensor(expr.src).tensor_axes]
    for rank, env in ranks.items():
        terms: dict[tuple[int, ...], torch.Tensor] = {}
        mine = coordinates(have.mesh, rank)
        for peer in have.mesh.ids:
            theirs = coordinates(have.mesh, peer)
            if any(mine[owner] != theirs[owner] for owner in want.partial):
                continue
            term = tuple(theirs[owner] for owner in have.partial)
            whole = terms.setdefault(term, torch.zeros(sizes, dtype=torch.float64))
            put_part(whole, have, peer, ranks[peer].tensor(expr.src))
        functions = set(have.partial.values())
        value = combined("".join(functions) or "sum", list(terms.values()))
        env.define(expr.out, part_of(value, want, rank))


def combined(function: str, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(list(terms))
    return stacked.sum(0) if function == "sum" else stacked.amax(0)


def coordinates(mesh: DeviceMesh, rank: int) -> dict[ParallelType, int]:
    return {owner: mesh.coordinate(rank, owner) or 0 for owner in mesh.parallel_types()}


def indices(sharding: Sharding, sizes: Sequence[int], rank: int) -> tuple[torch.Tensor, ...]:
    """What `rank` holds of each axis, to index a whole tensor with."""
    assert sharding.mesh is not None
    places = coordinates(sharding.mesh, rank)
    runs = [held(d, size, places) for d, size in zip(sharding.axes, sizes, strict=True)]
    lists = [torch.tensor([k for run in axis for k in run], dtype=torch.long) for axis in runs]
    return torch.meshgrid(*lists, indexing="ij") if lists else ()


def part_of(whole: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    return whole if sharding.mesh is None else whole[indices(sharding, whole.shape, rank)]


def put_part(whole: torch.Tensor, sharding: Sharding, rank: int, part: torch.Tensor) -> None:
    whole[indices(sharding, whole.shape, rank)] = part


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
            assert torch.equal(env.tensor(output.tensor), part_of(whole, sharding, rank))
