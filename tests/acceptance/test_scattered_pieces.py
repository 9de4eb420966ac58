"""Blocks that peers deliver to one another in pieces: each is added up while the next is made."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from golden_text import GoldenCheck
from host_loops import define, dense, loops
from meshfuse import DistributedTensor, FusionDefinition
from meshfuse.base.options import NO_OPTIONS, with_options
from meshfuse.host.check import check_host_program
from meshfuse.host.device_rates import DeviceRates
from meshfuse.host.nodes import Allocate, Communicate, HostProgram, all_nodes
from meshfuse.host.parser import parse_host_program
from meshfuse.host.printer import print_host_program
from meshfuse.ir.parser import parse_program
from meshfuse.ir.schedule import MemoryType
from meshfuse.multidevice import Overlap, plan, simulate
from meshfuse.pipeline import compile, outline_program
from meshfuse.runtime.arguments import signature_of
from peer_programs import scatter_pieces
from sharded_runs import X, Y, integers, kinds, mesh_of, place, placed_linear


def check(
    fd: FusionDefinition,
    inputs: list[torch.Tensor],
    wanted: list[torch.Tensor],
    pieces: int,
) -> None:
    """Every rank has its block."""
    found = simulate(fd, inputs, overlap=Overlap.peers(pieces))
    for [output], block in zip(found, wanted, strict=True):
        assert isinstance(output, DistributedTensor)
        assert torch.equal(output.local, block)
    assert check_host_program(fd.fec.host_program()) == ()


def blocks_of(whole: torch.Tensor, d: int) -> list[torch.Tensor]:
    """For each rank, the last ones shorter or empty."""
    size = -(-whole.shape[0] // d)
    return [whole[rank * size : (rank + 1) * size] for rank in range(d)]


def counts(fd: FusionDefinition) -> list[str]:
    return [str(loop.count) for loop in loops(fd.fec.host_program())]


def host_of(fd: FusionDefinition, pieces: int, rows: int, *options: str) -> HostProgram:
    """Sound, and the same when it is read back."""
    program, chosen = parse_program(repr(fd.fusion)), with_options(NO_OPTIONS, options)
    signature = signature_of([torch.empty(rows, 2), torch.empty(3, 2)])
    form = Overlap.peers(pieces)
    host = compile(program, signature, kernels=False, form=form, options=chosen).host
    assert check_host_program(host) == ()
    assert parse_host_program(print_host_program(host)) == host
    return host


def notes_of(fd: FusionDefinition, pieces: int) -> list[str]:
    notes = outline_program(parse_program(repr(fd.fusion)), Overlap.peers(pieces)).notes
    return [str(note) for note in notes]


@pytest.mark.parametrize("epilogue", [False, True])
@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
def test_pieces_are_delivered_one_by_one(d: int, pieces: int, epilogue: bool) -> None:
    rows, k = 2 * d * pieces, 2 * d
    fd = scatter_pieces(d, rows, k, epilogue=epilogue)
    x, w, b = integers(rows, k), integers(3, k), integers(3)
    wanted = (x @ w.T + b).relu().half() if epilogue else x @ w.T
    check(fd, [x, w, b] if epilogue else [x, w], blocks_of(wanted, d), pieces)
    assert kinds(fd) == ([("deliver", X)] if d > 1 else [])
    if d > 1:
        assert counts(fd) == ([str(d), str(pieces)] if pieces > 1 else [str(d)])
        [sent] = [n for n in all_nodes(fd.fec.host_program().body) if isinstance(n, Communicate)]
        assert sent.into is not None and sent.sum_over == "j0"  # first terms are not copied


@pytest.mark.parametrize("held", [4, 5])
@pytest.mark.parametrize("d", [2, 3, 4, 8])
def test_pieces_of_unequal_size(d: int, held: int) -> None:
    """The last one of 3 is shorter, or empty."""
    rows, k = held * d, 2 * d
    fd, x, w = scatter_pieces(d, rows, k), integers(rows, k), integers(3, k)
    check(fd, [x, w], blocks_of(x @ w.T, d), 3)
    assert counts(fd) == [str(d), "3"]


@pytest.mark.parametrize("d", [2, 3, 4, 8])
def test_blocks_of_unequal_size_have_no_pieces(d: int) -> None:
    rows, k = 4 * d + 1, 2 * d
    fd, x, w = scatter_pieces(d, rows, k), integers(rows, k), integers(3, k)
    check(fd, [x, w], blocks_of(x @ w.T, d), 2)
    assert kinds(fd) == [("deliver", X)] and counts(fd) == [str(d)]
    assert any("ranks may hold unequal parts" in note for note in notes_of(fd, 2))


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("d", "pieces"), [(2, 2), (2, 3), (3, 2), (4, 4)])
def test_on_any_number_of_streams(d: int, pieces: int, streams: int) -> None:
    rows = 2 * d * pieces
    fd = scatter_pieces(d, rows, 2 * d)
    host_of(fd, pieces, rows, f"number_of_streams({streams})")


def test_the_host_program(golden: GoldenCheck) -> None:
    host = host_of(scatter_pieces(3, 12, 6), 2, 12)
    golden("host_scattered_pieces", print_host_program(host))


@pytest.mark.parametrize("pieces", [1, 2])
def test_as_much_moves_as_in_a_reduce_scatter(pieces: int) -> None:
    fd = scatter_pieces(4, 16, 8)
    found, plain = plan(fd, overlap=Overlap.peers(pieces)), plan(fd)
    assert found.bytes == plain.bytes == 3 * 4 * 3 * 4
    moved = [each.bytes for each in found.communications if each.bytes]
    assert moved == [48 // pieces] * (3 * pieces)


def test_terms_are_made_where_peers_read_them() -> None:
    """The result is the only other memory: one piece of terms an iteration."""
    host = host_of(scatter_pieces(2, 8, 4), 2, 8)
    memory = [(n.memory, str(n.bytes)) for n in all_nodes(host.body) if isinstance(n, Allocate)]
    block, piece = 4 * 3 * 4, 2 * 3 * 4
    assert memory == [(MemoryType.global_, str(block)), (MemoryType.symmetric, str(piece))]


def test_each_rank_multiplies_once_for_each_piece() -> None:
    """Plain products of rows, as many additions as pieces come from peers behind the first terms,
    and what is the rank's own of two is added, too: nothing is copied but what moves."""
    fd, x, w = scatter_pieces(2, 16, 4), integers(16, 4), integers(3, 4)
    simulate(fd, [x, w], overlap=Overlap.peers(2))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        simulate(fd, [x, w], overlap=Overlap.peers(2))
    events = recorded.events() or ()
    products = [event.input_shapes[0] for event in events if event.name == "aten::mm"]
    assert products == [[4, 2]] * 8
    assert not [event for event in events if event.name == "aten::bmm"]
    sums = [event.input_shapes[0] for event in events if event.name == "aten::add_"]
    assert sums == [[4, 3]] * 4


