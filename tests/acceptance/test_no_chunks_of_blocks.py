"""Where there are no chunks along the axis that ranks share, and what says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import linear

from chunk_programs import KINDS, pieces, product
from host_loops import chunks, define, dense, loops
from meshfuse import FusionDefinition, TensorView
from meshfuse.facts.overlap_form import CANDIDATES
from meshfuse.ir.parser import parse_program
from meshfuse.multidevice import Overlap
from meshfuse.pipeline import forms_of, outline_program
from sharded_runs import X, integers, mesh_of, place, run, without_kernels


def notes_on_streams(fd: FusionDefinition) -> list[str]:
    notes = outline_program(parse_program(repr(fd.fusion))).notes
    return [note.reason for note in notes if note.kind == "not_streamed"]


def test_blocks_of_unequal_sizes_are_gathered_at_once() -> None:
    mesh = mesh_of(2)

    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 7, 4), dense(fd, 5, 4)
        y = fd.ops.linear(x, w)
        place(mesh, {0: X}, x)
        place(mesh, {}, w, y)
        pieces(y, 0, 2, 2)
        fd.add_output(y)

    fd, x, w = define(build), integers(7, 4), integers(5, 4)
    run(fd, [x, w], [linear(x, w)])
    assert loops(fd.fec.host_program()) == []
    [reason] = notes_on_streams(fd)
    assert reason.startswith("it is made as a whole: ranks may hold unequal parts of the chunks")


def uneven(rows: int) -> FusionDefinition:
    mesh = mesh_of(2)
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([rows, 4], contiguity=True), dense(fd, 5, 4)
        y = fd.ops.linear(x, w)
        place(mesh, {0: X}, x)
        place(mesh, {}, w, y)
        fd.add_output(y)
    return fd


@pytest.mark.parametrize("rows", [7, -1])
def test_a_form_says_why_it_is_none(rows: int) -> None:
    """Sizes that do not divide, and those that are known only when run."""
    found, notes = forms_of(parse_program(repr(uneven(rows).fusion)), [Overlap.chunks(2)])
    assert found == ()
    assert "ranks may hold unequal parts of axis a0 of T0" in notes[0].reason


def test_a_form_wants_as_many_rows_as_chunks() -> None:
    found, notes = forms_of(parse_program(repr(product("gather", 2, 3).fusion)), CANDIDATES)
    assert Overlap.chunks(2) in found and Overlap.chunks(4) not in found
    assert any("a rank holds 3 of axis" in note.reason for note in notes)


@pytest.mark.parametrize("kind", KINDS)
def test_the_race_has_all_counts(kind: str) -> None:
    found, _ = forms_of(parse_program(repr(product(kind, 2, 8).fusion)), CANDIDATES)
    assert found[:3] == tuple(Overlap.chunks(count) for count in (2, 4, 8))


def test_sums_are_not_added_to_pieces() -> None:
    def build(fd: FusionDefinition) -> None:
        x, w = dense(fd, 12, 6), dense(fd, 6, 5)
        y = fd.ops.matmul(x, w)
        pieces(y, 0, 3, 2)
        chunks(y, 4, 2)
        fd.add_output(y)

    fd, x, w = define(build), integers(12, 6), integers(6, 5)
    assert torch.equal(fd.execute([x, w])[0], x @ w)
    [reason] = notes_on_streams(fd)
    assert "add to what another one has in several pieces" in reason


def test_a_leaf_that_no_loop_can_have_leaves_no_loops_behind() -> None:
    """What was split above it is a kernel's to schedule."""

    def build(fd: FusionDefinition) -> None:
        x = dense(fd, 6, 4)
        y = fd.ops.cumsum(x, 0)
        z = fd.ops.relu(y)
        y.outer_split(0, 2)
        chunks(y, 1, 3)
        fd.add_output(z)

    x = integers(6, 4)
    assert torch.equal(define(build).execute([x])[0], x.cumsum(0).relu())


def halves(tensor: TensorView) -> None:
    """[r, 2, ..], which binds nothing."""
    tensor.outer_split(2, 2)


def chunks_of_halves(tensor: TensorView) -> None:
    """[r, 2, 2@stream, ..] of 3 columns or 5: the halves are not of one size."""
    tensor.outer_split(2, 2)
    chunks(tensor, 3, 2)


@pytest.mark.parametrize("d", [0, 1, 2])
@pytest.mark.parametrize("columns", [3, 5, 8])
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("cuts", [halves, chunks_of_halves])
def test_a_sum_in_a_loop_forgets_what_splits_its_other_axes(
    cuts: Callable[[TensorView], None], kernels: bool, columns: int, d: int
) -> None:
    """Where no loop can be along them: what is added to is a kernel's to schedule."""
    with FusionDefinition() as fd:
        x, y = dense(fd, 5, columns), dense(fd, 5, columns)
        total = fd.ops.sum(fd.ops.mul(x, y), [0])
        if d:
            place(mesh_of(d), {}, x, y, total)
        chunks(total, 0, 3)
        cuts(total)
        fd.add_output(fd.ops.relu(total))
    values = [integers(5, columns), integers(5, columns) + 1]
    wanted = (values[0] * values[1]).sum(0).relu()
    with nullcontext() if kernels else without_kernels():
        if d:
            run(fd, values, [wanted])
        else:
            assert torch.equal(fd.execute(values)[0], wanted)
    assert len(loops(fd.fec.host_program())) == 1
    assert len(notes_on_streams(fd)) == (cuts is chunks_of_halves)
