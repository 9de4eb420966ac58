"""Sums that all ranks want, between peers: each adds up a block of terms, and fetches the rest."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from golden_text import GoldenCheck
from host_loops import define, dense, loops
from meshfuse import DataType, DistributedTensor, FusionDefinition
from meshfuse.base.options import NO_OPTIONS, with_options
from meshfuse.facts.overlap_form import CANDIDATES
from meshfuse.host.check import check_host_program
from meshfuse.host.nodes import Allocate, Communicate, HostProgram, all_nodes
from meshfuse.host.parser import parse_host_program
from meshfuse.host.printer import print_host_program
from meshfuse.ir.parser import parse_program
from meshfuse.ir.schedule import MemoryType
from meshfuse.multidevice import Overlap, plan, simulate
from meshfuse.pipeline import compile, forms_of, outline_program
from meshfuse.runtime.arguments import signature_of
from peer_programs import multiply_then_sum, tensor_parallel_mlp
from sharded_runs import X, Y, integers, kinds, mesh_of, place, placed_linear
from slow_devices import products_and_links

RANKS = [1, 2, 3, 4, 8]
RATES = products_and_links(1.0)
BETWEEN_PEERS = [("deliver", X), ("fetch", X)]


def host_of(
    fd: FusionDefinition, form: Overlap, shards: list[torch.Tensor], *options: str
) -> HostProgram:
    """Sound, and the same when it is read back."""
    program, chosen = parse_program(repr(fd.fusion)), with_options(NO_OPTIONS, options)
    signature = signature_of(shards)
    host = compile(program, signature, kernels=False, form=form, options=chosen).host
    assert check_host_program(host) == ()
    assert parse_host_program(print_host_program(host)) == host
    return host


def check(
    fd: FusionDefinition, inputs: list[torch.Tensor], wanted: torch.Tensor, form: Overlap
) -> None:
    """Every rank has all of it."""
    for [output] in simulate(fd, inputs, overlap=form):
        assert isinstance(output, DistributedTensor)
        assert torch.equal(output.local, wanted)


def notes_of(fd: FusionDefinition, form: Overlap) -> list[str]:
    notes = outline_program(parse_program(repr(fd.fusion)), form).notes
    return [str(note) for note in notes if note.stage == "overlap"]


@pytest.mark.parametrize("epilogue", [False, True])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("d", RANKS)
def test_blocks_are_summed_and_fetched(d: int, pieces: int, epilogue: bool) -> None:
    rows, k = 2 * d * pieces, 2 * d
    fd = multiply_then_sum(d, rows, k, epilogue=epilogue)
    x, w, b = integers(rows, k), integers(3, k), integers(3)
    wanted = (x @ w.T + b).relu().half() if epilogue else x @ w.T
    check(fd, [x, w, b] if epilogue else [x, w], wanted, Overlap.peers(pieces))
    assert kinds(fd) == (BETWEEN_PEERS if d > 1 else [])
    counts = [str(loop.count) for loop in loops(fd.fec.host_program())]
    outer = [str(pieces)] if pieces > 1 else []
    assert counts[:-1] == ([*outer, str(d)] if d > 1 else [])
    assert check_host_program(fd.fec.host_program()) == ()


@pytest.mark.parametrize("d", [2, 3, 4, 8])
def test_blocks_of_unequal_size(d: int) -> None:
    """The last one is shorter, or the last ones are empty; there are no pieces of such."""
    rows, k = 2 * d - 1 if d < 8 else 17, 2 * d
    fd, x, w = multiply_then_sum(d, rows, k), integers(rows, k), integers(3, k)
    check(fd, [x, w], x @ w.T, Overlap.peers())
    assert kinds(fd) == BETWEEN_PEERS
    [note] = notes_of(fd, Overlap.peers(2))
    assert f"no 2 pieces with a block for each of {d} ranks, all of one size" in note
    check(fd, [x, w], x @ w.T, Overlap.peers(2))
    assert kinds(fd) == [("all_reduce", X)]


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("d", "pieces"), [(2, 1), (2, 4), (3, 2), (4, 3)])
def test_on_any_number_of_streams(d: int, pieces: int, streams: int) -> None:
    rows, k = 2 * d * pieces, 2 * d
    shards = [torch.empty(rows, 2), torch.empty(3, 2)]
    option = f"number_of_streams({streams})"
    host_of(multiply_then_sum(d, rows, k), Overlap.peers(pieces), shards, option)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("d", [2, 3, 4])
def test_as_much_moves_as_in_an_all_reduce(d: int, pieces: int) -> None:
    rows, k = 4 * d, 2 * d
    fd = multiply_then_sum(d, rows, k)
    found, plain = plan(fd, overlap=Overlap.peers(pieces)), plan(fd)
    assert found.bytes == plain.bytes == 2 * (d - 1) * 4 * 3 * 4
    moved = [each.bytes for each in found.communications if each.bytes]
    assert moved == [48 // pieces] * (2 * (d - 1) * pieces)


def test_the_host_program(golden: GoldenCheck) -> None:
    shards = [torch.empty(24, 2), torch.empty(3, 2)]
    host = host_of(multiply_then_sum(3, 24, 6), Overlap.peers(2), shards)
    golden("host_peer_sums", print_host_program(host))


def test_the_rank_s_own_sum_is_made_in_the_result() -> None:
    """Beside it there are only terms, in memory that peers read: one block an iteration."""
    shards = [torch.empty(8, 2), torch.empty(3, 2)]
    host = host_of(multiply_then_sum(2, 8, 4), Overlap.peers(2), shards)
    memory = [(n.memory, str(n.bytes)) for n in all_nodes(host.body) if isinstance(n, Allocate)]
    block, whole = 2 * 3 * 4, 8 * 3 * 4
    assert memory == [(MemoryType.global_, str(whole)), (MemoryType.symmetric, str(block))]
    transfers = [n for n in all_nodes(host.body) if isinstance(n, Communicate)]
    assert all(node.into is not None for node in transfers)


def test_a_block_is_fetched_while_the_next_piece_is_multiplied() -> None:
    """A product of [4, 2] and [2, 3] is 48 operations, and as many bytes: each takes 48 s, and so
    does what moves of it. Of each piece what the peer sums is multiplied first."""
    timeline = multiply_then_sum(2, 16, 4).timeline(rates=RATES, overlap=Overlap.peers(2))
    begun = [(i.label.name.split()[0], i.start) for i in timeline.items if i.seconds]
    named = {
        kind: [start for name, start in begun if name == kind]
        for kind in ("linear", "deliver", "fetch")
    }
    assert named["linear"] == [0.0, 48.0, 96.0, 144.0]
    assert named["deliver"] == [48.0, 144.0]
    assert named["fetch"] == [96.0, 192.0]
    assert timeline.seconds == 240.0
    plain = multiply_then_sum(2, 16, 4).timeline(rates=RATES)
    assert plain.seconds == 4 * 48.0 + 2 * 2 * 48.0


def test_each_rank_multiplies_once_for_each_block() -> None:
    fd, x, w = multiply_then_sum(2, 16, 4), integers(16, 4), integers(3, 4)
    simulate(fd, [x, w], overlap=Overlap.peers(2))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        simulate(fd, [x, w], overlap=Overlap.peers(2))
    events = [event for event in recorded.events() or () if event.name == "aten::mm"]
    assert [event.input_shapes[0] for event in events] == [[4, 2]] * 8


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("d", RANKS)
def test_megatron_s_pair(d: int, pieces: int) -> None:
    rows, wide = 2 * d * pieces, 3 * d
    fd = tensor_parallel_mlp(d, rows, wide)
    x, v, w, b = integers(rows, 4), integers(wide, 4), integers(4, wide), integers(4)
    wanted = (x @ v.T).relu() @ w.T + b
    check(fd, [x, v, w, b], wanted, Overlap.peers(pieces))
    assert kinds(fd) == (BETWEEN_PEERS if d > 1 else [])


@pytest.mark.parametrize("pieces", [1, 2])
def test_two_pairs_in_a_row(pieces: int) -> None:
    """The sum of the first is read by the second, and added to: a residual."""
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x = dense(fd, 8, 4)
        wide, narrow = ([dense(fd, *shape) for _ in range(2)] for shape in ((6, 4), (4, 6)))
        y = fd.ops.add(x, fd.ops.linear(fd.ops.relu(fd.ops.linear(x, wide[0])), narrow[0]))
        z = fd.ops.add(y, fd.ops.linear(fd.ops.relu(fd.ops.linear(y, wide[1])), narrow[1]))
        place(mesh, {}, x, y, z)
        place(mesh, {0: X}, *wide)
        place(mesh, {1: X}, *narrow)
        fd.add_output(z)

    fd, x = define(build), integers(8, 4, low=-1, high=2)
    a, b, c, e = (integers(*shape, low=-1, high=2) for shape in ((6, 4), (6, 4), (4, 6), (4, 6)))
    y = x + (x @ a.T).relu() @ c.T
    check(fd, [x, a, b, c, e], y + (y @ b.T).relu() @ e.T, Overlap.peers(pieces))
    assert kinds(fd) == BETWEEN_PEERS * 2


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_pair_reads_the_sum_before_it(pieces: int) -> None:
    """What is fetched of the first sum is multiplied in the loop that fetches it; so it is made
    in the result, as a sum, long before anything is fetched into that."""
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x, w, v, u = (dense(fd, *shape) for shape in ((4, 4), (3, 4), (4, 3), (3, 4)))
        y = fd.ops.linear(x, w)
        hidden = fd.ops.linear(y, v)
        z = fd.ops.linear(hidden, u)
        place(mesh, {0: X}, v)
        place(mesh, {1: X}, x, w, hidden, u)
        place(mesh, {}, y, z)
        fd.add_output(z)

    shards = [torch.empty(4, 2), torch.empty(3, 2), torch.empty(2, 3), torch.empty(3, 2)]
    host_of(define(build), Overlap.peers(pieces), shards)
    x, w, v, u = integers(4, 4), integers(3, 4), integers(4, 3), integers(3, 4)
    check(define(build), [x, w, v, u], x @ w.T @ v.T @ u.T, Overlap.peers(pieces))


def test_what_is_fetched_of_oneself_is_not_written() -> None:
    """Something is computed between the sum and what fetches it, which is a loop of its own then: a
    peer may read the rank's block while another iteration finds it where it belongs."""
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x, w, v = dense(fd, 4, 4), dense(fd, 4, 4), dense(fd, 3, 4)
        hidden = fd.ops.relu(fd.ops.linear(x, w))
        total = fd.ops.sum(hidden, [0])
        y = fd.ops.linear(hidden, v)
        place(mesh, {0: X}, w, total)
        place(mesh, {1: X}, hidden, v)
        place(mesh, {}, x, y)
        fd.add_output(total)
        fd.add_output(y)

    shards = [torch.empty(4, 4), torch.empty(2, 4), torch.empty(3, 2)]
    host = host_of(define(build), Overlap.peers(), shards)
    moving = [
        loop
        for loop in loops(host)
        if any(isinstance(n, Communicate) for n in all_nodes(loop.body))
    ]
    assert [str(loop.count) for loop in moving] == ["2", "2"]
    x, w, v = integers(4, 4), integers(4, 4), integers(3, 4)
    hidden = (x @ w.T).relu()
    for rank, outputs in enumerate(simulate(define(build), [x, w, v], overlap=Overlap.peers())):
        for output, wanted in zip(
            outputs, (hidden.sum(0).chunk(2)[rank], hidden @ v.T), strict=True
        ):
            assert isinstance(output, DistributedTensor)
            assert torch.equal(output.local, wanted)


