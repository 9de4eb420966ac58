"""Axis maps, written as `operand axes -> places among the result's axes`."""

from __future__ import annotations

from meshfuse.facts.axis_map import axis_pairs, operand_axis_map
from meshfuse.ir import build
from meshfuse.ir.axes import TensorName
from program_recorder import Recorder


def named(recorder: Recorder, src: TensorName, out: TensorName) -> dict[int, int]:
    """The axis map of the last expression, by axis of its operand `src` and place in `out`."""
    program = recorder.program
    expr = program.fusion.exprs[-1]
    mapped = operand_axis_map(expr, program, expr.ins.index(src), out)
    source = [axis.name for axis in program.tensor(src).tensor_axes]
    target = [axis.name for axis in program.tensor(out).maybe_root]
    return {source.index(axis): target.index(image) for axis, image in mapped.items()}


def test_a_stretching_broadcast_axis_is_not_mapped() -> None:
    recorder = Recorder()
    x, row = recorder.input([4, 1, 3]), recorder.input([1, 1, 3])
    y = recorder.pointwise("add", x, row)
    assert named(recorder, x, y) == {0: 0, 1: 1, 2: 2}
    assert named(recorder, row, y) == {1: 1, 2: 2}


def test_reduced_axes_are_mapped_to_the_results_reduced_axes() -> None:
    recorder = Recorder()
    x = recorder.input([4, 5, 6])
    y = recorder.add(build.reduction, "sum", x, [1])
    assert named(recorder, x, y) == {0: 0, 1: 1, 2: 2}


def test_a_broadcast_axis_that_is_reduced_does_not_stretch() -> None:
    recorder = Recorder()
    a, b = recorder.input([4, 1]), recorder.input([1, 5])
    y = recorder.add(build.matmul, a, b)
    assert named(recorder, a, y) == {0: 0, 1: 2}
    assert named(recorder, b, y) == {0: 2, 1: 1}


def test_views_move_and_drop_axes() -> None:
    recorder = Recorder()
    x = recorder.input([4, 1, 6])
    y = recorder.add(build.permute, x, [2, 0, 1])
    assert named(recorder, x, y) == {0: 1, 1: 2, 2: 0}
    z = recorder.add(build.squeeze, y, [2])
    assert named(recorder, y, z) == {0: 0, 1: 1}
    w = recorder.add(build.broadcast, z, [False, True, False])
    assert named(recorder, z, w) == {0: 0, 1: 2}


def test_linear_with_batched_weights() -> None:
    """src [b, s, k], weight [d, n, k], bias [d, n] -> [d, b, s, n, k]."""
    recorder = Recorder()
    x, weight, bias = recorder.input([2, 3, 5]), recorder.input([4, 7, 5]), recorder.input([4, 7])
    y = recorder.add(build.linear, x, weight, bias)
    assert named(recorder, x, y) == {0: 1, 1: 2, 2: 4}
    assert named(recorder, weight, y) == {0: 0, 1: 3, 2: 4}
    assert named(recorder, bias, y) == {0: 0, 1: 3}


def test_matmul_aligns_batches_at_the_right() -> None:
    """[b, m, k] @ [c, b, k, n] -> [c, b, m, n, k]."""
    recorder = Recorder()
    a, b = recorder.input([2, 3, 5]), recorder.input([4, 2, 5, 7])
    y = recorder.add(build.matmul, a, b)
    assert named(recorder, a, y) == {0: 1, 1: 2, 2: 4}
    assert named(recorder, b, y) == {0: 0, 1: 1, 2: 4, 3: 3}


def test_matmul_of_vectors() -> None:
    recorder = Recorder()
    matrix, vector = recorder.input([3, 5]), recorder.input([5])
    y = recorder.add(build.matmul, matrix, vector)
    assert named(recorder, matrix, y) == {0: 0, 1: 1}
    assert named(recorder, vector, y) == {0: 1}
    z = recorder.add(build.matmul, vector, vector)
    assert named(recorder, vector, z) == {0: 0}


def test_both_operands_of_a_square_have_their_own_places() -> None:
    recorder = Recorder()
    x = recorder.input([4, 4])
    recorder.add(build.matmul, x, x)
    program = recorder.program
    assert axis_pairs(program.fusion.exprs[-1], program) == {0: (0, 2), 1: (2, 1)}
