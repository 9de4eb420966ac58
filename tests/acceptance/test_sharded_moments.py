"""Statistics over an axis that ranks share: only moments move, whatever each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from meshfuse import DataType, DistributedTensor, FusionDefinition, ParallelType, TensorView
from meshfuse.multidevice import DeviceMesh, simulate

X, Y, Z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z


@dataclass(frozen=True)
class Cut:
    """A mesh, and the mesh axes that cut the features, first to last; the rest of it is idle."""

    shape: tuple[int, ...]
    owners: tuple[ParallelType, ...] = (X,)

    @property
    def mesh(self) -> DeviceMesh:
        count = torch.Size(self.shape).numel()
        return DeviceMesh(torch.arange(count).reshape(self.shape))

    def ranks(self, owner: ParallelType) -> int:
        return self.shape[-1 - (X, Y, Z).index(owner)]

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What `rank` holds of [rows, features]: features k with k // block the rank's number."""
        place = torch.unravel_index(torch.tensor(rank), self.shape)
        number, parts = 0, 1
        for owner in self.owners:
            ranks = self.ranks(owner)
            number = number * ranks + int(place[-1 - (X, Y, Z).index(owner)])
            parts *= ranks
        block = -(-whole.shape[1] // parts)
        return whole[:, number * block : (number + 1) * block]

    def apply(self, tensor: TensorView, axis: int) -> None:
        tensor.set_device_mesh(self.mesh)
        for owner in self.owners:
            tensor.outer_split(axis, self.ranks(owner))
            tensor.axis(axis).parallelize(owner)
            axis += 1


LINES = [Cut((d,)) for d in (1, 2, 3, 4, 8)]
CUTS = [
    *LINES,
    Cut((2, 2)),
    Cut((2, 2), (Y, X)),
    Cut((2, 3), (X, Y)),
    Cut((2, 2, 2), (Z, X)),
    Cut((2, 2, 2), (Z, Y, X)),
]


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) + 3.0


def everywhere(
    fd: FusionDefinition, inputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    """Every rank has all of each output."""
    for outputs in simulate(fd, inputs):
        assert len(outputs) == len(expected)
        for output, whole in zip(outputs, expected, strict=True):
            assert isinstance(output, DistributedTensor)
            torch.testing.assert_close(output.local, whole, rtol=1e-5, atol=1e-5)


def posted(fd: FusionDefinition) -> list[str]:
    return [step.collective.value for step in fd.fec.communications()]


@pytest.mark.parametrize("features", [24, 17, 5], ids=["even", "uneven", "some_empty"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_three_results_of_welford(cut: Cut, features: int) -> None:
    data = values(3, features)
    fd = FusionDefinition()
    with fd:
        x = fd.define_tensor([3, features], contiguity=True)
        for result in fd.ops.welford(x, [1]):
            fd.add_output(result)
        cut.apply(x, 1)
    mean = data.mean(1)
    m2 = (data - mean[:, None]).square().sum(1)
    everywhere(fd, [data], [mean, m2, torch.full((3,), features)])
    gathers = sum(cut.ranks(owner) > 1 for owner in cut.owners)
    moved = 2 if features == 24 else 3  # where parts are even no rank needs to tell its count
    assert posted(fd) == ["all_gather"] * moved * gathers


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize(("rows", "size"), [(-1, 24), (13, 13)], ids=["symbolic", "uneven"])
@pytest.mark.parametrize("cut", LINES, ids=str)
def test_variance_and_mean(cut: Cut, rows: int, size: int, correction: int, keepdim: bool) -> None:
    data = values(5, size, 4)
    fd = FusionDefinition()
    with fd:
        x = fd.define_tensor([5, rows, 4], contiguity=True)
        for result in fd.ops.var_mean(x, [1, 2], correction=correction, keepdim=keepdim):
            fd.add_output(result)
        cut.apply(x, 1)
    everywhere(fd, [data], torch.var_mean(data, (1, 2), correction=correction, keepdim=keepdim))


@pytest.mark.parametrize("dtype", [DataType.Float, DataType.BFloat16])
@pytest.mark.parametrize("features", [24, 10])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_layer_norm_of_sharded_features(cut: Cut, features: int, dtype: DataType) -> None:
    torch_dtype = torch.float32 if dtype is DataType.Float else torch.bfloat16
    data = values(4, features).to(torch_dtype)
    fd = FusionDefinition()
    with fd:
        x = fd.define_tensor([-1, features], dtype=dtype, contiguity=True)
        wide = fd.ops.cast(x, DataType.Float)
        variance, mean = fd.ops.var_mean(wide, [1], correction=0, keepdim=True)
        y = (wide - mean) * fd.ops.rsqrt(variance + 1e-5)
        fd.add_output(fd.ops.cast(y, dtype))
        cut.apply(x, 1)
    want = torch.nn.functional.layer_norm(data.float(), [features]).to(torch_dtype)
    tolerance = 1e-5 if dtype is DataType.Float else 1e-2
    for rank, (result,) in enumerate(simulate(fd, [data])):
        assert isinstance(result, DistributedTensor)
        part = cut.part(want, rank)
        torch.testing.assert_close(result.local, part, rtol=tolerance, atol=tolerance)
    assert set(posted(fd)) <= {"all_gather"}
    assert all("T0" not in step.src for step in fd.fec.communications())


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_statistics_of_nothing(cut: Cut) -> None:
    """As on one device: NaN for mean and variance, whichever rank holds nothing of it."""
    fd = FusionDefinition()
    with fd:
        x = fd.define_tensor([3, -1], contiguity=True)
        for result in (*fd.ops.var_mean(x, [1]), *fd.ops.welford(x, [1])):
            fd.add_output(result)
        cut.apply(x, 1)
    undefined = torch.full((3,), torch.nan)
    expected = [undefined, undefined, undefined, torch.zeros(3), torch.zeros(3, dtype=torch.int64)]
    for outputs in simulate(fd, [torch.ones(3, 0)]):
        for output, whole in zip(outputs, expected, strict=True):
            assert isinstance(output, DistributedTensor)
            torch.testing.assert_close(output.local, whole, equal_nan=True)
