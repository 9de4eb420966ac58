"""The checker on what data comes where: every planted fault is found, at uneven sizes, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch

from chunk_programs import product
from golden_text import GoldenCheck
from host_loops import STREAM, define, gathered_rows
from looped_programs import (
    added_columns,
    added_in_chunks_of_columns,
    columns_of_any_rows,
    columns_of_one_term,
    nested,
    of_any_size,
    terms_of_any_rows,
    two_layers,
    two_loops,
    updated,
)
from meshfuse import FusionDefinition
from meshfuse.base.options import NO_OPTIONS, with_options
from meshfuse.expr import evaluate
from meshfuse.facts.overlap_form import PLAIN, Overlap
from meshfuse.host.assumed_sizes import assumed_sizes, other_sizes
from meshfuse.host.check import check_host_program
from meshfuse.host.indices import ZERO, Indices, Terms, Twice, added, differ, led_to, reshaped
from meshfuse.host.kernel_joints import joints_of_kernel
from meshfuse.host.nodes import HostProgram
from meshfuse.host.pieces import Pieces, Value
from meshfuse.ir.axes import TensorName
from meshfuse.pipeline import compile, outline_program
from meshfuse.runtime.arguments import signature_of
from meshfuse.runtime.torch_types import to_torch_dtype
from peer_programs import (
    gather_then_multiply,
    multiply_then_scatter,
    multiply_then_sum,
    pipelined_mlp,
    scatter_pieces,
)
from planted_data_faults import DATA_PLANTERS, SIZE_PLANTERS
from planted_in_loops import count_found
from sharded_runs import mesh_of
from transformer_layer import Sizes, define_backward

ON_STREAMS = ("chunks_shifted_by_one", "chunks_in_reverse", "all_ranks_take_the_next_owner")
"""Planters that leave all in order on several streams."""


def compiled(
    fd: FusionDefinition, *, kernels: bool, streams: int = 1, form: Overlap = PLAIN
) -> HostProgram:
    """With kernels that have bodies, or op by op. Inputs have the sizes that are assumed first."""
    program = fd.fusion.recording.program
    outlined = outline_program(program, form).host
    sizes = assumed_sizes(outlined)
    shards: list[torch.Tensor] = []
    for name in outlined.inputs:
        buffer = outlined.buffers[TensorName(name)]
        shape = [evaluate(extent, sizes) for extent in buffer.shape]
        shards.append(torch.empty(shape, dtype=to_torch_dtype(buffer.dtype)))
    options = with_options(NO_OPTIONS, [f"number_of_streams({streams})"])
    signature = signature_of(shards)
    return compile(program, signature, kernels=kernels, options=options, form=form).host


PROGRAMS: dict[str, tuple[Callable[[], FusionDefinition], Overlap]] = {
    "gathered": (lambda: gathered_rows(2, 5, activated=True), PLAIN),
    "added": (lambda: define(added_columns), PLAIN),
    "two_loops": (lambda: define(two_loops), PLAIN),
    "nested": (lambda: define(nested), PLAIN),
    "updated": (lambda: define(updated), PLAIN),
    "layers": (two_layers, Overlap.chunks(4)),
    "fetched": (lambda: gather_then_multiply(3, 12, epilogue=True), PLAIN),
    "fetched_uneven": (lambda: gather_then_multiply(3, 7), PLAIN),
    "fetched_in_pieces": (lambda: gather_then_multiply(4, 16, pieces=2), PLAIN),
    "fetched_in_order": (lambda: gather_then_multiply(3, 10, rotated=False), PLAIN),
    "delivered": (lambda: multiply_then_scatter(3, 6, 6), PLAIN),
    "delivered_uneven": (lambda: multiply_then_scatter(3, 7, 7), PLAIN),
    "delivered_in_pieces": (lambda: scatter_pieces(3, 12, 6, epilogue=True), Overlap.peers(2)),
    "delivered_in_unequal_pieces": (lambda: scatter_pieces(2, 10, 4), Overlap.peers(3)),
    "pipelined": (lambda: pipelined_mlp(4, 8, 8), PLAIN),
    "pipelined_uneven": (lambda: pipelined_mlp(3, 7, 8), PLAIN),
    "summed": (lambda: multiply_then_sum(3, 7, 6, epilogue=True), Overlap.peers()),
    "summed_in_pieces": (lambda: multiply_then_sum(3, 12, 6), Overlap.peers(2)),
    "gathered_in_pieces": (lambda: product("gather", 2, 10, 5), PLAIN),
    "activated_in_pieces": (lambda: product("gather", 3, 6, 3, activated=True), PLAIN),
    "scattered_in_pieces": (lambda: product("scatter", 3, 8, 4), PLAIN),
    "scattered_uneven": (lambda: product("scatter", 3, 7, 4), PLAIN),
    "reduced_in_chunks": (lambda: product("reduce", 2, 5, 4, activated=True), PLAIN),
    "of_any_size": (lambda: define(of_any_size), PLAIN),
    "terms_of_any_rows": (lambda: define(terms_of_any_rows), PLAIN),
    "columns_of_any_rows": (lambda: define(columns_of_any_rows), PLAIN),
}


@lru_cache(None)
def programs(streams: int = 1) -> dict[str, HostProgram]:
    """Each with kernels and without."""
    return {
        f"{name}{'' if kernels else '_op_by_op'}": compiled(
            make(), kernels=kernels, streams=streams, form=form
        )
        for name, (make, form) in PROGRAMS.items()
        for kernels in (True, False)
    }


@pytest.mark.parametrize("streams", [1, 2])
def test_real_programs_are_clean(streams: int) -> None:
    for name, program in programs(streams).items():
        assert check_host_program(program) == (), name


@pytest.mark.parametrize("planter", DATA_PLANTERS)
def test_planted_faults_are_found(planter: str) -> None:
    streams = (1, 2) if planter in ON_STREAMS else (1,)
    found = [count_found(DATA_PLANTERS[planter], programs(count)) for count in streams]
    assert sum(found) >= 8


@pytest.mark.parametrize("form", [Overlap.chunks(2), Overlap.peers()])
def test_a_layer_is_followed_as_a_whole(form: Overlap) -> None:
    """Through attention, norms, reshapes and parts of a weight for q, k and v."""
    sizes = Sizes(batch=4, tokens=8, heads=4, features=16)
    program = compiled(define_backward(sizes, mesh_of(2), True), kernels=True, form=form)
    assert count_found(DATA_PLANTERS["chunks_shifted_by_one"], {"layer": program}) >= 20


@pytest.mark.parametrize("planter", SIZE_PLANTERS)
def test_what_fits_some_sizes_only_is_found(planter: str) -> None:
    """Nothing is wrong at the sizes that are assumed first."""
    assert count_found(SIZE_PLANTERS[planter], programs()) >= 6


def test_a_fault_says_what_belongs_there(golden: GoldenCheck) -> None:
    """The first place of each planter, and the first fault there that is of its kind."""
    lines: list[str] = []
    for name, plant in {**DATA_PLANTERS, **SIZE_PLANTERS}.items():
        planted = next(planted for program in programs().values() for planted in plant(program))
        fault = next(fault for fault in planted.check() if fault.kind in planted.wanted)
        lines += [f"{name}:", f"  {fault}"]
    golden("host_faults_of_data", "\n".join(lines))


def test_sizes_differ_where_chunks_depend_on_them() -> None:
    found = [sizes["i0"] for sizes in other_sizes(programs()["terms_of_any_rows"])]
    assert found == [120, 121, 119, 1100, 5, 1, 0]
    both = [(s["i0"], s["i1"]) for s in other_sizes(programs()["columns_of_any_rows"])]
    assert (120, 120) in both and (120, 121) in both
    assert list(other_sizes(programs()["nested"])) == []


@pytest.mark.parametrize("kernels", [True, False])
def test_a_sum_that_is_added_up_chunk_by_chunk(kernels: bool) -> None:
    """A kernel has one name for what it reads of the sum, and another for what it writes there."""
    for streams in (1, 2, 4):
        program = compiled(define(added_in_chunks_of_columns), kernels=kernels, streams=streams)
        assert check_host_program(program) == ()
    program = compiled(define(added_in_chunks_of_columns), kernels=kernels)
    found = [count_found(plant, {"sum": program}) for plant in DATA_PLANTERS.values()]
    assert sum(found) >= 10


@pytest.mark.parametrize("kernels", [True, False])
def test_axes_of_one_place_that_a_kernel_may_have_exchanged(kernels: bool) -> None:
    """One is a column of 3, the other all of one term: which is which a kernel does not say."""
    program = compiled(define(columns_of_one_term), kernels=kernels)
    assert check_host_program(program) == ()


def test_loops_in_loops_are_looked_at_in_smaller_sizes() -> None:
    """Each element of [-1, -1] by itself: a million iterations of what is assumed of one loop."""

    def build(fd: FusionDefinition) -> None:
        y = fd.ops.relu(fd.define_tensor([-1, -1], contiguity=True))
        for leaf in (0, 1):
            y.axis(leaf).parallelize(STREAM)
        fd.add_output(y)

    program = compiled(define(build), kernels=False)
    sizes = [assumed_sizes(program), *other_sizes(program)]
    assert [(each["i0"], each["i1"]) for each in sizes][:3] == [(37, 37), (24, 24), (24, 25)]
    assert check_host_program(program) == ()
    found = [count_found(plant, {"elements": program}) for plant in DATA_PLANTERS.values()]
    assert sum(found) >= 2


# Indices.


def some(extent: int, *runs: range) -> Indices:
    return Indices(extent, runs)


def test_parts_of_indices() -> None:
    found = some(12, range(2, 4), range(8, 12))
    assert len(found) == 6 and str(found) == "2 to 3, 8 to 11"
    assert found.part(1, 4) == some(12, range(3, 4), range(8, 10))
    assert str(some(9, range(1, 9, 3)).part(1, 3)) == "4 to 7 by 3"
    assert Indices.all_of(3).are_all and not found.are_all


def test_indices_differ_if_they_count_the_same() -> None:
    assert differ(some(8, range(4)), some(8, range(4, 8)))
    assert differ(some(8, range(4)), some(8, range(3)))
    assert not differ(some(8, range(4)), some(1, range(1)))
    assert not differ(some(8, range(4)), None)
    assert not differ(some(8, range(4)), some(8, range(2), range(2, 4)))


def test_ranks_lead_from_their_own_indices_to_those_of_all() -> None:
    """A chunk [2@x, 2] of [2@x, 4], which is gathered."""
    named = [some(4, range(2)), some(4, range(2, 4))]
    found = [some(8, range(2, 4)), some(8, range(6, 8))]
    whole = led_to(zip(named, found, strict=True), Indices.all_of(4))
    assert whole == some(8, range(2, 4), range(6, 8))
    shifted = led_to([(some(4, range(2, 4)), some(8, range(4, 6)))], some(4, range(3, 4)))
    assert shifted == some(8, range(5, 6))
    assert (
        led_to(
            [(some(4, range(4)), f) for f in (some(8, range(4)), some(8, range(4, 8)))],
            some(4, range(4)),
        )
        == "one has index 0 where another has 4"
    )


def test_axes_that_are_reshaped() -> None:
    rows, all_four = some(8, range(6, 8)), Indices.all_of(4)
    assert reshaped([rows, all_four], [2, 4], [8]) == (some(32, range(24, 32)),)
    assert reshaped([some(32, range(24, 32))], [8], [2, 4]) == (rows, all_four)
    assert reshaped([rows, None, all_four], [2, 3, 4], [2, 12]) == (rows, None)
    assert reshaped([all_four, rows], [4, 2], [8]) == (None,)
    assert reshaped([some(8, range(3, 5)), all_four], [2, 4], [4, 2])[0] == some(16, range(6, 10))
    assert reshaped([some(9, range(3))], [3], [3, 1]) == (some(9, range(3)), None)
    assert reshaped([rows], [2], [0]) == (None,)
    one, other, both = some(2, range(1)), some(2, range(1, 2)), Indices.all_of(2)
    assert reshaped([both, other, one], [2, 1, 1], [2, 1]) == (both, None)
    assert reshaped([other, all_four], [1, 4], [4]) == (some(8, range(4, 8)),)


@pytest.mark.parametrize(
    ("sums", "wanted"),
    [
        ([(some(8, range(4)),), (some(8, range(4, 8)),)], ()),
        ([(some(8, range(2)),), (some(8, range(4, 8)),)], (some(8, range(2), range(4, 8)),)),
        ([(some(8, range(5)),), (some(8, range(4, 8)),)], Twice(some(8, range(4, 5)))),
        ([(some(8, range(2)),), (some(8, range(2)),)], Twice(some(8, range(2)))),
        ([ZERO, (some(8, range(2)),)], (some(8, range(2)),)),
        ([ZERO, ZERO], ZERO),
        ([(some(3),), (some(3),)], (some(3),)),
        ([(some(8, range(2)),), None], None),
        ([(some(8, range(2)),), ()], None),
        ([(some(6, range(0, 6, 2)),), (some(6, range(1, 6, 2)),)], ()),
        (
            [(some(4, range(2)), some(2, range(1))), (some(4, range(2, 4)), some(2, range(1)))],
            (some(2, range(1)),),
        ),
    ],
)
def test_terms_that_are_added(sums: list[Terms | None], wanted: Terms | Twice | None) -> None:
    assert added(sums) == wanted


# Memory.


def test_a_memory_is_written_in_pieces() -> None:
    memory = Pieces.placed([Indices.all_of(6), some(8, range(4, 8))])
    for low in (0, 4, 2):
        assert memory.unwritten(memory.whole) is not None
        memory.write(((low, low + 2), (0, 4)), Value((None, None)))
    assert memory.unwritten(memory.whole) is None and len(memory.pieces) == 1
    assert memory.indices(1, 1, 3) == some(8, range(5, 7))
    memory.write(((1, 3), (1, 2)), Value((None, None), ZERO))
    assert memory.unwritten(memory.whole) is None
    assert memory.value(((0, 1), (0, 4))).terms == () and memory.value(memory.whole).terms == ZERO


def test_a_memory_learns_which_indices_it_has() -> None:
    memory = Pieces.learning([4])
    memory.write(((0, 2),), Value((some(8, range(2, 4)),)))
    assert memory.unwritten(((1, 3),)) == ((2, 3),)
    assert memory.indices(0, 0, 4) is None
    memory.write(((2, 4),), Value((some(8, range(6, 8)),)))
    assert memory.indices(0, 1, 3) == some(8, range(3, 4), range(6, 7))


def test_axes_of_a_kernel_are_one_if_they_are_indexed_alike() -> None:
    program = programs()["added"]
    [kernel] = [k for k in program.kernels.values() if len(k.buffers) == 4]
    [found] = joints_of_kernel(kernel).values()
    assert found.sums
    assert [(joint.read, [axis for _, axis in joint.made]) for joint in found.met] == [
        ((("T3_j0_before", 0), ("T0_j0", 1), ("T1_j0", 1)), [0]),
        ((("T0_j0", 0), ("T1_j0", 0)), []),
    ]
