"""Ranks draw one mask together, and say so where their generators differ."""

from __future__ import annotations

import torch

from gloo_run import run_ranks
from meshfuse import FusionDefinition
from meshfuse.multidevice import DeviceMesh


def masks_of(rank: int, world_size: int) -> list[list[float] | str]:
    """What a rank draws with one seed, twice; then the error for two seeds; then with one again."""
    mesh = DeviceMesh(range(world_size))
    with FusionDefinition() as fd:
        x = fd.define_tensor([9, 3], contiguity=True)
        fd.add_output(fd.ops.mul(x, fd.ops.rand_like(x)))
        x.set_device_mesh(mesh)
        x.outer_split(0, world_size)
        x.axis(0).parallelize(mesh.axis(0))
    shard = torch.ones(9, 3).chunk(world_size)[rank]
    found: list[list[float] | str] = []
    torch.manual_seed(5)
    for _ in range(2):
        found.append(fd.execute([shard])[0].flatten().tolist())
    torch.manual_seed(5 + rank)
    try:
        fd.execute([shard])
    except RuntimeError as error:
        found.append(str(error))
    torch.manual_seed(5)
    found.append(fd.execute([shard])[0].flatten().tolist())
    return found


def test_ranks_draw_together_or_not_at_all() -> None:
    results = run_ranks(masks_of, 3)
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.uniform(0.0, 1.0, [9, 3]))
    torch.manual_seed(5)
    wanted = [fd.execute([], device="cpu")[0].flatten().tolist() for _ in range(2)]
    for place, want in ((0, wanted[0]), (1, wanted[1]), (3, wanted[0])):
        assert [number for found in results for number in found[place]] == want
    for found in results:
        message = found[2]
        assert isinstance(message, str)
        assert "ranks 0 and 1 would draw different random numbers: seed 5 at 0" in message
        assert "and seed 6 at 0" in message
        assert "torch.manual_seed" in message
