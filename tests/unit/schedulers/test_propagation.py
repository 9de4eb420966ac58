"""Schedules carried from tensor to tensor."""

from __future__ import annotations

import pytest

from kernel_programs import finished
from loop_nests import bind, bound, nest
from meshfuse.base.errors import UserError
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.program import Program
from meshfuse.schedulers.propagation import (
    bounded_transform_backward,
    inline_at,
    inline_most,
    parallelize_like,
    transform_like,
)
from program_recorder import Recorder

X, SERIAL = ParallelType.mesh_x, ParallelType.serial
GRID, VECTOR, BLOCK = ParallelType.grid_x, ParallelType.vectorize, ParallelType.block_x


def bias_program() -> tuple[Program, dict[str, TensorName]]:
    """out[i, j] = exp(x[i, j] + bias[j])."""
    r = Recorder()
    x, bias = r.input([8, 32]), r.input([32])
    stretched = r.add(build.broadcast, bias, [True, False])
    added = r.pointwise("add", x, stretched)
    out = r.pointwise("exp", added)
    r.output(out)
    names = {"x": x, "bias": bias, "stretched": stretched, "added": added, "out": out}
    return finished(r), names


def softmax_program() -> tuple[Program, dict[str, TensorName]]:
    r = Recorder()
    x = r.input([8, 32])
    largest = r.add(build.reduction, "max", x, [1])
    stretched = r.add(build.broadcast, largest, [False, True])
    out = r.pointwise("sub", x, stretched)
    r.output(out)
    return finished(r), {"x": x, "largest": largest, "stretched": stretched, "out": out}


def inlined(program: Program) -> dict[TensorName, int]:
    return {t: program.schedule(t).inline_depth for t in program.fusion.tensors}


# Splits and merges.


def test_everything_follows() -> None:
    program, t = bias_program()
    program = transforms.split(program, t["out"], 1, 4)
    program = transforms.reorder(transforms.split(program, t["out"], 0, 2), t["out"], {2: 0})
    program = transform_like(program, t["out"])
    assert nest(program, t["out"]) == ["i8", "i4", "i2", "i4"]
    assert nest(program, t["added"]) == nest(program, t["x"]) == ["i8", "i4", "i2", "i4"]
    assert nest(program, t["bias"]) == ["i8", "i4"]
    assert nest(program, t["stretched"]) == ["i8", "b1", "b2", "i4"]


def test_a_merged_axis_is_what_is_there_of_it() -> None:
    program, t = bias_program()
    program = transforms.split(transforms.merge(program, t["out"], 0, 1), t["out"], 0, 16)
    program = transform_like(program, t["out"])
    assert nest(program, t["added"]) == ["i16", "i16"]
    assert nest(program, t["bias"]) == ["i2", "i16"]


def test_selected_tensors_alone_follow() -> None:
    program, t = bias_program()
    program = transforms.split(program, t["out"], 1, 4)
    program = transform_like(program, t["out"], [t["x"]])
    assert (nest(program, t["x"]), nest(program, t["added"])) == (["i8", "i8", "i4"], ["i8", "i32"])


def test_reduced_axes_follow_and_do_not_mix_with_others() -> None:
    program, t = softmax_program()
    scheduled = transforms.split(transforms.split(program, t["out"], 1, 4), t["out"], 0, 2)
    scheduled = transform_like(scheduled, t["out"])
    assert nest(scheduled, t["largest"]) == ["i4", "i2", "r8", "r4"]
    merged = transforms.split(transforms.merge(program, t["out"], 0, 1), t["out"], 0, 16)
    merged = transform_like(merged, t["out"])
    assert nest(merged, t["x"]) == ["i16", "i16"]
    assert nest(merged, t["largest"]) == ["i8", "r32"]


def test_what_is_there_already_is_taken_as_it_is() -> None:
    program, t = bias_program()
    for tensor, factor in ((t["x"], 4), (t["added"], 8)):
        program = transforms.split(program, tensor, 1, factor)
    program = transforms.split(program, t["x"], 2, 2)
    program = transforms.split(program, t["out"], 1, 4)
    program = transforms.split(program, t["out"], 0, 2)
    program = transform_like(program, t["out"])
    assert nest(program, t["x"]) == ["i4", "i2", "i8", "i2", "i2"]
    assert nest(program, t["added"]) == ["i4", "i2", "i4", "i8"]


def test_a_bound_axis_stays_whole() -> None:
    program, t = bias_program()
    program = bind(program, t["added"], 0, GRID)
    program = transforms.split(transforms.split(program, t["out"], 1, 4), t["out"], 0, 2)
    program = transform_like(program, t["out"])
    assert nest(program, t["added"]) == ["i8", "i4", "i8"]
    assert bound(program, t["added"]) == [SERIAL, SERIAL, GRID]


def test_parts_of_a_reduction() -> None:
    """Root axes that were cut are cut alike in what is reduced, and the other way round."""
    r = Recorder()
    x = r.input([4, 12])
    z = r.pointwise("neg", x)
    y = r.add(build.reduction, "sum", z, [1])
    r.output(y)
    program, (part,) = transforms.rfactor(transforms.split(r.program, y, 1, 3), y, [2])
    followed = transform_like(program, part)
    assert nest(followed, z) == nest(followed, x) == ["i4", "i4", "i3"]
    assert nest(followed, y) == ["i4", "r4"]
    backwards = transform_like(transforms.split(followed, z, 0, 2), z)
    assert nest(backwards, part) == ["i2", "i2", "i4", "r3"]
    assert nest(backwards, y) == ["i2", "i2", "r4"]
    lanes = bind(bind(backwards, z, 0, GRID), z, 2, VECTOR)
    assert bound(parallelize_like(lanes, z), y) == [GRID, SERIAL, VECTOR]


