"""Programs for tests of whole stages, made by the building verbs, and their sharded inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshfuse.base.dtypes import DataType
from meshfuse.ir import build
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh, ParallelType, make_mesh
from meshfuse.ir.ops import Literal, Operand
from meshfuse.ir.program import Program
from meshfuse.ir.transforms import parallelize, set_device_mesh, split


def tensor_input(
    program: Program,
    shape: Sequence[int],
    dtype: DataType = DataType.Float,
    contiguity: bool = True,
) -> tuple[Program, TensorName]:
    program, name = build.define_tensor(program, shape, dtype, contiguity)
    return build.add_input(program, name), name


def pointwise(
    program: Program, function: str, *operands: Operand | float
) -> tuple[Program, TensorName]:
    """Python numbers become Double constants."""
    args = [Literal(x, DataType.Double) if isinstance(x, int | float) else x for x in operands]
    program, name = build.pointwise(program, function, args)
    return program, TensorName(name)


def block(program: Program, mesh: DeviceMesh, tensor: TensorName, axis: int) -> Program:
    """Shard loop axis `axis` in equal blocks over mesh_x."""
    program = set_device_mesh(program, tensor, mesh)
    program = split(program, tensor, axis, mesh.size, False)
    return parallelize(program, tensor, program.schedule(tensor).leaves[axis], ParallelType.mesh_x)


def softplus_rows() -> Program:
    """T0 [i0, i1] -> exp(T0) + 1, and its sums over rows."""
    program, x = tensor_input(Program(), [-1, -1], contiguity=False)
    program, e = pointwise(program, "exp", x)
    program, y = pointwise(program, "add", e, 1.0)
    program, total = build.reduction(program, "sum", y, [1])
    program = build.add_output(program, y)
    return build.add_output(program, total)


def layer_norm(
    program: Program, x: TensorName, weight: TensorName, bias: TensorName
) -> tuple[Program, TensorName]:
    program, variance, mean = build.var_mean(program, x, [-1], correction=0, keepdim=True)
    program, shifted = pointwise(program, "add", variance, 1e-5)
    program, scale = pointwise(program, "rsqrt", shifted)
    program, centred = pointwise(program, "sub", x, mean)
    program, normal = pointwise(program, "mul", centred, scale)
    program, weighted = pointwise(program, "mul", normal, weight)
    return pointwise(program, "add", weighted, bias)


def norm_linear() -> Program:
    """gelu(linear(layer_norm(x))) on one device."""
    program, x = tensor_input(Program(), [-1, -1, 16])
    program, weight = tensor_input(program, [16])
    program, bias = tensor_input(program, [16])
    program, up = tensor_input(program, [32, 16])
    program, normal = layer_norm(program, x, weight, bias)
    program, hidden = build.linear(program, normal, up)
    program, result = pointwise(program, "gelu", hidden)
    return build.add_output(program, result)


def in_place_update() -> Program:
    """T1 += T0, in place; 2 * T0 is returned."""
    program, x = tensor_input(Program(), [-1])
    program, total = tensor_input(program, [-1])
    program, updated = pointwise(program, "add", total, x)
    program, doubled = pointwise(program, "mul", x, 2.0)
    program = build.add_output(program, updated, alias=total)
    return build.add_output(program, doubled)


@dataclass(frozen=True)
class ShardedProgram:
    """A program on a mesh, whole inputs, and the tensor axis of each that mesh_x shards."""

    program: Program
    inputs: Sequence[torch.Tensor]
    axes: Sequence[int | None]
    mesh: DeviceMesh

    def shards(self, rank: int) -> list[torch.Tensor]:
        return [
            whole.clone() if axis is None else whole.chunk(self.mesh.size, axis)[rank].clone()
            for whole, axis in zip(self.inputs, self.axes, strict=True)
        ]


def sequence_parallel_mlp(ranks: int) -> ShardedProgram:
    """Gather tokens, linear, relu, linear, reduce-scatter, residual; small integers throughout."""
    mesh = make_mesh(range(ranks))
    program, x = tensor_input(Program(), [2, -1, 8])
    program, up = tensor_input(program, [4 * ranks, 8])
    program, down = tensor_input(program, [8, 4 * ranks])
    program, hidden = build.linear(program, x, up)
    program, active = pointwise(program, "relu", hidden)
    program, product = build.linear(program, active, down)
    program, result = pointwise(program, "add", product, x)
    program = build.add_output(program, result)
    for tensor, axis in ((x, 1), (up, 0), (down, 1), (product, 1)):
        program = block(program, mesh, tensor, axis)
    generator = torch.Generator().manual_seed(ranks)
    inputs = [
        torch.randint(-4, 5, shape, generator=generator).float()
        for shape in ((2, 3 * ranks, 8), (4 * ranks, 8), (8, 4 * ranks))
    ]
    return ShardedProgram(program, inputs, (1, 0, 1), mesh)
