"""`fd.timeline()`: numbers by hand, the report, the file, a run, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfuse import FusionDefinition
from meshfuse.base.errors import UserAssertionError, UserError, UserTypeError
from meshfuse.host.timeline import Item, Kind, Label, Lane
from meshfuse.multidevice import H200_RATES, DeviceMesh, DeviceRates, Overlap, Timeline, plan

RATES = DeviceRates(
    name="slow",
    contraction_flops=12.0,
    contraction_flops_16bit=24.0,
    other_flops=16.0,
    memory_bytes=32.0,
    link_bytes=4.0,
    launch=1.0,
    operation=0.5,
    communication=1.0,
)
ONE_BYTE_PER_SECOND = {"mesh_x": 1e-9}


def sum_beside_linear(ranks: int = 2, rows: int = 4) -> FusionDefinition:
    """The sum of x over its rows, which all ranks share, and a linear that needs no other rank."""
    mesh = DeviceMesh(range(ranks))
    with FusionDefinition() as fd:
        x = fd.define_tensor([rows, 8], contiguity=True)
        w = fd.define_tensor([6, 8], contiguity=True)
        total = fd.ops.sum(x, [0])
        fd.add_output(fd.ops.linear(x, w))
        fd.add_output(fd.ops.exp(total))
        x.set_device_mesh(mesh)
        x.outer_split(0, ranks).axis(0).parallelize(mesh.axis(0))
        w.set_device_mesh(mesh)
    return fd


def gathered_product(ranks: int = 2) -> FusionDefinition:
    """Rows of x, which are gathered, by the columns of w that a rank has."""
    mesh = DeviceMesh(range(ranks))
    with FusionDefinition() as fd:
        x = fd.define_tensor([4 * ranks, 8], contiguity=True)
        w = fd.define_tensor([8, 6 * ranks], contiguity=True)
        y = fd.ops.matmul(x, w)
        fd.add_output(y)
        for tensor, axis in ((x, 0), (w, 1), (y, 1)):
            tensor.set_device_mesh(mesh)
            tensor.outer_split(axis, ranks).axis(axis).parallelize(mesh.axis(0))
    return fd


def linear_and_relu() -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 8], contiguity=True)
        w = fd.define_tensor([6, 8], contiguity=True)
        fd.add_output(fd.ops.relu(fd.ops.linear(x, w)))
    return fd


def lane(timeline: Timeline, wanted: Lane) -> list[tuple[str, float, float]]:
    return [(i.label.kind.value, i.start, i.end) for i in timeline.items if i.lane is wanted]


def test_a_sum_is_hidden_behind_a_linear() -> None:
    """Kernel: 96 bytes. Sum: 32 bytes received. Linear: 192 operations. Last kernel: 64 bytes."""
    found = sum_beside_linear().timeline(rates=RATES)
    assert lane(found, Lane.compute) == [
        ("kernel", 0.0, 4.0),
        ("gemm", 4.0, 20.5),
        ("kernel", 20.5, 23.5),
    ]
    assert lane(found, Lane.communication) == [("communication", 4.0, 13.0)]
    assert (found.compute_seconds, found.gemm_seconds) == (23.5, 16.5)
    assert (found.communication_seconds, found.held_up_seconds) == (9.0, 0.0)
    assert found.seconds == found.bound_seconds == 23.5
    assert found.hidden_fraction == 1.0


def test_a_slow_link_holds_up_what_reads_the_sum() -> None:
    found = sum_beside_linear().timeline(rates=RATES, bandwidths=ONE_BYTE_PER_SECOND)
    assert lane(found, Lane.communication) == [("communication", 4.0, 37.0)]
    assert lane(found, Lane.compute) == [
        ("kernel", 0.0, 4.0),
        ("gemm", 4.0, 20.5),
        ("wait", 20.5, 37.0),
        ("kernel", 37.0, 40.0),
    ]
    assert found.hidden_fraction == 0.5
    assert (found.bound_seconds, found.seconds, found.held_up_seconds) == (33.0, 40.0, 16.5)


REPORT = """\
timeline of rank 1, predicted: slow

T_compute   23.5 s, of which T_gemm 16.5 s
T_comm      33 s, 50% of it hidden behind compute
held up     16.5 s by posts and waits
bound       33 s = max(T_compute, T_comm)
predicted   40 s, of which the bound is 82%

  time  count  kind           what                    bytes  for
  33 s      1  communication  all_reduce T2            32 B  T5 = sum(T0, [0])