def test_only_as_far_as_the_first_loops_need() -> None:
    program, t = bias_program()
    program = transforms.split(transforms.split(program, t["out"], 1, 4), t["out"], 0, 2)
    program = transform_like(program, t["out"], [t["added"]], 2)
    assert nest(program, t["added"]) == ["i4", "i2", "i32"]


def test_backward_to_bounds() -> None:
    program, t = bias_program()
    program = transforms.split(program, t["out"], 1, 4)
    program = bind(bind(program, t["out"], 0, GRID), t["out"], 2, VECTOR)
    program = bounded_transform_backward(
        program, t["out"], -1, [t["stretched"]], parallel_types=True
    )
    assert nest(program, t["added"]) == ["i8", "i8", "i4"]
    assert bound(program, t["added"]) == [GRID, SERIAL, VECTOR]
    assert nest(program, t["stretched"]) == ["b1", "i8", "i4"]
    assert nest(program, t["x"]) == ["i8", "i32"]
    assert nest(program, t["bias"]) == ["i32"]
    with pytest.raises(UserError, match="T1 is not computed from T4"):
        bounded_transform_backward(program, t["bias"], -1, [t["out"]])


# Bindings.


def test_bindings_follow() -> None:
    program, t = softmax_program()
    program = transforms.split(program, t["out"], 1, 4)
    program = transform_like(program, t["out"])
    program = bind(bind(program, t["out"], 0, GRID), t["out"], 2, VECTOR)
    every = parallelize_like(program, t["out"])
    assert bound(every, t["largest"]) == [GRID, SERIAL, VECTOR]
    assert bound(every, t["x"]) == [SERIAL, SERIAL, SERIAL]
    assert bound(parallelize_like(program, t["out"], 1), t["largest"]) == [GRID, SERIAL, SERIAL]
    some = parallelize_like(program, t["out"], -1, [t["largest"]], {VECTOR})
    assert bound(some, t["largest"]) == [SERIAL, SERIAL, VECTOR]
    assert bound(parallelize_like(program, t["out"], -1, [t["x"]]), t["x"])[0] == GRID


def test_what_is_bound_stays() -> None:
    program, t = bias_program()
    program = bind(bind(program, t["out"], 0, GRID), t["added"], 0, BLOCK)
    assert bound(parallelize_like(program, t["out"]), t["added"]) == [BLOCK, SERIAL]


def test_a_mesh_axis_is_bound_once() -> None:
    program, t = bias_program()
    program = bind(transforms.split(program, t["out"], 0, 2, False), t["out"], 0, X)
    program = bind(transforms.split(program, t["added"], 1, 2, False), t["added"], 1, X)
    program = parallelize_like(transform_like(program, t["out"]), t["out"])
    assert sorted(map(str, bound(program, t["added"]))) == ["mesh_x", "serial", "serial", "serial"]


# Inlining.


def test_inlining_as_deep_as_readers_allow() -> None:
    program, t = softmax_program()
    program = transforms.split(program, t["out"], 1, 4)
    program = transform_like(program, t["out"])
    program = bind(program, t["out"], 2, VECTOR)
    deepest = inline_most(parallelize_like(program, t["out"]))
    assert inlined(deepest) == {t["x"]: 0, t["largest"]: 1, t["stretched"]: 2, t["out"]: 0}
    with pytest.raises(UserError, match="axis 0 is shared with the consumers"):
        transforms.split(deepest, t["largest"], 0, 2)


def test_inlining_to_a_position() -> None:
    program, t = bias_program()
    program = transform_like(transforms.split(program, t["out"], 1, 4), t["out"])
    assert inlined(inline_at(program, t["out"], 2))[t["added"]] == 2
    assert inlined(inline_at(program, t["out"]))[t["added"]] == 3
    assert inlined(inline_at(program, t["out"], -2, [t["added"]]))[t["added"]] == 2
    other = transforms.split(program, t["added"], 0, 2)
    with pytest.raises(UserError, match=r"inline_at\(T4, pos=2\): T2 cannot share loop a3"):
        inline_at(transforms.reorder(program, t["added"], {1: 0}), t["out"], 2)
    assert inlined(inline_at(other, t["out"], 2, best_effort=True))[t["added"]] == 0


def test_positions() -> None:
    program, t = bias_program()
    for position in (3, -4):
        with pytest.raises(UserError, match=rf"pos={position}\): must lie in \[-3, 2\]; T4 has 2"):
            inline_at(program, t["out"], position)
        with pytest.raises(UserError, match="must lie in"):
            parallelize_like(program, t["out"], position)
    placed = transforms.set_device_mesh(program, t["x"], make_mesh([0, 1]))
    assert inlined(inline_at(placed, t["out"], 0)) == dict.fromkeys(inlined(placed), 0)


# Through reshapes.


def test_a_reshape_is_done_backwards_where_it_was_not_done() -> None:
    """What was merged on the way is merged before, then cut alike; one that cancels leaves none."""
    r = Recorder()
    x = r.input([4, 8])
    before = r.pointwise("exp", x)
    flat = r.add(build.reshape, before, [32])
    middle = r.pointwise("neg", flat)
    back = r.add(build.reshape, middle, [4, 8])
    after = r.pointwise("neg", back)
    r.output(after)
    program = finished(r)
    rows = bind(transforms.split(program, middle, 0, 16), middle, 0, GRID)
    rows = parallelize_like(transform_like(rows, middle), middle)
    for tensor in (x, before, flat, middle):
        assert nest(rows, tensor) == ["i2", "i16"]
    assert bound(rows, before) == [GRID, SERIAL]
    columns = transform_like(transforms.split(program, after, 1, 4), after)
    assert nest(columns, before) == nest(columns, back) == ["i4", "i2", "i4"]