def test_a_piece_is_added_before_the_last_one_is_multiplied() -> None:
    """A product of [4, 2] and [2, 3] is 48 operations: 48 s, and its terms, 48 bytes, move in 12 s.
    They are added in 4 s. What the peer has sent of the first piece, and the rank's own, is a sum
    when the product of the second is begun."""
    rates = DeviceRates(
        name="slow",
        contraction_flops=1.0,
        contraction_flops_16bit=1.0,
        other_flops=float("inf"),
        memory_bytes=24.0,
        link_bytes=4.0,
        launch=0.0,
        operation=0.0,
        communication=0.0,
    )
    timeline = scatter_pieces(2, 16, 4).timeline(rates=rates, overlap=Overlap.peers(2))
    begun = [(item.label.name.split()[0], item.start) for item in timeline.items if item.seconds]
    named = {
        kind: [start for name, start in begun if name == kind]
        for kind in ("linear", "deliver", "set")
    }
    assert named == {
        "linear": [0.0, 48.0, 96.0, 148.0],
        "deliver": [48.0, 96.0],
        "set": [144.0, 196.0],
    }
    assert timeline.seconds == 200.0


# Which axes, and what is refused.


def test_rows_of_which_ranks_have_blocks_along_another_axis_of_the_mesh() -> None:
    mesh = mesh_of(2, 2)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 16, 8), dense(fd, 4, 8)
        y = fd.ops.linear(x, w)
        place(mesh, {0: Y, 1: X}, x)
        place(mesh, {1: X}, w)
        y.set_device_mesh(mesh)
        for axis, owner in enumerate((Y, X)):
            y.outer_split(axis, 2)
            y.axis(axis).parallelize(owner)
        fd.add_output(y)

    x, w, fd = integers(16, 8), integers(4, 8), define(build)
    check(fd, [x, w], list((x @ w.T).chunk(4)), 2)
    assert kinds(fd) == [("deliver", X)] and counts(fd) == ["2", "2"]


@pytest.mark.parametrize("axis", [1, 2])
def test_an_axis_that_is_not_the_outermost(axis: int) -> None:
    """Sequences of a batch, or columns."""
    mesh = mesh_of(2)
    fd = placed_linear(mesh, (3, 8, 4), (6, 4), ({2: X}, {1: X}, {axis: X}))
    x, w = integers(3, 8, 4), integers(6, 4)
    check(fd, [x, w], list((x @ w.T).chunk(2, axis)), 2)
    assert kinds(fd) == [("deliver", X)] and counts(fd) == ["2", "2"]


@pytest.mark.parametrize("rows", [8, 7])
def test_rows_of_a_size_that_a_call_says(rows: int) -> None:
    mesh = mesh_of(2)
    fd = placed_linear(mesh, (-1, 4), (3, 4), ({1: X}, {1: X}, {0: X}))
    x, w = integers(rows, 4), integers(3, 4)
    check(fd, [x, w], blocks_of(x @ w.T, 2), 2)
    assert kinds(fd) == [("deliver", X)] and counts(fd) == ["2"]


def test_rows_that_their_user_has_merged() -> None:
    """A block would be delivered behind all of its pieces, which one piece is quicker than."""
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 8, 4), dense(fd, 3, 4)
        y = fd.ops.linear(x, w)
        place(mesh, {1: X}, x, w)
        place(mesh, {0: X}, y)
        y.merge(1, 2)
        fd.add_output(y)

    fd, x, w = define(build), integers(8, 4), integers(3, 4)
    check(fd, [x, w], blocks_of(x @ w.T, 2), 2)
    assert any("T2: not_overlapped" in note for note in notes_of(fd, 2))
    assert kinds(fd) == [("reduce_scatter", X)]


def test_terms_in_the_order_of_the_team_are_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """One collective moves them, as without pieces."""
    fd, x, w = scatter_pieces(2, 8, 4), integers(8, 4), integers(3, 4)
    monkeypatch.setenv("MESHFUSE_ENABLE", "deterministic_collectives")
    check(fd, [x, w], blocks_of(x @ w.T, 2), 2)
    assert kinds(fd) == [("reduce_scatter", X)] and loops(fd.fec.host_program()) == []
