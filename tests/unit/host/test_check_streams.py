"""The checker on loops and streams: real programs are clean, every planted fault is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

import pytest

from chunk_programs import product
from golden_text import GoldenCheck
from host_loops import define, gathered_rows
from looped_programs import (
    added_columns,
    added_in_chunks_of_any_size,
    nested,
    of_any_size,
    two_layers,
    two_loops,
    updated,
)
from meshfuse import FusionDefinition
from meshfuse.base.options import NO_OPTIONS, with_options
from meshfuse.expr import symbol
from meshfuse.facts.overlap_form import PLAIN, Overlap
from meshfuse.host.assumed_sizes import assumed_sizes
from meshfuse.host.check import check_host_program, check_ranks
from meshfuse.host.clocks import Marks, Timelines
from meshfuse.host.events import CALLER
from meshfuse.host.nodes import Communicate, HostProgram, WaitEvent
from meshfuse.host.regions import WHOLE, Region, chunk_of, covers, overlap, view_of
from meshfuse.host.symbols import Covers, Divides
from meshfuse.host.unroll import unrolled
from meshfuse.ir.axes import TensorName
from meshfuse.pipeline import outline_program
from peer_programs import (
    gather_then_multiply,
    multiply_then_scatter,
    multiply_then_sum,
    pipelined_mlp,
    scatter_pieces,
)
from planted_faults import PLANTERS, ranks_of
from planted_in_loops import count_found
from planted_stream_faults import LOOP_PLANTERS, SOUND_CHANGES


def outlined(fd: FusionDefinition, streams: int = 4, form: Overlap = PLAIN) -> HostProgram:
    options = with_options(NO_OPTIONS, [f"number_of_streams({streams})"])
    return outline_program(fd.fusion.recording.program, form, options).host


PROGRAMS: dict[str, Callable[[], HostProgram]] = {
    "gathered": lambda: outlined(gathered_rows(2, 5, activated=True), 2),
    "gathered_often": lambda: outlined(gathered_rows(2, 24, activated=True), 4),
    "gathered_on_few": lambda: outlined(gathered_rows(2, 3, activated=True), 4),
    "added": lambda: outlined(define(added_columns), 2),
    "added_on_four": lambda: outlined(define(added_columns), 4),
    "added_in_chunks": lambda: outlined(define(added_in_chunks_of_any_size), 4),
    "added_in_chunks_on_three": lambda: outlined(define(added_in_chunks_of_any_size), 3),
    "two_loops": lambda: outlined(define(two_loops), 2),
    "nested": lambda: outlined(define(nested), 2),
    "of_any_size": lambda: outlined(define(of_any_size), 4),
    "updated": lambda: outlined(define(updated), 2),
    "layers": lambda: outlined(two_layers(), 2, Overlap.chunks(4)),
    "layers_in_two": lambda: outlined(two_layers(), 4, Overlap.chunks(2)),
    "fetched": lambda: outlined(gather_then_multiply(3, 12, epilogue=True)),
    "fetched_in_pieces": lambda: outlined(gather_then_multiply(4, 16, pieces=2), 2),
    "fetched_in_order": lambda: outlined(gather_then_multiply(3, 6, rotated=False), 2),
    "delivered": lambda: outlined(multiply_then_scatter(3, 6, 6), 2),
    "delivered_in_pieces": lambda: outlined(
        scatter_pieces(3, 12, 6, epilogue=True), 4, Overlap.peers(2)
    ),
    # as many streams as pieces, or fewer, would keep sums in order without an event
    "delivered_on_few": lambda: outlined(scatter_pieces(2, 8, 4), 3, Overlap.peers(2)),
    "pipelined": lambda: outlined(pipelined_mlp(4, 8, 8)),
    "summed": lambda: outlined(multiply_then_sum(3, 6, 6, epilogue=True), 2, Overlap.peers()),
    "summed_in_pieces": lambda: outlined(multiply_then_sum(2, 16, 4), 4, Overlap.peers(4)),
    "gathered_in_pieces": lambda: outlined(product("gather", 2, 10, 5), 2),
    "activated_in_pieces": lambda: outlined(product("gather", 3, 6, 3, activated=True), 2),
    "scattered_in_pieces": lambda: outlined(product("scatter", 3, 7, 4), 4),
}


@lru_cache(None)
def programs() -> dict[str, HostProgram]:
    return {name: make() for name, make in PROGRAMS.items()}


def test_real_programs_are_clean() -> None:
    for name, program in programs().items():
        assert check_host_program(program) == (), name
        everyone = dict.fromkeys(ranks_of(program) or [0], program)
        assert check_ranks(everyone) == (), name


@pytest.mark.parametrize("planter", LOOP_PLANTERS)
def test_planted_faults_are_found(planter: str) -> None:
    assert count_found(LOOP_PLANTERS[planter], programs()) >= 2


@pytest.mark.parametrize("planter", PLANTERS)
def test_faults_outside_of_loops_are_found_beside_them(planter: str) -> None:
    for name, program in programs().items():
        for planted in PLANTERS[planter](program):
            faults = planted.check()
            assert any(map(planted.is_named_by, faults)), (name, planted, list(map(str, faults)))


@pytest.mark.parametrize("change", SOUND_CHANGES)
def test_what_is_still_in_order_is_sound(
    change: Callable[[HostProgram], Iterator[HostProgram]],
) -> None:
    found = [changed for program in programs().values() for changed in change(program)]
    assert len(found) >= 2
    for program in found:
        assert check_host_program(program) == ()


def test_a_race_names_both_sides(golden: GoldenCheck) -> None:
    """The first place of each planter, and the first fault there that is of its kind."""
    lines: list[str] = []
    for name, plant in LOOP_PLANTERS.items():
        spoilt = (planted for program in programs().values() for planted in plant(program))
        planted = next(spoilt)
        fault = next(fault for fault in planted.check() if fault.kind in planted.wanted)
        lines += [f"{name}:", f"  {fault}"]
    golden("host_faults_on_streams", "\n".join(lines))


def test_a_rank_of_its_own_regions_is_looked_at_itself() -> None:
    """Where chunks depend on the rank, the first stands for all but the last."""
    program = programs()["fetched"]
    planted = next(LOOP_PLANTERS["chunks_begin_at_the_same_place"](program))
    assert {fault.ranks for fault in planted.check()} == {(0, 1), (2,)}


# How many iterations are looked at.


def numbers_of(host: HostProgram) -> list[int]:
    return [node.number for node in unrolled(host).program.body if isinstance(node, Communicate)]


def test_a_loop_on_streams_shows_who_follows_whom_and_who_is_last() -> None:
    assert numbers_of(programs()["gathered"]) == list(range(5))
    shown = unrolled(programs()["gathered_often"])
    assert numbers_of(programs()["gathered_often"]) == [0, 1, 2, 3, 4, 20, 21, 22, 23]
    streams = {there.indices["j0"]: there.stream for there in shown.issued if there.stream >= 0}
    assert streams == {k: k % 4 for k in (0, 1, 2, 3, 4, 20, 21, 22, 23)}
    joins = [node for node in shown.program.body if isinstance(node, WaitEvent)][-4:]
    assert [str(join.instance) for join in joins] == ["23 - j1"] * 4


def test_a_loop_on_one_stream_shows_the_first_two_and_the_last() -> None:
    assert numbers_of(outlined(gathered_rows(2, 24, activated=True), 1)) == [0, 1, 23]


def test_sizes_that_a_call_gives_are_assumed_as_it_might_give_them() -> None:
    program, x = programs()["of_any_size"], TensorName("T0")
    rows = assumed_sizes(program)["i0"]
    assert rows > 1000 and rows % 2 and rows % 3
    rows_in_eights = Divides(8, symbol("i0", 0), x)
    assert assumed_sizes(replace(program, demands=(rows_in_eights,)))["i0"] == 8 * 37
    few_rows = Covers(6, symbol("i0", 0), x)
    assert assumed_sizes(replace(program, demands=(few_rows,)))["i0"] == 6


# Regions.

ROWS = chunk_of(WHOLE, 0, 4, 4)
TURNED = view_of(ROWS, "turned")
BLOCKS = view_of(WHOLE, (0, 2))


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        (ROWS, chunk_of(WHOLE, 0, 8, 4), False),
        (ROWS, chunk_of(WHOLE, 0, 7, 4), True),
        (ROWS, chunk_of(WHOLE, 1, 0, 4), True),
        (ROWS, WHOLE, True),
        (ROWS, chunk_of(WHOLE, 0, 4, 0), False),
        (ROWS, chunk_of(ROWS, 0, 2, 9), True),
        (chunk_of(ROWS, 1, 0, 2), chunk_of(ROWS, 1, 2, 2), False),
        (chunk_of(ROWS, 0, 0, 2), chunk_of(ROWS, 0, 2, 2), False),
        (chunk_of(ROWS, 0, 2, 9), chunk_of(WHOLE, 0, 8, 1), False),
        (TURNED, chunk_of(WHOLE, 0, 0, 4), False),
        (view_of(WHOLE, "turned"), ROWS, True),
        (chunk_of(TURNED, 0, 0, 2), chunk_of(TURNED, 0, 2, 2), False),
        (chunk_of(TURNED, 0, 0, 2), chunk_of(view_of(ROWS, "cut"), 0, 2, 2), True),
        (chunk_of(BLOCKS, 1, 0, 2), chunk_of(BLOCKS, 1, 2, 2), False),
        (chunk_of(BLOCKS, 1, 0, 3), chunk_of(BLOCKS, 1, 2, 2), True),
        (chunk_of(BLOCKS, 1, 0, 2), chunk_of(view_of(WHOLE, (0, 3)), 1, 2, 2), True),
        (chunk_of(BLOCKS, 1, 0, 2), ROWS, True),
    ],
)
def test_regions_that_meet(one: Region, other: Region, *, meet: bool) -> None:
    assert overlap(one, other) is overlap(other, one) is meet


def test_what_covers_what() -> None:
    assert covers(WHOLE, ROWS) and covers(ROWS, chunk_of(ROWS, 1, 0, 2)) and covers(ROWS, TURNED)
    assert covers(TURNED, chunk_of(TURNED, 0, 0, 1))
    assert not covers(ROWS, WHOLE)
    assert not covers(ROWS, chunk_of(WHOLE, 0, 7, 2))
    assert not covers(TURNED, ROWS)
    assert not covers(chunk_of(WHOLE, 1, 0, 2), ROWS)


# Streams as timelines.


def test_a_stream_knows_what_it_has_waited_for() -> None:
    time = Timelines()
    time.step(0, CALLER)
    made, entry = time.now(), time.mark()
    time.step(1, stream=0)
    assert not time.knows(made)
    time.learn(entry)
    assert time.knows(made)
    transfer = time.begin(number=7)
    time.step(2, stream=1)
    assert not time.knows(made)
    time.end(transfer)
    assert time.knows(made) and time.knows(transfer.moment)
    assert not time.knows(transfer.moment, stream=0)
    time.step(3, stream=0)
    later = time.begin(number=8)
    assert later.moment.timeline != transfer.moment.timeline
    assert not time.knows(transfer.moment)


def test_an_iteration_that_is_not_shown_is_taken_for_one_with_the_same_index_in_the_others() -> (
    None
):
    """for_loop(j0, 10) { for_loop(j1, 2) { record(0, 2*j0 + j1) } }, of j0 0 to 2 and 7 to 9."""
    marks = Marks()
    for instance in range(6):
        marks.add(instance, {instance: 1}, {2: 5} if instance >= 4 else {})
    assert [marks.find(n) for n in (3, 4, 5)] == [{3: 1}, {4: 1}, {5: 1}]
    assert [marks.find(n) for n in (12, 13)] == [{4: 1}, {5: 1}]
    assert [marks.find(n) for n in (-1, 14, 15)] == [None] * 3


def test_two_loops_of_which_iterations_are_not_shown() -> None:
    """record(0, 9*j0 + j1), shown: of j0 0 and 4, of j1 0, 1 and 8."""
    marks = Marks()
    for inner in (0, 1, 8):
        marks.add(inner, {inner: 1}, {9: 4} | ({1: 7} if inner == 1 else {}))
    found = [marks.find(9 * j0 + j1) for j0 in range(4) for j1 in range(9)]
    assert found == ([{0: 1}] + [{1: 1}] * 7 + [{8: 1}]) * 4
    assert marks.find(36) is None
