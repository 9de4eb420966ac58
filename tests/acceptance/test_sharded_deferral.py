"""Reductions across ranks that wait for what is linear: fewer bytes, the same values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn import functional

from meshfuse import FusionDefinition, TensorView
from meshfuse.multidevice import DeviceMesh, simulate
from sharded_cases import block, integers

Build = Callable[[FusionDefinition, TensorView, TensorView], TensorView]
Torch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What is made of two row-parallel products of shape [6, 4], and how many elements are reduced.

    `scatter`: the axis on which the products and the result are sharded.
    """

    name: str
    build: Build
    meaning: Torch
    reduced: int
    scatter: int | None = None
    collectives: list[str] = field(default_factory=lambda: ["all_reduce"])


CASES = [
    Case("add", lambda fd, a, b: fd.ops.add(a, b), torch.add, 24),
    Case("sub_neg", lambda fd, a, b: fd.ops.sub(a, fd.ops.neg(b)), lambda a, b: a + b, 24),
    Case("scaled", lambda fd, a, b: a * 3.0 + b * 2.0, lambda a, b: a * 3 + b * 2, 24),
    Case(
        "sum",
        lambda fd, a, b: fd.ops.sum(fd.ops.permute(a + b, [1, 0]), [1]),
        lambda a, b: (a + b).sum(0),
        4,
    ),
    Case(
        "sum_keepdim",
        lambda fd, a, b: fd.ops.sum(a - b, [1], keepdim=True) * 2.0,
        lambda a, b: (a - b).sum(1, keepdim=True) * 2,
        6,
    ),
    Case(
        "slice",
        lambda fd, a, b: fd.ops.slice(a + b, [1, 0], [3, 4]),
        lambda a, b: (a + b)[1:3],
        8,
    ),
    Case(
        "both_sums", lambda fd, a, b: fd.ops.sum(a) + fd.ops.sum(b), lambda a, b: (a + b).sum(), 1
    ),
    Case(
        "scatter",
        lambda fd, a, b: a - b,
        torch.sub,
        24,
        scatter=0,
        collectives=["reduce_scatter"],
    ),
]


RUNS = [
    pytest.param(case, d, id=f"{case.name}-{d}")
    for case in CASES
    for d in ((1, 2, 3, 4, 8) if case.name in ("sum", "scatter") else (2, 3))
]


@pytest.mark.parametrize(("case", "d"), RUNS)
def test_one_reduction_by_value(case: Case, d: int) -> None:
    mesh = DeviceMesh(range(d))
    rows = 6 * d if case.scatter is not None else 6
    fd = FusionDefinition()
    with fd:
        products: list[TensorView] = []
        for _ in range(2):
            x = fd.define_tensor([rows, d * 2], contiguity=True)
            weight = fd.define_tensor([4, d * 2], contiguity=True)
            products.append(fd.ops.linear(x, weight))
            block(mesh, x, 1)
            block(mesh, weight, 1)
        result = case.build(fd, *products)
        fd.add_output(result)
        if case.scatter is not None:
            for tensor in (*products, result):
                block(mesh, tensor, case.scatter)
    data = [integers(rows, d * 2), integers(4, d * 2), integers(rows, d * 2), integers(4, d * 2)]
    data[2] = data[2].flip(0)
    want = case.meaning(functional.linear(data[0], data[1]), functional.linear(data[2], data[3]))
    for rank, (output,) in enumerate(simulate(fd, data)):
        part = want if case.scatter is None else want.chunk(d, case.scatter)[rank]
        assert torch.equal(output.as_subclass(torch.Tensor), part)
    steps = fd.fec.communications()
    assert [step.collective.value for step in steps] == (case.collectives if d > 1 else [])
    assert all(str(step.bytes) == str(4 * case.reduced * rows // 6) for step in steps)
