"""torch.autocast around a call: a program says itself in which type it computes."""

from __future__ import annotations

import pytest
import torch

from host_loops import define, dense
from meshfuse import DistributedTensor, FusionDefinition
from meshfuse.multidevice import simulate
from sharded_runs import X, integers, mesh_of, placed_linear

ROWS, W = integers(6, 4), integers(3, 4)


def build(fd: FusionDefinition) -> None:
    x, w = dense(fd, 6, 4), dense(fd, 3, 4)
    fd.add_output(fd.ops.linear(x, w))


@pytest.mark.parametrize("options", [[], ["number_of_streams(2)"]])
def test_products_have_the_type_of_their_operands(options: list[str]) -> None:
    """Of 1.001 there is nothing in bfloat16; and the context is as it was behind the call."""
    fd, x = define(build), ROWS * 1.001
    [wanted] = fd.execute([x, W])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            [found] = fd.execute([x, W], _enable_options=options)
            assert torch.equal(found, wanted)
        assert (x @ W.T).dtype == torch.bfloat16


def test_on_ranks_of_a_simulation() -> None:
    mesh = mesh_of(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = simulate(placed_linear(mesh, (6, 4), (3, 4), ({0: X}, {}, {0: X})), [ROWS, W])
    for rank, [found] in enumerate(outputs):
        assert isinstance(found, DistributedTensor)
        assert found.local.dtype == torch.float32
        assert torch.equal(found.local, (ROWS @ W.T).chunk(2)[rank])
