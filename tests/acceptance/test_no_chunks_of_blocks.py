"""Where there are no chunks along the axis that ranks share, and what says so."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from chunk_programs import KINDS, pieces, product
from host_loops import chunks, define, dense, loops
from meshfuse import FusionDefinition
from meshfuse.facts.overlap_form import CANDIDATES
from meshfuse.ir.parser import parse_program
from meshfuse.multidevice import Overlap
from meshfuse.pipeline import forms_of, outline_program
from sharded_runs import X, integers, mesh_of, place, run


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