16.5 s      1  gemm           linear T3               304 B  T3 = linear(T0, T1)
16.5 s      1  wait           wait for all_reduce T2    0 B  T5 = sum(T0, [0])
   4 s      1  kernel         S0                       96 B  T5 = sum(T0, [0])
   3 s      1  kernel         S3                       64 B  T4 = exp(T2)"""


def test_the_report() -> None:
    found = sum_beside_linear().timeline(rank=1, rates=RATES, bandwidths=ONE_BYTE_PER_SECOND)
    assert str(found) == repr(found) == REPORT


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_peers_fetch_beside_a_product(ranks: int) -> None:
    """A product of [4, 8] and [8, 6] is 384 operations: 0.5 + 32 s. A block is 128 bytes: 1 + 32 s,
    of which 32 on the link, while the next one may begin; the rank's own costs nothing. All arrive
    while something is multiplied, but for 0.5 s of the first."""
    found = gathered_product(ranks).timeline(rates=RATES, overlap=Overlap.peers())
    assert found.compute_seconds == found.gemm_seconds == ranks * 32.5
    arrived = 1.0 + (ranks - 1) * 32.0
    assert found.communication_seconds == arrived
    transfers = [item for item in found.items if item.lane is Lane.communication]
    assert [(item.start, item.end, item.bytes) for item in transfers] == [
        (1.0 + 32.0 * k if k else 0.0, 33.0 + 32.0 * k, 128) for k in range(ranks - 1)
    ]
    assert found.seconds == 33.0 + (ranks - 1) * 32.5
    assert found.held_up_seconds == 0.5
    assert found.worker_streams == tuple(range(min(ranks, 4)))
    assert found.hidden_fraction == (arrived - 0.5) / arrived
    assert f"\nstreams     {min(ranks, 4)} beside the caller's\n" in str(found)
    names = {0: "compute", 1: "communication"}
    names.update({2 + k: f"compute, stream {k}" for k in found.worker_streams})
    check_trace(found.events(), 0, names)


def measured(*items: tuple[Kind, int | None, float, float]) -> Timeline:
    found = tuple(
        Item(
            Label(kind.value, kind, ""),
            Lane.communication if kind is Kind.communication else Lane.compute,
            start,
            end - start,
            stream=stream,
        )
        for kind, stream, start, end in items
    )
    return Timeline(0, is_measured=True, source="cuda:0", items=found)


def test_streams_that_compute_at_once_count_once() -> None:
    """Two products overlap from 3 to 4; the transfer is hidden from 2 to 6, and a wait holds up
    nobody while another stream computes: from 0 to 1 and from 6 to 7 the rank waits."""
    found = measured(
        (Kind.wait, 1, 0.0, 3.0),
        (Kind.gemm, 0, 1.0, 4.0),
        (Kind.communication, 1, 2.0, 7.0),
        (Kind.gemm, 1, 3.0, 6.0),
        (Kind.wait, 0, 4.0, 7.0),
        (Kind.kernel, None, 7.0, 8.0),
    )
    assert (found.compute_seconds, found.gemm_seconds) == (6.0, 5.0)
    assert (found.communication_seconds, found.hidden_fraction) == (5.0, 4.0 / 5.0)
    assert (found.held_up_seconds, found.seconds, found.bound_seconds) == (2.0, 8.0, 6.0)
    assert found.worker_streams == (0, 1)


COMPUTE_AND_COMMUNICATION = {0: "compute", 1: "communication"}


def check_trace(
    events: list[dict[str, Any]], rank: int, names: dict[int, str] = COMPUTE_AND_COMMUNICATION
) -> None:
    """The fields that Chrome's trace event format has for metadata and complete events."""
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == names
    places = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert sorted(places.values()) == list(range(len(names)))
    assert (places[0], places[1]) == (0, len(names) - 1)
    ends = dict.fromkeys(threads, 0.0)
    for event in events:
        assert event["pid"] == rank
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            continue
        assert event["ph"] == "X"
        assert set(event) == {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"}
        assert event["ts"] >= ends[event["tid"]] - 1e-3 and event["dur"] >= 0
        ends[event["tid"]] = event["ts"] + event["dur"]


def test_the_file(tmp_path: Path) -> None:
    found = sum_beside_linear().timeline(rates=RATES, rank=1)
    found.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["traceEvents"] == found.events()
    check_trace(trace["traceEvents"], 1)
    [gemm] = [event for event in trace["traceEvents"] if event.get("cat") == "gemm"]
    assert (gemm["ts"], gemm["dur"], gemm["tid"]) == (4e6, 16.5e6, 0)
    assert gemm["args"] == {"for": "T3 = linear(T0, T1)", "bytes": 304, "flops": 192}


def test_links_and_sizes_are_those_of_a_plan() -> None:
    fd = sum_beside_linear()
    links, bandwidths = {"mesh_x": "nvlink"}, {"nvlink": 16e-9}
    planned = plan(fd, link_classes=links, bandwidths=bandwidths)
    found = fd.timeline(rates=RATES, link_classes=links, bandwidths=bandwidths)
    assert planned.seconds is not None
    assert found.communication_seconds == planned.seconds + RATES.communication
    assert found.notes == ()
    taken = fd.timeline(rates=H200_RATES).notes
    assert taken == ("mesh_x: 205 GB/s, taken for want of a bandwidth",)
    assert linear_and_relu().timeline().notes == ("i0 = 1024, taken for want of a size",)
    gemm = linear_and_relu().timeline([[32, 8], None]).items[0]
    assert (gemm.label.kind, gemm.flops) == (Kind.gemm, 2 * 32 * 8 * 6)


def test_a_thousand_ranks_and_a_rank_of_less() -> None:
    """Rank 0 has two rows of 1026, the last rank none: its linear has nothing to do but begin."""
    fd = sum_beside_linear(ranks=1024, rows=1026)
    for rank, rows in ((0, 2), (1023, 0)):
        found = fd.timeline(rates=RATES, rank=rank)
        [gemm] = [item for item in found.items if item.label.kind is Kind.gemm]
        assert (found.rank, gemm.flops) == (rank, rows * 2 * 6 * 8)


def test_a_subclass_is_defined_first_and_stays_open() -> None:
    class Rows(FusionDefinition):
        def definition(self) -> None:
            x = self.define_tensor([4, 8], contiguity=True)
            self.add_output(self.ops.sum(x, [1]))

    fd = Rows()
    [item] = fd.timeline(rates=RATES).items
    assert (item.label.kind, item.bytes, item.flops) == (Kind.kernel, 4 * (32 + 4), 32)
    fd.add_output(fd.ops.neg(fd.define_tensor([2], contiguity=True)))


def test_a_call_is_measured() -> None:
    fd = linear_and_relu()
    inputs = [torch.randn(64, 8), torch.randn(6, 8)]
    found = fd.timeline(inputs, measured=True)
    assert (found.is_measured, found.source, found.rank) == (True, "cpu", 0)
    [gemm, relu] = found.items
    assert (gemm.label.kind, relu.label.kind) == (Kind.gemm, Kind.kernel)
    assert (gemm.label.cause, relu.label.cause) == ("T2 = linear(T0, T1)", "T3 = relu(T2)")
    assert gemm.start == 0.0 < gemm.end <= relu.start
    assert (found.bound_seconds, found.gemm_seconds) == (
        pytest.approx(gemm.seconds + relu.seconds),
        gemm.seconds,
    )
    assert found.seconds >= found.bound_seconds
    assert found.hidden_fraction is None
    check_trace(found.events(), 0)
    assert fd.profile().segments == 2
    assert str(found).startswith("timeline of rank 0, measured: cpu\n")
    predicted = [item.label for item in fd.timeline().items]
    assert [item.label for item in found.items] == predicted


def test_errors() -> None:
    fd = sum_beside_linear()
    with pytest.raises(UserError, match=re.escape("timeline(rank=2): the program runs on 2 ranks")):
        fd.timeline(rank=2)
    with pytest.raises(UserTypeError, match=re.escape("timeline(rank='0'): a rank is an int")):
        fd.timeline(rank="0")  # pyright: ignore[reportArgumentType]  # a user's mistake
    with pytest.raises(UserTypeError, match="takes DeviceRates"):
        fd.timeline(rates="H200")  # pyright: ignore[reportArgumentType]  # a user's mistake
    with pytest.raises(UserError, match=r"timeline\(inputs\): expected 2 entries, but got 1"):
        fd.timeline([[4, 8]])
    with pytest.raises(UserError, match=r"timeline\(link_classes=.*'tp' is no mesh axis"):
        fd.timeline(link_classes={"tp": "nvlink"})
    with pytest.raises(UserError, match=r"timeline\(bandwidths={'mesh_x': 0}\): .* above 0"):
        fd.timeline(bandwidths={"mesh_x": 0})
    with pytest.raises(UserError, match=r"global_sizes goes with measured=True"):
        fd.timeline(global_sizes={0: [4, 8]})
    with pytest.raises(UserError, match="Fusion is empty"):
        FusionDefinition().timeline()


def test_errors_of_measuring() -> None:
    fd = linear_and_relu()
    with pytest.raises(UserError, match=r"timeline\(measured=True\): takes the inputs of a call"):
        fd.timeline(measured=True)
    with pytest.raises(UserError, match=r"timeline\(measured=True, rank=0\): that is for a predi"):
        fd.timeline([], measured=True, rank=0)
    fd.segment([torch.ones(2, 8), torch.ones(6, 8)])
    with pytest.raises(UserAssertionError, match="segment by segment"):
        fd.timeline([torch.ones(2, 8), torch.ones(6, 8)], measured=True)
