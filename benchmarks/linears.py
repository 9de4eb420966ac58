"""A linear with a collective before or behind it: as a meshfuse program, in torch, and in float32.

AG+GEMM   x and w [n, k] have rows in blocks: x is gathered, the result has columns in blocks
GEMM+RS   x and w have k in blocks: each rank's product is a term, the sum has rows in blocks
GEMM+AR   the same, all ranks have the sum
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from ranks import Job

from meshfuse import DataType, FusionDefinition, ParallelType, TensorView
from meshfuse.multidevice import DeviceMesh

AG, RS, AR = "AG+GEMM", "GEMM+RS", "GEMM+AR"
KINDS = (AG, RS, AR)
TYPES = {torch.bfloat16: DataType.BFloat16, torch.float32: DataType.Float}
CACHE_BYTES = 3 * 60 * 2**20
"""Inputs that take turns are together this large: three times the L2 of an H200."""


@dataclass(frozen=True)
class Problem:
    """[m, k] times [n, k] transposed, all global sizes, over `ranks`."""

    kind: str
    m: int
    k: int
    n: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.kind} {self.m} x {self.k}, {self.n}"

    def x_shape(self, rank: int) -> tuple[int, int]:
        """What a rank has of x."""
        if self.kind == AG:
            return part(self.m, self.ranks, rank), self.k
        return self.m, part(self.k, self.ranks, rank)

    def w_shape(self, rank: int) -> tuple[int, int]:
        if self.kind == AG:
            return part(self.n, self.ranks, rank), self.k
        return self.n, part(self.k, self.ranks, rank)

    @property
    def operations(self) -> int:
        """Multiplications and additions of one rank."""
        return 2 * self.m * self.k * self.n // self.ranks


def block(extent: int, ranks: int) -> int:
    """The longest part of `extent`."""
    return -(-extent // ranks)


def part(extent: int, ranks: int, rank: int) -> int:
    """What `rank` has of `extent`: all parts are equal but the last ones, which may be shorter."""
    length = block(extent, ranks)
    return max(0, min(length, extent - rank * length))


def define(problem: Problem, dtype: torch.dtype = torch.bfloat16) -> FusionDefinition:
    """x, w -> x @ w.T, on global shapes."""
    mesh = DeviceMesh(range(problem.ranks))
    with FusionDefinition() as fd:
        x, w = (
            fd.define_tensor(list(shape), contiguity=True, dtype=TYPES[dtype])
            for shape in ((problem.m, problem.k), (problem.n, problem.k))
        )
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        axes = {AG: (0, 0, 1), RS: (1, 1, 0), AR: (1, 1, None)}[problem.kind]
        for tensor, axis in zip((x, w, y), axes, strict=True):
            place(mesh, tensor, axis)
    return fd


def place(mesh: DeviceMesh, tensor: TensorView, axis: int | None) -> None:
    """On the mesh, with `axis` in blocks."""
    tensor.set_device_mesh(mesh)
    if axis is None:
        return
    loops = tensor.get_loop_domain()
    kept = [at for at, own in enumerate(loops) if not own.is_reduction()]
    tensor.outer_split(kept[axis], mesh.size)
    tensor.axis(kept[axis]).parallelize(ParallelType.mesh_x)


@dataclass(frozen=True)
class Operands:
    """One rank's shards."""

    x: torch.Tensor
    w: torch.Tensor

    @property
    def bytes(self) -> int:
        return self.x.nbytes + self.w.nbytes


def random_operands(
    problem: Problem, job: Job, seed: int, dtype: torch.dtype = torch.bfloat16
) -> Operands:
    """Normal numbers, other ones on each rank; results are of size 1."""
    generator = torch.Generator(job.device).manual_seed(1000 * seed + job.rank)
    x, w = (
        torch.randn(shape, generator=generator, device=job.device, dtype=dtype)
        for shape in (problem.x_shape(job.rank), problem.w_shape(job.rank))
    )
    return Operands(x, w.div_(math.sqrt(problem.k)))


def rotated_operands(problem: Problem, job: Job) -> list[Operands]:
    """Sets of operands to take turns, as many as the cache cannot hold."""
    first = random_operands(problem, job, 0)
    count = job.first(max(2, min(16, -(-CACHE_BYTES // max(1, first.bytes)))))
    if not job.is_cuda:
        count = 2
    return [first, *(random_operands(problem, job, seed) for seed in range(1, count))]


def by_float32(problem: Problem, operands: Operands) -> torch.Tensor:
    """What this rank should get, computed in float32."""
    if problem.kind == AG:
        return gather_rows(problem, operands.x).float() @ operands.w.float().T
    total = operands.x.float() @ operands.w.float().T
    dist.all_reduce(total)
    if problem.kind == AR:
        return total
    length, rank = block(problem.m, problem.ranks), dist.get_rank()
    return total[rank * length : rank * length + part(problem.m, problem.ranks, rank)].clone()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference by the norm of what is wanted; infinite for another shape, or NaN."""
    if found.shape != wanted.shape:
        return math.inf
    error = (found.float() - wanted).norm() / wanted.norm().clamp_min(1e-30)
    value = error.item() if wanted.numel() else 0.0
    return math.inf if math.isnan(value) else value


# In torch, as anybody would write it: a collective of the backend, and a product.


def gather_rows(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """All rows, of blocks that may be uneven."""
    length = block(problem.m, problem.ranks)
    if x.shape[0] < length:
        x = torch.cat((x, x.new_zeros(length - x.shape[0], x.shape[1])))
    rows = x.new_empty(problem.ranks * length, x.shape[1])
    dist.all_gather_into_tensor(rows, x)
    return rows[: problem.m]


def all_gather_then_linear(problem: Problem, operands: Operands) -> torch.Tensor:
    return gather_rows(problem, operands.x) @ operands.w.T


def linear_then_reduce_scatter(problem: Problem, operands: Operands) -> torch.Tensor:
    length = block(problem.m, problem.ranks)
    terms = operands.x.new_empty(problem.ranks * length, problem.n)
    torch.matmul(operands.x, operands.w.T, out=terms[: problem.m])
    own = terms.new_empty(length, problem.n)
    dist.reduce_scatter_tensor(own, terms)
    return own[: part(problem.m, problem.ranks, dist.get_rank())]


def linear_then_all_reduce(problem: Problem, operands: Operands) -> torch.Tensor:
    total = operands.x @ operands.w.T
    dist.all_reduce(total)
    return total


BARE: dict[str, Callable[[Problem, Operands], torch.Tensor]] = {
    AG: all_gather_then_linear,
    RS: linear_then_reduce_scatter,
    AR: linear_then_all_reduce,
}
