"""Triangle updates of pairs of residues, as AlphaFold has them, on meshes of three axes.

    outgoing: o[i, j] = sum over k of a[i, k] b[j, k]      incoming: sum over k of a[k, i] b[k, j]

Pairs lie in blocks over y and x, batches or channels over z. Values are checked on every rank, and
sizes of the mesh axes differ, so that a wrong axis shows.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch.nn import functional

from meshfuse import FusionDefinition, TensorView
from sharded_runs import Cuts, Posted, X, Y, Z, mesh_of, place, posted, run, without_kernels

EPSILON = 1e-5
WEIGHTS = ("gate_a", "value_a", "gate_b", "value_b")


@dataclass(frozen=True)
class Update:
    """Of pairs [b, n, n, c], with `hidden` channels in between. `over_z` names what z cuts."""

    mesh: tuple[int, int, int]
    direction: Literal["outgoing", "incoming"]
    over_z: Literal["batch", "channels"]
    batch: int = 4
    residues: int = 6
    channels: int = 5
    hidden: int = 4

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.mesh))
        return f"{sizes}-{self.direction}-{self.over_z}-n{self.residues}"

    @property
    def cuts(self) -> Cuts:
        """Of the pairs."""
        return {1: Y, 2: X} | ({0: Z} if self.over_z == "batch" else {})

    def define(self) -> FusionDefinition:
        """Inputs: the pairs, WEIGHTS [h, c], the weight of the result [c, h]."""
        b, n, c, h = self.batch, self.residues, self.channels, self.hidden
        mesh, over = mesh_of(*self.mesh), Z if self.over_z == "channels" else None
        with FusionDefinition() as fd:
            pairs = fd.define_tensor([b, n, n, c], contiguity=True)
            weights = [fd.define_tensor([h, c], contiguity=True) for _ in WEIGHTS]
            out_weight = fd.define_tensor([c, h], contiguity=True)
            place(mesh, self.cuts, pairs)
            place(mesh, {0: over} if over else {}, *weights)
            place(mesh, {1: over} if over else {}, out_weight)
            normal = norm(fd, pairs)
            gate_a, value_a, gate_b, value_b = (fd.ops.linear(normal, w) for w in weights)
            a = fd.ops.sigmoid(gate_a) * value_a
            b_ = fd.ops.sigmoid(gate_b) * value_b
            product = self.product(fd, a, b_)
            fd.add_output(product)
            result = fd.ops.linear(norm(fd, product), out_weight)
            place(mesh, self.cuts, result)
            fd.add_output(result)
        return fd

    def product(self, fd: FusionDefinition, a: TensorView, b: TensorView) -> TensorView:
        """[b, i, j, h], of channels in front: rows of one times columns of the other."""
        rows, columns = ([0, 3, 1, 2], [0, 3, 2, 1])
        if self.direction == "incoming":
            rows, columns = columns, rows
        made = fd.ops.matmul(fd.ops.permute(a, rows), fd.ops.permute(b, columns))
        product = fd.ops.permute(made, [0, 2, 3, 1])
        place(mesh_of(*self.mesh), {1: Y, 2: X, 3 if self.over_z == "channels" else 0: Z}, product)
        return product

    def inputs(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        b, n, c, h = self.batch, self.residues, self.channels, self.hidden
        shapes = [(b, n, n, c), *[(h, c)] * 4, (c, h)]
        return [torch.randn(shape, generator=generator) for shape in shapes]

    def wanted(self) -> list[torch.Tensor]:
        pairs, *weights, out_weight = (x.double() for x in self.inputs())
        normal = functional.layer_norm(pairs, pairs.shape[-1:], eps=EPSILON)
        gate_a, value_a, gate_b, value_b = (functional.linear(normal, w) for w in weights)
        a, b = gate_a.sigmoid() * value_a, gate_b.sigmoid() * value_b
        what = "bikc,bjkc->bijc" if self.direction == "outgoing" else "bkic,bkjc->bijc"
        product = torch.einsum(what, a, b)
        result = functional.linear(
            functional.layer_norm(product, product.shape[-1:], eps=EPSILON), out_weight
        )
        return [product.float(), result.float()]

    # What has to move.

    @property
    def rows(self) -> int:
        """Pairs of a rank, each with its channels."""
        z, y, x = self.mesh
        return self.batch // (z if self.over_z == "batch" else 1) * self.residues**2 // (y * x)

    def over_the_plane(self) -> list[Posted]:
        """The operand that lacks an axis of the result is gathered along it.

        Terms of the sum over k, which lies where the other axis of the result is to be, are
        scattered there.
        """
        _, y, x = self.mesh
        gathered, summed = ((Y, y), (X, x)) if self.direction == "outgoing" else ((X, x), (Y, y))
        hidden = self.hidden // (self.mesh[0] if self.over_z == "channels" else 1)
        part = 4 * self.rows * hidden
        gather = [("all_gather", gathered[0], part)] if gathered[1] > 1 else []
        scatter = [("reduce_scatter", summed[0], part * summed[1])] if summed[1] > 1 else []
        return [*gather, *scatter]

    def check_moved(self, moved: list[Posted]) -> None:
        """With channels over z also moments of rows, 8 bytes at most, and the sum of the result."""
        assert [step for step in moved if step[1] in (X, Y)] == self.over_the_plane()
        along_z = [step for step in moved if step[1] not in (X, Y)]
        if self.over_z == "batch":
            assert along_z == []
            return
        assert along_z.pop() == ("all_reduce", Z, 4 * self.rows * self.channels)
        assert {kind for kind, _, _ in along_z} == {"all_gather"}
        assert all(axis == Z and size <= 8 * self.rows for _, axis, size in along_z)


def norm(fd: FusionDefinition, x: TensorView) -> TensorView:
    variance, mean = fd.ops.var_mean(x, dims=[3], correction=0, keepdim=True)
    return (x - mean) * fd.ops.rsqrt(variance + EPSILON)


UPDATES = [
    Update(mesh, direction, over_z)
    for mesh in ((2, 2, 2), (2, 3, 1), (2, 1, 3))
    for direction in ("outgoing", "incoming")
    for over_z in ("batch", "channels")
]


@pytest.mark.parametrize("update", UPDATES, ids=str)
def test_triangle_update(update: Update) -> None:
    fd = update.define()
    with nullcontext() if update in (UPDATES[0], UPDATES[3]) else without_kernels():
        run(fd, update.inputs(), update.wanted(), rtol=1e-4, atol=1e-4)
    update.check_moved(posted(fd))


@pytest.mark.parametrize(
    "update",
    [
        Update((2, 2, 2), "outgoing", "batch", batch=3, residues=5),
        Update((2, 3, 2), "incoming", "batch", batch=3, residues=5),
        Update((2, 2, 2), "incoming", "channels", batch=1, residues=5, hidden=5),
        Update((2, 2, 3), "outgoing", "channels", batch=1, residues=7, hidden=3),
    ],
    ids=str,
)
def test_sizes_that_ranks_do_not_divide(update: Update) -> None:
    with without_kernels():
        run(update.define(), update.inputs(), update.wanted(), rtol=1e-4, atol=1e-4)
