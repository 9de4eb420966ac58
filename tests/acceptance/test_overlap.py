"""Forms of overlap: what is bound, exact results in the simulator, and what users may say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear

from host_loops import chunks, define, dense, loops
from meshfuse import DistributedTensor, FusionDefinition
from meshfuse.api.overlap_choice import (
    LEAST_BYTES,
    OverlapChoice,
    choice_as_read,
    form_unmeasured,
    read_overlap,
    reason_against_race,
    size_class,
    written_choice,
)
from meshfuse.base.errors import Unsupported, UserError, UserTypeError, UserValueError
from meshfuse.base.options import NO_OPTIONS, with_options
from meshfuse.facts.overlap_form import CANDIDATES, PLAIN
from meshfuse.host.nodes import Chunk
from meshfuse.host.race import RaceRow
from meshfuse.ir.parser import parse_program
from meshfuse.multidevice import Overlap, plan, simulate
from meshfuse.pipeline import compile, forms_of, outline_program
from meshfuse.runtime.arguments import signature_of
from sharded_runs import X, Y, integers, kinds, mesh_of, place, placed_linear, without_kernels

CHUNKS = [Overlap.chunks(count) for count in (2, 3, 4, 8)]
CPU = torch.device("cpu")


def local(value: torch.Tensor) -> torch.Tensor:
    assert isinstance(value, DistributedTensor)
    return value.local


def two_layers(d: int) -> FusionDefinition:
    """Two perceptrons in a row, of which each rank has a part of the hidden axes."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x = dense(fd, 8, 3, 4)
        into, out = ([dense(fd, *shape) for _ in range(2)] for shape in ((2 * d, 4), (4, 2 * d)))
        y = fd.ops.linear(fd.ops.relu(fd.ops.linear(x, into[0])), out[0])
        z = fd.ops.linear(fd.ops.relu(fd.ops.linear(fd.ops.add(x, y), into[1])), out[1])
        place(mesh, {}, x, y, z)
        place(mesh, {0: X}, *into)
        place(mesh, {1: X}, *out)
        fd.add_output(z)

    return define(build)


def layer_inputs(d: int) -> list[torch.Tensor]:
    shapes = ((8, 3, 4), (2 * d, 4), (2 * d, 4), (4, 2 * d), (4, 2 * d))
    return [integers(*shape, low=-1, high=2) for shape in shapes]


def layers_by_hand(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, e: torch.Tensor
) -> torch.Tensor:
    y = linear(linear(x, a).relu(), c)
    return linear(linear(x + y, b).relu(), e)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
def test_one_loop_over_the_batch_has_all_layers(d: int) -> None:
    inputs = layer_inputs(d)
    wanted = layers_by_hand(*inputs)
    with without_kernels():
        for form in CHUNKS:
            fd = two_layers(d)
            for outputs in simulate(fd, inputs, overlap=form):
                assert torch.equal(local(outputs[0]), wanted)
            found = loops(fd.fec.host_program())
            assert [str(loop.count) for loop in found] == ([str(form.count)] if d > 1 else [])
            assert kinds(fd) == ([("all_reduce", X)] * 2 if d > 1 else [])


def scattered(d: int) -> FusionDefinition:
    """A product of which ranks have terms, and want rows."""
    mesh = mesh_of(d)
    return placed_linear(mesh, (4 * d, 2 * d), (8, 2 * d), ({1: X}, {1: X}, {0: X}))


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
def test_rows_are_scattered_in_chunks(d: int) -> None:
    """Of the 4 rows of a rank, or of columns where that is too few."""
    x, w = integers(4 * d, 2 * d), integers(8, 2 * d)
    wanted = linear(x, w).chunk(d)
    for form in CHUNKS:
        fd = scattered(d)
        for outputs, part in zip(simulate(fd, [x, w], overlap=form), wanted, strict=True):
            assert torch.equal(local(outputs[0]), part)
        found = loops(fd.fec.host_program())
        assert len(found) == (d > 1)
        axes = [node.axis for loop in found for node in loop.body if isinstance(node, Chunk)]
        assert set(axes) == ({0} if d > 1 and form.count < 8 else {0, 1} if d > 1 else set())


def gathered_rows(d: int) -> FusionDefinition:
    """Ranks have blocks of rows, and want the whole product."""
    mesh = mesh_of(d)
    return placed_linear(mesh, (4 * d, 4), (5, 4), ({0: X}, {}, {}))


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pieces", [1, 2])
def test_blocks_are_exchanged_by_peers(d: int, pieces: int) -> None:
    form = Overlap.peers(pieces)
    x, w = integers(4 * d, 4), integers(5, 4)
    for outputs in simulate(gathered_rows(d), [x, w], overlap=form):
        assert torch.equal(local(outputs[0]), linear(x, w))
    x, w = integers(4 * d, 2 * d), integers(8, 2 * d)
    wanted = linear(x, w).chunk(d)
    for outputs, part in zip(simulate(scattered(d), [x, w], overlap=form), wanted, strict=True):
        assert torch.equal(local(outputs[0]), part)


