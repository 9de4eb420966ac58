"""Predictions: lanes, waits and work, by numbers found by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from meshfuse.base.dtypes import DataType
from meshfuse.expr import const
from meshfuse.host.device_rates import H200_RATES, DeviceRates
from meshfuse.host.expression_work import ExpressionWork, LocalTensor, work_of
from meshfuse.host.parser import parse_host_program
from meshfuse.host.prediction import Transmission, predict_items
from meshfuse.host.timeline import Item, Lane
from meshfuse.ir.axes import TensorName
from meshfuse.ir.ops import Expr, Linear, Literal, MatMul
from meshfuse.ir.ops_attention import SdpfaBwd, SdpfaFwd
from meshfuse.ir.ops_indexing import IndexSelect

RATES = DeviceRates(
    name="slow",
    contraction_flops=1.0,
    contraction_flops_16bit=2.0,
    other_flops=4.0,
    memory_bytes=8.0,
    link_bytes=1.0,
    launch=1.0,
    operation=1.0,
    communication=1.0,
)

TWO_GATHERS = """\
host() {
  input(T0)
  output(T3)
  output(T4)
  T0 = buffer(f32, [2], mesh=DeviceMesh{0 1}, digits=[[mesh_x{2}, 2]], whole=[4])
  T1 = buffer(f32, [4], mesh=DeviceMesh{0 1})
  T2 = buffer(f32, [4], mesh=DeviceMesh{0 1})
  T3 = buffer(f32, [4], mesh=DeviceMesh{0 1})
  T4 = buffer(f32, [4], mesh=DeviceMesh{0 1})
  T5 = buffer(f32, [2], mesh=DeviceMesh{0 1}, digits=[[mesh_x{2}, 2]], whole=[4])
  T6 = buffer(f32, [2, 1], mesh=DeviceMesh{0 1}, digits=[[mesh_x{2}, 2], [1]], whole=[4, 1])
  T1 = allocate(global, 16)
  T1 = communicate(all_gather, T0, 0, DeviceMesh{0 1}, mesh_x, 8, "first")
  T2 = allocate(global, 16)
  T2 = communicate(all_gather, T0, 1, DeviceMesh{0 1}, mesh_x, 8, "second")
  evaluate() {
    T5 = neg(T0)
  }
  evaluate() {
    T6 = broadcast(T5, [false, true])
  }
  wait(0)
  evaluate() {
    T3 = neg(T1)
  }
  wait(1)
  evaluate() {
    T4 = neg(T2)
  }
}"""


def spans(items: tuple[Item, ...], lane: Lane) -> list[tuple[str, float, float]]:
    return [(i.label.name, i.start, i.end) for i in items if i.lane is lane]


def test_lanes_run_beside_each_other_and_waits_hold_up_one() -> None:
    """A neg of [2] reads and writes 16 bytes, in 2 s behind 1 s; of [4] twice that. Views are free.

    The second gather begins when the first is over, for which the rank waits 1 s, for itself 3.
    """
    program = parse_host_program(TWO_GATHERS)
    sent = {0: [Transmission(8, 4.0)], 1: [Transmission(8, 8.0)]}
    items = predict_items(program, {}, {}, 0, RATES, sent)
    assert spans(items, Lane.communication) == [
        ("all_gather T1", 0.0, 4.0),
        ("all_gather T2", 4.0, 12.0),
    ]
    assert spans(items, Lane.compute) == [
        ("neg T5", 0.0, 3.0),
        ("wait for all_gather T1", 3.0, 4.0),
        ("neg T3", 4.0, 9.0),
        ("wait for all_gather T2", 9.0, 12.0),
        ("neg T4", 12.0, 17.0),
    ]
    assert [item.label.cause for item in items if item.lane is Lane.communication] == [
        "first",
        "second",
    ]


def test_what_has_arrived_needs_no_wait() -> None:
    program = parse_host_program(TWO_GATHERS)
    sent = {0: [Transmission(8, 3.0)], 1: [Transmission(8, 0.0)]}
    items = predict_items(program, {}, {}, 0, RATES, sent)
    assert spans(items, Lane.compute) == [
        ("neg T5", 0.0, 3.0),
        ("neg T3", 3.0, 8.0),
        ("neg T4", 8.0, 13.0),
    ]


def test_a_rank_that_is_on_no_mesh_does_nothing() -> None:
    program = parse_host_program(TWO_GATHERS)
    assert predict_items(program, {}, {}, 7, RATES, {}) == ()


def work(expr: Expr, **shapes: tuple[int, ...]) -> ExpressionWork:
    tensors: Mapping[str, LocalTensor] = {
        name: LocalTensor(shape, DataType.BFloat16) for name, shape in shapes.items()
    }
    return work_of(expr, tensors.get)


def test_contractions() -> None:
    """Two operations for each product; a rank that holds half of the contracted axis does half."""
    a, b, c, out = map(TensorName, ("a", "b", "c", "out"))
    product = work(MatMul(out, a, b), a=(3, 4, 5), b=(5, 6), out=(3, 4, 6))
    assert product.contraction_flops == 2 * 3 * 4 * 5 * 6
    assert (product.bytes, product.dtype) == (2 * (60 + 30 + 72), DataType.BFloat16)
    dot = work(MatMul(out, a, b), a=(5,), b=(5,), out=())
    assert (dot.contraction_flops, dot.bytes) == (10, 2 * 11)
    linear = work(Linear(out, a, b, c), a=(4, 5), b=(6, 5), c=(6,), out=(4, 6))
    assert (linear.contraction_flops, linear.bytes) == (240, 2 * (20 + 30 + 6 + 24))


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention(is_causal: bool) -> None:
    """12 heads in all, 16 queries, 32 keys of 8 features, values of 4."""
    q, k, v, out, other = map(TensorName, ("q", "k", "v", "out", "other"))
    zero, causal = Literal(0.0, DataType.Double), Literal(is_causal, DataType.Bool)
    shapes = {"q": (2, 6, 16, 8), "k": (2, 6, 32, 8), "v": (2, 6, 32, 4)}
    scores = 12 * 16 * 32 // (2 if is_causal else 1)
    forward = SdpfaFwd(out, other, other, other, q, k, v, zero, causal)
    found = work(forward, **shapes, out=(2, 6, 16, 4))
    assert found.contraction_flops == 2 * scores * (8 + 4)
    assert found.other_flops == scores
    backward = SdpfaBwd(other, other, other, out, q, k, v, out, other, zero, causal, other, other)
    assert work(backward, **shapes, out=(2, 6, 16, 4)).contraction_flops == 2 * scores * (
        3 * 8 + 2 * 4
    )


def test_a_lookup_reads_what_it_returns() -> None:
    out, src, index = map(TensorName, ("out", "src", "index"))
    lookup = IndexSelect(out, src, index, 0, const(1000))
    found = work(lookup, src=(1000, 8), index=(3,), out=(3, 8))
    assert (found.contraction_flops, found.bytes) == (0, 2 * (24 + 24 + 3))


def test_rates_of_types() -> None:
    assert RATES.contraction_flops_of(DataType.Float) == 1.0
    assert RATES.contraction_flops_of(DataType.BFloat16) == 2.0
    assert RATES.contraction_flops_of(DataType.Double) == 0.5
    assert H200_RATES.contraction_flops_of(DataType.Half) > 5e14
