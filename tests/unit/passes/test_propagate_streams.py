"""Where stream leaves travel, and which go."""

from __future__ import annotations

import pytest

from meshfuse.expr import const
from meshfuse.facts.streams import Cut, Span, cut_axis, find_stream, stream_leaves, streams_of
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.program import Program
from meshfuse.passes.pipeline import run_passes
from program_recorder import Recorder

X, STREAM = ParallelType.mesh_x, ParallelType.stream
LINE = make_mesh(range(2))


def split(recorder: Recorder, tensor: TensorName, leaf: int, factor: int, *, inner: bool) -> None:
    recorder.program = transforms.split(recorder.program, tensor, leaf, factor, inner_split=inner)


def stream(recorder: Recorder, tensor: TensorName, leaf: int) -> None:
    axis = recorder.program.schedule(tensor).leaves[leaf]
    recorder.program = transforms.parallelize(recorder.program, tensor, axis, STREAM)


def chunks(recorder: Recorder, tensor: TensorName, leaf: int, count: int) -> None:
    split(recorder, tensor, leaf, count, inner=False)
    stream(recorder, tensor, leaf)


def streamed(program: Program) -> dict[str, list[str]]:
    """The tensors with stream leaves, with count and width of their chunks."""
    found = {name: streams_of(program, name) for name in program.fusion.tensors}
    return {
        name: [f"{own.span.count} of {own.span.width}" for own in streams]
        for name, streams in found.items()
        if streams
    }


def notes_of(recorder: Recorder) -> tuple[Program, list[str]]:
    program, notes = run_passes(recorder.program)
    return program, [str(note) for note in notes if note.stage == "propagate_streams"]


def test_forward_and_backward_but_not_to_inputs() -> None:
    recorder = Recorder()
    x = recorder.input([7, 4])
    a = recorder.pointwise("exp", x)
    b = recorder.pointwise("neg", a)
    c = recorder.pointwise("sin", b)
    recorder.output(c)
    chunks(recorder, b, 0, 3)
    program, notes = notes_of(recorder)
    assert streamed(program) == {name: ["3 of 3"] for name in (a, b, c)}
    assert notes == []


def test_blocks_that_the_inner_split_gives_keep_their_width() -> None:
    recorder = Recorder()
    x = recorder.input([9, 4])
    a = recorder.pointwise("exp", x)
    b = recorder.pointwise("neg", a)
    recorder.output(b)
    split(recorder, b, 0, 4, inner=True)
    stream(recorder, b, 0)
    assert streamed(notes_of(recorder)[0]) == {name: ["3 of 4"] for name in (a, b)}


def test_what_an_input_says_goes_to_its_readers() -> None:
    recorder = Recorder()
    x = recorder.input([6, 4])
    a = recorder.pointwise("exp", x)
    recorder.output(a)
    chunks(recorder, x, 1, 2)
    assert streamed(notes_of(recorder)[0]) == {a: ["2 of 2"]}


def test_a_reduced_leaf_stays_where_it_is_and_goes_back() -> None:
    recorder = Recorder()
    x = recorder.input([6, 4])
    a = recorder.pointwise("exp", x)
    total = recorder.add(build.reduction, "sum", a, [0])
    b = recorder.pointwise("neg", total)
    recorder.output(b)
    chunks(recorder, total, 0, 2)
    program, _ = notes_of(recorder)
    assert streamed(program) == {a: ["2 of 3"], total: ["2 of 3"]}
    assert [own.is_reduced for own in streams_of(program, total)] == [True]


def test_a_maximum_is_not_added_up() -> None:
    recorder = Recorder()
    x = recorder.input([6, 4])
    largest = recorder.add(build.reduction, "max", x, [0])
    recorder.output(largest)
    chunks(recorder, largest, 0, 2)
    program, notes = notes_of(recorder)
    assert streamed(program) == {}
    assert notes == [
        f"propagate_streams: {largest}: not_streamed: it is made as a whole: only plain sums and "
        "contractions without a bias add up over a loop"
    ]