@pytest.mark.parametrize("pieces", [1, 2])
def test_rows_of_which_ranks_have_blocks_along_another_axis_of_the_mesh(pieces: int) -> None:
    mesh = mesh_of(2, 2)
    fd = placed_linear(mesh, (16, 8), (4, 8), ({0: Y, 1: X}, {1: X}, {0: Y}))
    x, w = integers(16, 8), integers(4, 8)
    wanted = (x @ w.T).chunk(2)
    for rank, [output] in enumerate(simulate(fd, [x, w], overlap=Overlap.peers(pieces))):
        assert isinstance(output, DistributedTensor)
        assert torch.equal(output.local, wanted[rank // 2])
    assert kinds(fd) == BETWEEN_PEERS


@pytest.mark.parametrize(("rows", "pieces"), [(12, 1), (8, 2), (6, 1), (6, 2)])
def test_parts_of_blocks_must_be_equal(rows: int, pieces: int) -> None:
    """Rows 0 to 2, of 6, are no two blocks of 2 of them."""
    mesh = mesh_of(2, 2)
    fd = placed_linear(mesh, (rows, 4), (1, 4), ({0: Y, 1: X}, {1: X}, {0: Y}))
    x, w = integers(rows, 4), integers(1, 4)
    wanted, form = (x @ w.T).chunk(2), Overlap.peers(pieces)
    for rank, [output] in enumerate(simulate(fd, [x, w], overlap=form)):
        assert isinstance(output, DistributedTensor)
        assert torch.equal(output.local, wanted[rank // 2])
    assert kinds(fd) == (BETWEEN_PEERS if rows > 6 else [("all_reduce", X)])
    lacking = "2 pieces with a block" if pieces > 1 else "a block"
    text = f"T2 has no {lacking} for each of 2 ranks, all of one size"
    assert any(text in note for note in notes_of(fd, form)) == (rows == 6)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_batch_of_one_is_passed_over(pieces: int) -> None:
    """Its rows are not the outermost axis, but as good."""
    mesh = mesh_of(2)
    fd = placed_linear(mesh, (1, 8, 4), (3, 4), ({2: X}, {1: X}, {}))
    x, w = integers(1, 8, 4), integers(3, 4)
    check(fd, [x, w], x @ w.T, Overlap.peers(pieces))
    assert kinds(fd) == BETWEEN_PEERS


def test_a_sum_that_updates_an_input() -> None:
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x, w, z = dense(fd, 8, 4), dense(fd, 3, 4), dense(fd, 8, 3)
        y = fd.ops.add(z, fd.ops.linear(x, w))
        place(mesh, {1: X}, x, w)
        place(mesh, {}, y, z)
        fd.add_output(y, z)

    x, w, z = integers(8, 4), integers(3, 4), integers(8, 3)
    found = simulate(define(build), [x, w, z], overlap=Overlap.peers(2))
    for [updated] in ([inputs[0]] for inputs in found.inputs):
        assert isinstance(updated, DistributedTensor)
        assert torch.equal(updated.local, z + x @ w.T)


@pytest.mark.parametrize("rows", [8, 7])
def test_rows_of_a_size_that_a_call_says(rows: int) -> None:
    mesh = mesh_of(2)
    fd = placed_linear(mesh, (-1, 4), (3, 4), ({1: X}, {1: X}, {}))
    x, w = integers(rows, 4), integers(3, 4)
    for pieces in (1, 2):
        check(fd, [x, w], x @ w.T, Overlap.peers(pieces))
        assert kinds(fd) == (BETWEEN_PEERS if pieces == 1 else [("all_reduce", X)])


def test_a_bias_on_rows_of_any_number() -> None:
    """Of one row a rank has none, and the bias, which is one row too, stretches over that."""
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x, w, b = dense(fd, -1, 4), dense(fd, 3, 4), dense(fd, 3)
        y = fd.ops.linear(x, w)
        z = fd.ops.add(y, b)
        place(mesh, {1: X}, x, w)
        place(mesh, {}, b, y, z)
        fd.add_output(z)

    host_of(define(build), Overlap.peers(), [torch.empty(7, 2), torch.empty(3, 2), torch.empty(3)])
    w, b = integers(3, 4), integers(3)
    for rows in (7, 1):
        x = integers(rows, 4)
        check(define(build), [x, w, b], x @ w.T + b, Overlap.peers())


# What is said, and what is refused.


def test_notes_say_what_is_bound_and_explain_what_moves() -> None:
    fd = multiply_then_sum(2, 8, 4)
    [note] = notes_of(fd, Overlap.peers(2))
    assert note == (
        "overlap: T2: overlapped: in peers, 2 pieces, along axis a4 of T2, beside "
        "T3 = linear(T0, T1)"
    )
    simulate(fd, [integers(8, 4), integers(3, 4)], overlap=Overlap.peers(2))
    text = fd.explain()
    assert note in text
    for what in ("0: deliver", "1: fetch"):
        assert f"{what} over mesh_x of DeviceMesh{{0 1}}, 2 times\n" in text


def test_peers_are_among_the_candidates() -> None:
    found, _ = forms_of(parse_program(repr(multiply_then_sum(2, 32, 4).fusion)), CANDIDATES)
    assert found == CANDIDATES


def test_too_few_rows() -> None:
    [note] = notes_of(multiply_then_sum(4, 3, 8), Overlap.peers())
    assert "a rank holds 0 of axis a4" in note and "a rank holds 0 of axis a5" in note


def test_a_maximum_stays_a_collective() -> None:
    """Peers add up what is delivered."""
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 8, 4), dense(fd, 3, 4)
        y = fd.ops.linear(x, w)
        top = fd.ops.max(y, [1])
        place(mesh, {0: X}, w)
        place(mesh, {1: X}, y)
        place(mesh, {}, x, top)
        fd.add_output(top)

    fd, x, w = define(build), integers(8, 4), integers(4, 4)
    assert any("not for max" in note for note in notes_of(fd, Overlap.peers()))
    w = integers(3, 4)
    check(fd, [x, w], (x @ w.T).amax(1), Overlap.peers())


@pytest.mark.parametrize("pieces", [1, 2])
def test_terms_in_the_order_of_the_team_are_not_delivered(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = multiply_then_sum(2, 8, 4)
    x, w = integers(8, 4), integers(3, 4)
    monkeypatch.setenv("MESHFUSE_ENABLE", "deterministic_collectives")
    check(fd, [x, w], x @ w.T, Overlap.peers(pieces))
    assert ("deliver", X) not in kinds(fd)


def test_half_terms_are_added_in_the_order_of_iterations() -> None:
    """2048 + 1 is 2048, as often as it is added: each row is the sum of the rank that adds it up,
    which ends with its own term."""
    fd = multiply_then_sum(2, 4, 2, dtype=DataType.Half)
    x = torch.tensor([[2049.0, 1.0]] * 4).half()  # 2048 and 1
    w = torch.ones(3, 2).half()
    check(fd, [x, w], torch.full((4, 3), 2048.0).half(), Overlap.peers())
