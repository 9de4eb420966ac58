"""Shardings derived from loop nests, by their one-line text."""

from __future__ import annotations

import pytest

from meshfuse.base.errors import Unsupported, UserError
from meshfuse.facts.sharding import (
    axis_sharded_on,
    describe,
    local_extents,
    reduced_mesh_axes,
    sharding_of,
    written_sharding_of,
)
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType, make_mesh
from program_recorder import Recorder

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
LINE, SQUARE = make_mesh(range(2)), make_mesh([[0, 1], [2, 3]])


def text(recorder: Recorder, tensor: TensorName) -> str:
    return describe(sharding_of(recorder.program, tensor)).split(" on ")[0]


def test_block_cyclic_and_strided() -> None:
    for factors, inner, bound, expected in (
        ([2], False, 1, "[3, mesh_x{2} 4]"),
        ([2], True, 2, "[3, 4 mesh_x{2}]"),
        ([2, 2], True, 2, "[3, 2 mesh_x{2} 2]"),
    ):
        recorder = Recorder()
        x = recorder.input([3, 8])
        recorder.replicate(LINE, x)
        for factor in factors:
            recorder.program = transforms.split(recorder.program, x, 1, factor, inner)
        recorder.bind(x, bound, X)
        assert text(recorder, x) == expected
        assert [str(size) for size in local_extents(recorder.program, x)] == ["3", "4"]


def test_a_whole_axis_is_one_digit_however_it_is_written() -> None:
    recorder = Recorder()
    x, y, z = recorder.input([2, 3]), recorder.input([2, 3]), recorder.input([-1, 3])
    recorder.whole(LINE, x, 0)
    recorder.block(LINE, y, 0)
    recorder.whole(LINE, z, 0)
    assert text(recorder, x) == text(recorder, y) == text(recorder, z) == "[mesh_x{2}, 3]"


def test_local_splits_do_not_show() -> None:
    recorder = Recorder()
    x, y = recorder.input([-1, 12]), recorder.input([-1, 12])
    recorder.block(LINE, x, 1)
    recorder.block(LINE, y, 1)
    recorder.program = transforms.split(recorder.program, y, 2, 3)
    recorder.program = transforms.split(recorder.program, y, 0, 4)
    assert text(recorder, x) == "[i0, mesh_x{2} 6]"
    assert sharding_of(recorder.program, x).axes[1] == sharding_of(recorder.program, y).axes[1]


def test_two_mesh_axes_on_one_axis_keep_their_order() -> None:
    recorder = Recorder()
    x = recorder.input([-1])
    recorder.block(SQUARE, x, 0, Y)
    recorder.block(SQUARE, x, 1, X)
    assert text(recorder, x) == "[mesh_y{2} mesh_x{2} (i0 + 3) // 4]"


def test_mesh_axes_of_one_rank_are_dropped() -> None:
    recorder = Recorder()
    x = recorder.input([-1])
    recorder.block(make_mesh([0]), x, 0)
    assert text(recorder, x) == "[i0]"
    written = written_sharding_of(recorder.program, x)
    assert axis_sharded_on(written, X) == 0
    assert describe(written) == "[mesh_x{1} i0] on DeviceMesh{0}"


def test_a_merge_gives_the_mesh_digit_to_its_outer_axis() -> None:
    recorder = Recorder()
    x = recorder.input([4, -1])
    recorder.program = transforms.merge(recorder.program, x, 0, 1)
    recorder.block(LINE, x, 0)
    assert text(recorder, x) == "[mesh_x{2} 2, i0]"


def test_a_merge_whose_digits_straddle_is_refused() -> None:
    recorder = Recorder()
    x = recorder.input([3, 4])
    recorder.program = transforms.merge(recorder.program, x, 0, 1)
    recorder.block(LINE, x, 0)
    with pytest.raises(Unsupported) as raised:
        sharding_of(recorder.program, x)
    assert str(raised.value) == (
        "sharding of T0: axis a2 merges a0:i{3} and a1:i{4}, and what mesh_x leaves to a rank of "
        "it, mesh_x{2} 6, is no part of each; split a0 or a1 over mesh_x before merging"
    )


def test_a_merge_is_dealt_out_where_parts_are_whole() -> None:
    """Whole rows, even if not all ranks have as many; every third column; unknown many rows."""
    for shape, factor, inner, expected in (
        ([5, 2], 3, False, "[mesh_x{3} 2, 2]"),
        ([5, 6], 3, True, "[5, 2 mesh_x{3}]"),
        ([-1, 6], 3, False, "[mesh_x{3} (i0 + 2) // 3, 6]"),
    ):
        recorder = Recorder()
        x = recorder.input(shape)
        recorder.replicate(make_mesh(range(3)), x)
        recorder.program = transforms.merge(recorder.program, x, 0, 1)
        recorder.program = transforms.split(recorder.program, x, 0, factor, inner)
        recorder.bind(x, int(inner), X)
        assert text(recorder, x) == expected


def test_a_mesh_axis_that_is_not_there() -> None:
    recorder = Recorder()
    x = recorder.input([2, 4])
    recorder.bind(x, 0, Y)
    schedule = recorder.program.schedule(x)
    recorder.program = recorder.program.with_schedule(
        x, type(schedule)(schedule.leaves, bindings=schedule.bindings, mesh=LINE)
    )
    with pytest.raises(UserError, match="mesh_y is no axis of"):
        sharding_of(recorder.program, x)


def test_a_sharded_reduction_leaves_the_tensor_replicated() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    y = recorder.add(build.reduction, "max", x, [0])
    recorder.block(LINE, y, 0)
    recorder.block(LINE, y, 2)
    sharding = sharding_of(recorder.program, y)
    assert describe(sharding) == "[mesh_x{2} 3] on DeviceMesh{0 1}"
    assert axis_sharded_on(sharding, X) == 0
    assert axis_sharded_on(sharding, Y) == -1
    assert reduced_mesh_axes(recorder.program, y) == ((X, "a2"),)
