"""Collectives of unequal blocks: padding lies behind what is sent and received: nobody copies."""

from __future__ import annotations

import pytest
import torch

from meshfuse import FusionDefinition, ParallelType
from meshfuse.host.load import load
from meshfuse.multidevice import DeviceMesh, simulate
from sharded_runs import integers, run

X = ParallelType.mesh_x


def linear(d: int, m: int, k: int, n: int, axes: tuple[int, int, int]) -> FusionDefinition:
    """x [m, k] by w [n, k], both and the result in blocks along these axes."""
    mesh = DeviceMesh(range(d))
    with FusionDefinition() as fd:
        x = fd.define_tensor([m, k], contiguity=True)
        w = fd.define_tensor([n, k], contiguity=True)
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        for tensor, axis in zip((x, w, y), axes, strict=True):
            tensor.set_device_mesh(mesh)
            loops = [k for k, a in enumerate(tensor.get_loop_domain()) if not a.is_reduction()]
            tensor.outer_split(loops[axis], d)
            tensor.axis(loops[axis]).parallelize(X)
    return fd


GATHER, SCATTER = (0, 0, 1), (1, 1, 0)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("axes", [GATHER, SCATTER], ids=["gather", "scatter"])
def test_unequal_blocks_are_exact(d: int, axes: tuple[int, int, int]) -> None:
    for m, n in ((7, 5), (8, 9), (3, 16), (1, 8), (17, 4), (0, 3)):
        x, w = integers(m, 8), integers(n, 8)
        run(linear(d, m, 8, n, axes), [x, w], [x @ w.T])


def allocated(d: int, m: int, axes: tuple[int, int, int], rank: int) -> list[int]:
    """Elements of the memory of what `rank` gathers, or of the terms that it sends."""
    fd = linear(d, m, 8, 4 * d, axes)
    simulate(fd, [integers(m, 8), integers(4 * d, 8)])
    executable = load(fd.fec.host_program(), {}, None, rank, torch.device("cpu"))
    rows = -(-m // d)
    own = max(0, min(rows, m - rank * rows))
    shapes = ((own, 8), (4, 8)) if axes == GATHER else ((m, 8 // d), (4 * d, 8 // d))
    plan, slots = executable.start([torch.zeros(shape) for shape in shapes])
    found: list[int] = []
    for bound in plan.bound:
        if bound.tells is None and bound.asks is None:
            bound.action(slots)
        tensors = [value for value in slots[2:] if isinstance(value, torch.Tensor)]
        found += [t.untyped_storage().nbytes() // 4 for t in tensors]
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_goes_on_for_the_padding(rank: int) -> None:
    assert 8 * 8 in allocated(2, 7, GATHER, rank)  # of 7 x 8 that are gathered
    assert 8 * 8 in allocated(2, 7, SCATTER, rank)  # of 7 x 8 that are terms
    assert 4 * 8 in allocated(2, 7, SCATTER, rank)  # of 4 x 8 or 3 x 8 that are the result
    assert 8 * 8 in allocated(2, 8, GATHER, rank)
