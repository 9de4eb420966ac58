"""Predictions of forms of overlap against the plain one, and what they say about a race."""

from __future__ import annotations

import pytest
import torch

from meshfuse import DataType, FusionDefinition, ParallelType
from meshfuse.api.overlap_choice import LEAST_GAIN, reason_against_race
from meshfuse.facts.overlap_form import CANDIDATES, PLAIN, Overlap
from meshfuse.ir.parser import parse_program
from meshfuse.multidevice import H200_RATES, DeviceMesh, Timeline
from meshfuse.pipeline import outline_program

SIZE = 8192
GEMM = 2 * SIZE**3 / H200_RATES.contraction_flops_16bit
BLOCK = 2 * SIZE**2 / H200_RATES.link_bytes
"""Seconds for a whole matrix of bf16 over a link."""


def product(kind: str, ranks: int, size: int = SIZE) -> FusionDefinition:
    """Gathered rows by columns; or terms of which each rank wants the sum, or a block of it."""
    mesh = DeviceMesh(range(ranks))
    with FusionDefinition() as fd:
        x = fd.define_tensor([size, size], contiguity=True, dtype=DataType.BFloat16)
        w = fd.define_tensor([size, size], contiguity=True, dtype=DataType.BFloat16)
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        axes = {"gather": (0, 1, 1), "scatter": (1, 0, 0), "reduce": (1, 0, None)}[kind]
        for tensor, axis in zip((x, w, y), axes, strict=True):
            tensor.set_device_mesh(mesh)
            if axis is not None:
                tensor.outer_split(axis, ranks).axis(axis).parallelize(mesh.axis(0))
    return fd


def predict(kind: str, ranks: int, form: Overlap) -> Timeline:
    return product(kind, ranks).timeline(rates=H200_RATES, overlap=form)


KINDS = {"gather": 1, "scatter": 1, "reduce": 2}
"""And how often all blocks but its own come to a rank."""


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_form_takes_no_longer_than_all_in_a_row_and_no_less_than_the_bound(
    kind: str, ranks: int
) -> None:
    """Plain is the product, then the transfer: 2 * 8192^3 operations in all, and the matrix."""
    plain = predict(kind, ranks, PLAIN)
    transfer = KINDS[kind] * BLOCK * (ranks - 1) / ranks
    assert plain.seconds == pytest.approx(GEMM / ranks + transfer, rel=0.05)
    assert plain.hidden_fraction == 0.0
    for form in CANDIDATES:
        found = predict(kind, ranks, form)
        in_a_row = found.compute_seconds + found.communication_seconds
        assert found.bound_seconds <= found.seconds * 1.000001
        assert found.seconds <= in_a_row * 1.000001
        assert found.gemm_seconds >= plain.gemm_seconds * 0.999999
        assert found.seconds <= plain.seconds * 1.15, form  # many small transfers, each begun


def test_two_ranks_hide_a_transfer_behind_a_product() -> None:
    """Peers come close to the bound; the more chunks of a sum, the less of it is left over."""
    for kind in ("gather", "scatter"):
        plain, peers = (predict(kind, 2, form) for form in (PLAIN, Overlap.peers()))
        assert plain.bound_seconds <= peers.seconds < 1.1 * plain.bound_seconds
        assert peers.hidden_fraction == pytest.approx(1.0)
    times = [predict("reduce", 2, form).seconds for form in (PLAIN, *CANDIDATES[:3])]
    assert times == sorted(times, reverse=True)
    assert times[-1] < 0.7 * times[0]


def test_blocks_that_all_ranks_fetch_from_one_come_one_after_the_other() -> None:
    """Without swizzle1d the link of the rank that has the block carries it to all others."""

    def gathered(is_swizzled: bool) -> Timeline:
        mesh = DeviceMesh(range(4))
        with FusionDefinition() as fd:
            x, w = (fd.define_tensor([8192, 8192], contiguity=True) for _ in range(2))
            y = fd.ops.matmul(x, w)
            fd.add_output(y)
            for tensor in (x, w, y):
                tensor.set_device_mesh(mesh)
            x.outer_split(0, 4).axis(0).parallelize(mesh.axis(0))
            y.outer_split(0, 4)
            if is_swizzled:
                y.swizzle1d(0, mesh.axis(0))
            y.axis(0).parallelize(ParallelType.stream)
        return fd.timeline(rates=H200_RATES)

    swizzled, plain = gathered(True), gathered(False)
    begin = H200_RATES.communication  # of the others while the link is taken
    assert plain.communication_seconds - begin == pytest.approx(
        3 * (swizzled.communication_seconds - begin)
    )


@pytest.mark.parametrize(("size", "is_raced"), [(SIZE, True), (128, False)])
def test_what_is_worth_a_race(size: int, is_raced: bool) -> None:
    """What perfect overlap saves is what the gate asks for, and what peers are predicted to get."""
    fd = product("gather", 2, size)
    program = parse_program(repr(fd.fusion))
    reason = reason_against_race(outline_program(program, PLAIN), {}, torch.device("cuda"))
    assert (reason is None) is is_raced
    if is_raced:
        plain, peers = (predict("gather", 2, form) for form in (PLAIN, Overlap.peers()))
        assert 1 - peers.seconds / plain.seconds > LEAST_GAIN