def test_chunks_are_pieces_of_what_a_rank_holds() -> None:
    """Every second row, and pieces of blocks of three."""
    recorder = Recorder()
    x = recorder.input([6, 4])
    a = recorder.pointwise("exp", x)
    b = recorder.pointwise("neg", x)
    recorder.output(a)
    recorder.output(b)
    split(recorder, a, 0, 2, inner=True)
    stream(recorder, a, 1)
    split(recorder, b, 0, 2, inner=False)
    chunks(recorder, b, 1, 3)
    program, notes = notes_of(recorder)
    assert (streamed(program), notes) == ({a: ["2 of 1"], b: ["3 of 1"]}, [])
    found = [
        cut_axis(program, name, s.axis, s.span)
        for name in (a, b)
        for s in streams_of(program, name)
    ]
    assert [(str(cut.pieces), str(cut.held)) for cut in found if cut] == [("3", "2"), ("2", "3")]


@pytest.mark.parametrize("inner", [True, False])
def test_pieces_of_unequal_blocks_are_refused(inner: bool) -> None:
    recorder = Recorder()
    x = recorder.input([7, 4])
    a = recorder.pointwise("exp", x)
    recorder.output(a)
    split(recorder, a, 0, 2, inner=inner)
    stream(recorder, a, 1)
    program, notes = notes_of(recorder)
    assert streamed(program) == {}
    assert "ranks may hold unequal parts of the chunks, or blocks, of axis" in notes[0]
    assert program.schedule(a).steps == ()


def test_pieces_spread_to_the_parts_of_ranks() -> None:
    """What is gathered is cut in each rank's block, and so are the blocks."""
    recorder = Recorder()
    x = recorder.input([8, 4])
    a = recorder.pointwise("exp", x)
    b = recorder.pointwise("neg", a)
    recorder.output(b)
    for tensor in (x, a):
        recorder.block(LINE, tensor, 0)
    recorder.replicate(LINE, b)
    split(recorder, b, 0, 2, inner=False)
    chunks(recorder, b, 1, 2)
    program, notes = notes_of(recorder)
    assert notes == [] and streamed(program) == {name: ["2 of 2"] for name in (a, "T3", b)}


@pytest.mark.parametrize(("rows", "is_cut"), [(8, True), (7, False)])
def test_chunks_within_blocks_of_ranks_that_are_even(rows: int, is_cut: bool) -> None:
    recorder = Recorder()
    x = recorder.input([rows, 4])
    a = recorder.pointwise("exp", x)
    recorder.output(a)
    recorder.block(LINE, a, 0)
    recorder.block(LINE, x, 0)
    chunks(recorder, a, 1, 3)
    program, notes = notes_of(recorder)
    assert streamed(program) == ({a: ["3 of 2"]} if is_cut else {})
    assert len(notes) == (not is_cut)


def test_what_a_rank_holds_of_a_chunk() -> None:
    """Chunks of 4 of all ranks: of each rank the next 2 of its 6."""
    recorder = Recorder()
    x = recorder.input([12])
    recorder.replicate(LINE, x)
    split(recorder, x, 0, 3, inner=False)
    split(recorder, x, 1, 2, inner=False)
    recorder.bind(x, 1, X)
    axis = recorder.program.tensor(x).logical[0].name
    span = Span(const(12), const(1), const(3), const(4))
    cut = cut_axis(recorder.program, x, axis, span)
    assert isinstance(cut, Cut)
    assert [str(cut.start(const(k))) for k in range(3)] == ["0", "2", "4"]
    assert (str(cut.held_extent(const(1))), str(cut.extent(const(1)))) == ("2", "4")
    blocks = Span(const(12), const(2), const(3), const(2))
    assert cut_axis(recorder.program, x, axis, blocks) is None
    blocks = Span(const(12), const(3), const(2), const(2))
    assert cut_axis(recorder.program, x, axis, blocks) is None
    blocks = Span(const(12), const(6), const(2), const(1))
    pieces = cut_axis(recorder.program, x, axis, blocks)
    assert pieces is not None
    assert (str(pieces.pieces), str(pieces.held), str(pieces.extent(const(1)))) == ("3", "2", "6")


def test_the_last_chunks_of_a_short_axis_are_empty() -> None:
    recorder = Recorder()
    x = recorder.input([5])
    chunks(recorder, x, 0, 4)
    [leaf] = stream_leaves(recorder.program, x)
    found = find_stream(recorder.program, x, leaf)
    assert not isinstance(found, str)
    cut = cut_axis(recorder.program, x, found.axis, found.span)
    assert cut is not None
    assert [str(cut.held_extent(const(k))) for k in range(4)] == ["2", "2", "1", "0"]