def gathered_in_batches(d: int) -> FusionDefinition:
    """Ranks have parts of each sequence, and columns of the weights."""
    mesh = mesh_of(d)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 8, 2 * d, 4), dense(fd, 3 * d, 4)
        y = fd.ops.relu(fd.ops.linear(x, w))
        place(mesh, {1: X}, x)
        place(mesh, {0: X}, w)
        place(mesh, {2: X}, y)
        fd.add_output(y)

    return define(build)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8])
def test_sequences_are_gathered_batch_by_batch(d: int) -> None:
    x, w = integers(8, 2 * d, 4), integers(3 * d, 4)
    wanted = linear(x, w).relu().chunk(d, 2)
    for form in CHUNKS:
        fd = gathered_in_batches(d)
        for outputs, part in zip(simulate(fd, [x, w], overlap=form), wanted, strict=True):
            assert torch.equal(local(outputs[0]), part)
        assert len(loops(fd.fec.host_program())) == (d > 1)
        assert kinds(fd) == ([("all_gather", X)] if d > 1 else [])


def test_rows_of_which_ranks_have_blocks_are_cut_within_them() -> None:
    """Data in parallel along one axis of the mesh, tensors along the other."""
    mesh = mesh_of(2, 2)
    fd = placed_linear(mesh, (16, 8), (4, 8), ({0: Y, 1: X}, {1: X}, {0: Y}))
    x, w = integers(16, 8), integers(4, 8)
    wanted = linear(x, w).chunk(2)
    for rank, outputs in enumerate(simulate(fd, [x, w], overlap=Overlap.chunks(4))):
        assert torch.equal(local(outputs[0]), wanted[rank // 2])
    assert len(loops(fd.fec.host_program())) == 1


def test_results_that_update_inputs_are_made_in_chunks_too() -> None:
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x, w, z = dense(fd, 8, 4), dense(fd, 3, 4), dense(fd, 8, 3)
        y = fd.ops.add(z, fd.ops.linear(x, w))
        place(mesh, {1: X}, x, w)
        place(mesh, {}, y, z)
        fd.add_output(y, z)

    x, w, z = integers(8, 4), integers(3, 4), integers(8, 3)
    found = simulate(define(build), [x, w, z], overlap=Overlap.chunks(2))
    assert all(torch.equal(local(inputs[0]), z + linear(x, w)) for inputs in found.inputs)


# What a form binds, and why not.


def reasons(fd: FusionDefinition, *forms: Overlap) -> list[str]:
    return [note.reason for note in forms_of(parse_program(repr(fd.fusion)), forms)[1]]


def test_forms_that_change_something_are_candidates() -> None:
    found, _ = forms_of(parse_program(repr(two_layers(2).fusion)), CANDIDATES)
    assert found[:3] == (Overlap.chunks(2), Overlap.chunks(4), Overlap.chunks(8))
    assert forms_of(parse_program(repr(two_layers(1).fusion)), CANDIDATES) == ((), ())


def test_notes_say_what_is_bound() -> None:
    notes = outline_program(parse_program(repr(scattered(2).fusion)), Overlap.chunks(2)).notes
    assert [str(note) for note in notes if note.stage == "overlap"] == [
        "overlap: T2: overlapped: in 2 chunks, along axis a4 of T2, beside T3 = linear(T0, T1)"
    ]


def test_without_a_contraction_nothing_is_bound() -> None:
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x = dense(fd, 8, 4)
        y = fd.ops.sum(x, [1])
        place(mesh, {1: X}, x)
        place(mesh, {}, y)
        fd.add_output(y)

    [reason] = reasons(define(build), Overlap.chunks(2))
    assert reason.startswith("no contraction next to all_reduce has axis ")


def test_more_chunks_than_there_are_rows_are_not_tried() -> None:
    mesh = mesh_of(2)
    fd = placed_linear(mesh, (2, 4), (3, 4), ({1: X}, {1: X}, {}))
    [reason] = reasons(fd, Overlap.chunks(4))
    assert "a rank holds 2 of axis" in reason and "a rank holds 3 of axis" in reason
    assert reasons(fd, Overlap.chunks(2)) == []


def test_a_loop_of_the_user_s_is_left_alone() -> None:
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 8, 4), dense(fd, 3, 4)
        y = fd.ops.linear(x, w)
        place(mesh, {1: X}, x, w)
        place(mesh, {}, y)
        chunks(y, 0, 4)
        fd.add_output(y)

    fd = define(build)
    assert reasons(fd, *CHUNKS) == ["the program has stream leaves of its user's, and those alone"]
    x, w = integers(8, 4), integers(3, 4)
    for outputs in simulate(fd, [x, w], overlap=Overlap.chunks(2)):
        assert torch.equal(local(outputs[0]), linear(x, w))
    assert [str(loop.count) for loop in loops(fd.fec.host_program())] == ["4"]


# What users may say.


def test_a_plan_and_a_timeline_are_of_the_form_that_is_asked_for() -> None:
    plain, cut = plan(two_layers(2)), plan(two_layers(2), overlap=Overlap.chunks(4))
    assert (len(plain.communications), len(cut.communications)) == (2, 8)
    assert plain.bytes == cut.bytes
    timeline = two_layers(2).timeline(overlap=Overlap.chunks(2))
    assert "T7_j0" in str(timeline)


CALLS: dict[str, Callable[[object], object]] = {
    "simulate": lambda value: simulate(two_layers(2), layer_inputs(2), overlap=value),  # pyright: ignore[reportArgumentType]
    "plan": lambda value: plan(two_layers(2), overlap=value),  # pyright: ignore[reportArgumentType]
    "timeline": lambda value: two_layers(2).timeline(overlap=value),  # pyright: ignore[reportArgumentType]
    "execute": lambda value: two_layers(1).execute(layer_inputs(1), overlap=value),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_word_is_repeated(call: str) -> None:
    with pytest.raises(UserValueError, match=rf"{call}\(overlap='on'\): takes 'auto', 'off'"):
        CALLS[call]("on")
    with pytest.raises(UserTypeError, match=rf"{call}\(overlap=True\)"):
        CALLS[call](True)


@pytest.mark.parametrize("call", ["simulate", "plan", "timeline"])
def test_nothing_can_be_raced_without_devices(call: str) -> None:
    with pytest.raises(UserValueError, match=rf"{call}\(overlap='require'\): forms are raced on"):
        CALLS[call]("require")


def test_what_moves_nothing_has_no_required_form() -> None:
    with pytest.raises(Unsupported, match=r"overlap='require'.*nothing moves between the ranks"):
        CALLS["execute"]("require")
    fd = two_layers(1)
    fd.execute(layer_inputs(1))
    assert fd.fec.overlap() is None and "-- overlap --" not in fd.explain()


def test_counts_are_checked() -> None:
    with pytest.raises(UserValueError, match=r"Overlap.chunks\(1\): must be at least 2"):
        Overlap.chunks(1)
    with pytest.raises(UserTypeError, match=r"Overlap\.peers"):
        Overlap.peers(True)
    names = ["2 chunks", "4 chunks", "8 chunks", "peers", "peers, 2 pieces"]
    assert list(map(str, CANDIDATES)) == names and str(Overlap.plain()) == "plain"


def test_the_option_holds_for_calls_that_do_not_say() -> None:
    off = with_options(NO_OPTIONS, ["overlap(off)"])
    assert read_overlap("execute", None, NO_OPTIONS) == "auto"
    assert read_overlap("execute", None, off) == "off"
    assert read_overlap("execute", "require", off) == "require"
    assert form_unmeasured("plan", None) == PLAIN
    with pytest.raises(UserError, match=r"enable option overlap\(on\): takes one of auto, off"):
        with_options(NO_OPTIONS, ["overlap(on)"])


# The gate, and what is written.


def gate(rows: int, inner: int = 4096) -> str | None:
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x, w = fd.define_tensor([-1, -1]), fd.define_tensor([-1, -1])
        y = fd.ops.linear(x, w)
        place(mesh, {1: X}, x, w)
        place(mesh, {}, y)
        fd.add_output(y)

    program = parse_program(repr(define(build).fusion))
    compilation = compile(program, signature_of([torch.ones(2, 2)] * 2), kernels=False)
    sizes = {"i0": rows, "i1": inner, "i2": 1024}
    return reason_against_race(compilation, sizes, CPU)


def test_small_communications_and_small_gains_are_not_raced() -> None:
    assert gate(LEAST_BYTES // 2 // (4 * 1024)) == (
        "communications bring 512 KiB to a rank; forms are raced from 1.00 MiB on"
    )
    assert gate(1024) is None
    assert "perfect overlap would save" in (gate(1024, inner=1 << 24) or "")


def test_sizes_of_one_class_share_a_choice() -> None:
    assert size_class({"b": 513, "a": 1}) == size_class({"a": 1, "b": 1023})
    assert size_class({"a": 1024}) != size_class({"a": 1023})


def test_a_choice_comes_back_as_it_was_written() -> None:
    two = Overlap.chunks(2)
    rows = (RaceRow(PLAIN, 2.0), RaceRow(two, 1.0, 0.5, 0.6), RaceRow(CHUNKS[2], None, error="no"))
    choice = OverlapChoice(two, "race", "2 chunks takes 0.500 of the plain form's time", rows)
    back = choice_as_read(written_choice(choice), (PLAIN, two, CHUNKS[2]), "disk")
    assert back == OverlapChoice(two, "disk", choice.reason, rows)
    assert choice_as_read(written_choice(choice), (PLAIN,), "disk") is None
    assert choice_as_read({"form": 3}, (PLAIN,), "disk") is None
