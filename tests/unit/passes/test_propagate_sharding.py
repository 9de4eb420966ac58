"""Who gets which sharding. Shardings are written as their one-line text, without the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import pytest

from golden_text import GoldenCheck
from meshfuse.base.errors import UserError
from meshfuse.facts.sharding import describe, reduced_mesh_axes, sharding_of
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.ops import Operand, UnaryExpr
from meshfuse.ir.printer import print_program
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import append, copy_tensor
from meshfuse.passes.propagate_sharding import propagate_sharding
from program_recorder import Recorder

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
LINE, SQUARE = make_mesh(range(2)), make_mesh([[0, 1], [2, 3]])


def propagated(recorder: Recorder) -> Program:
    program, _ = propagate_sharding(recorder.program)
    assert all(schedule.mesh is not None for schedule in program.schedules.values())
    return program


def text(program: Program, tensor: TensorName) -> str:
    return describe(sharding_of(program, tensor)).split(" on ")[0]


def crossing(program: Program, tensor: TensorName) -> list[ParallelType]:
    return [mesh_axis for mesh_axis, _ in reduced_mesh_axes(program, tensor)]


def test_without_a_mesh_nothing_changes() -> None:
    recorder = Recorder()
    recorder.pointwise("relu", recorder.input([4]))
    assert propagate_sharding(recorder.program) == (recorder.program, ())


def test_the_first_of_two_shardings_wins() -> None:
    recorder = Recorder()
    x, y = recorder.input([4, 6]), recorder.input([4, 6])
    z = recorder.pointwise("add", x, y)
    recorder.block(LINE, x, 0)
    recorder.block(LINE, y, 1)
    assert text(propagated(recorder), z) == "[mesh_x{2} 2, 6]"


def test_a_sharded_operand_wins_over_a_replicated_one() -> None:
    recorder = Recorder()
    x, y = recorder.input([4, 6]), recorder.input([4, 6])
    z = recorder.pointwise("add", x, y)
    recorder.replicate(LINE, x)
    recorder.block(LINE, y, 1)
    assert text(propagated(recorder), z) == "[4, mesh_x{2} 3]"


def test_of_two_shardings_the_one_wins_for_which_less_moves() -> None:
    """Either the row is gathered, or the matrix exchanged."""
    recorder = Recorder()
    row, x = recorder.input([1, 6]), recorder.input([4, 6])
    z = recorder.pointwise("add", row, x)
    recorder.block(LINE, row, 1)
    recorder.block(LINE, x, 0)
    assert text(propagated(recorder), z) == "[mesh_x{2} 2, 6]"


@pytest.mark.parametrize("rows", [40, -1])
def test_the_smaller_of_two_computed_factors_moves(rows: int) -> None:
    """A size that is not known counts as large."""
    recorder = Recorder()
    a, b = recorder.input([rows, 8]), recorder.input([8, 6])
    z = recorder.add(build.matmul, recorder.pointwise("exp", a), recorder.pointwise("exp", b))
    recorder.block(LINE, a, 0)
    recorder.block(LINE, b, 1)
    assert text(propagated(recorder), z).endswith(", 6]")


def test_a_weight_that_is_an_input_stays_where_it_is() -> None:
    recorder = Recorder()
    x, weight = recorder.input([40, 8]), recorder.input([6, 8])
    y = recorder.add(build.linear, recorder.pointwise("exp", x), weight)
    recorder.block(LINE, x, 0)
    recorder.block(LINE, weight, 0)
    assert text(propagated(recorder), y) == "[40, mesh_x{2} 3]"


def test_a_result_of_operands_on_two_meshes_lies_on_that_of_the_larger() -> None:
    recorder = Recorder()
    other = make_mesh([2, 3])
    row, x = recorder.input([1, 6]), recorder.input([4, 6])
    z = recorder.pointwise("relu", recorder.pointwise("add", row, x))
    recorder.block(LINE, row, 1)
    recorder.block(other, x, 0)
    program = propagated(recorder)
    assert text(program, z) == "[mesh_x{2} 2, 6]"
    assert program.schedule(z).mesh == other


def test_operands_complete_each_other_on_two_mesh_axes() -> None:
    recorder = Recorder()
    x, y = recorder.input([4, 6]), recorder.input([4, 6])
    z = recorder.pointwise("add", x, y)
    recorder.block(SQUARE, x, 0, Y)
    recorder.block(SQUARE, y, 1, X)
    assert text(propagated(recorder), z) == "[mesh_y{2} 2, mesh_x{2} 3]"


def test_a_sum_over_the_sharded_axis_crosses_ranks() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    y = recorder.add(build.reduction, "sum", x, [0])
    recorder.block(LINE, x, 0)
    program = propagated(recorder)
    assert text(program, y) == "[6]"
    assert crossing(program, y) == [X]


def test_an_annotated_result_keeps_its_sharding_but_not_a_serial_reduction() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    y = recorder.add(build.reduction, "sum", x, [0])
    recorder.block(LINE, x, 0)
    recorder.block(LINE, y, 1)
    program = propagated(recorder)
    assert text(program, y) == "[mesh_x{2} 3]"
    assert crossing(program, y) == [X]


def test_a_contraction_sharded_on_both_sides_crosses_ranks() -> None:
    recorder = Recorder()
    x, weight = recorder.input([3, 8]), recorder.input([5, 8])
    y = recorder.add(build.linear, x, weight)
    recorder.block(LINE, x, 1)
    recorder.block(LINE, weight, 1)
    program = propagated(recorder)
    assert text(program, y) == "[3, 5]"
    assert crossing(program, y) == [X]


def test_the_weight_wins_over_the_activation() -> None:
    recorder = Recorder()
    x, weight = recorder.input([4, 8]), recorder.input([6, 8])
    y = recorder.add(build.linear, x, weight)
    recorder.block(LINE, x, 0)
    recorder.block(LINE, weight, 0)
    assert text(propagated(recorder), y) == "[4, mesh_x{2} 3]"


def test_a_contraction_sharded_on_one_side_does_not_cross_if_the_other_would_have_to_move() -> None:
    recorder = Recorder()
    x, weight = recorder.input([4, 8]), recorder.input([6, 8])
    y = recorder.add(build.linear, x, weight)
    recorder.block(LINE, x, 0)
    recorder.block(LINE, weight, 1)
    program = propagated(recorder)
    assert text(program, y) == "[mesh_x{2} 2, 6]"
    assert crossing(program, y) == []


def test_annotated_tensors_are_left_alone() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    y = recorder.pointwise("relu", x)
    recorder.block(LINE, x, 0)
    recorder.block(LINE, y, 1)
    program = propagated(recorder)
    assert program.schedules == recorder.program.schedules


def test_a_free_tensor_between_two_annotated_ones_gets_both_mesh_axes() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    y = recorder.pointwise("relu", x)
    z = recorder.pointwise("neg", y)
    recorder.block(SQUARE, x, 0, X)
    recorder.block(SQUARE, z, 1, Y)
    program = propagated(recorder)
    assert text(program, y) == "[mesh_x{2} 2, mesh_y{2} 3]"
    assert text(program, x) == "[mesh_x{2} 2, 6]"
    assert text(program, z) == "[4, mesh_y{2} 3]"


def test_backward_shards_what_is_computed_and_replicates_inputs() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    y = recorder.pointwise("relu", x)
    z = recorder.pointwise("neg", y)
    side = recorder.pointwise("exp", y)
    recorder.block(LINE, z, 1)
    program = propagated(recorder)
    assert text(program, x) == "[4, 6]"
    assert text(program, y) == text(program, side) == "[4, mesh_x{2} 3]"


def test_backward_of_a_reduce_scatter_shards_the_reduced_axis() -> None:
    recorder = Recorder()
    x = recorder.input([4, 6])
    y = recorder.pointwise("relu", x)
    z = recorder.add(build.reduction, "sum", y, [0])
    recorder.block(LINE, z, 0)
    recorder.block(LINE, z, 2)
    assert text(propagated(recorder), y) == "[mesh_x{2} 2, 6]"


def test_cyclic_shardings_travel_as_they_are() -> None:
    recorder = Recorder()
    x = recorder.input([-1, 6])
    y = recorder.add(build.permute, recorder.pointwise("relu", x), [1, 0])
    recorder.replicate(LINE, x)
    recorder.program = transforms.split(recorder.program, x, 0, 2)
    recorder.bind(x, 1, X)
    assert text(propagated(recorder), y) == "[6, (i0 + 1) // 2 mesh_x{2}]"


def test_two_mesh_axes_on_one_axis_travel_in_order() -> None:
    recorder = Recorder()
    x = recorder.input([8])
    y = recorder.pointwise("relu", x)
    recorder.block(SQUARE, x, 0, Y)
    recorder.block(SQUARE, x, 1, X)
    assert text(propagated(recorder), y) == "[mesh_y{2} mesh_x{2} 2]"


def test_below_a_mesh_axis_that_is_taken_nothing_travels() -> None:
    """The rows of x are cut by y and then x; y is taken by the columns of the result."""
    recorder = Recorder()
    x, weight = recorder.input([8, 6]), recorder.input([4, 6])
    z = recorder.add(build.linear, x, weight)
    recorder.block(SQUARE, x, 0, Y)
    recorder.block(SQUARE, x, 1, X)
    recorder.block(SQUARE, weight, 0, Y)
    assert text(propagated(recorder), z) == "[8, mesh_y{2} 2]"


def test_a_mesh_axis_with_one_rank_is_still_bound() -> None:
    recorder = Recorder()
    x = recorder.input([-1])
    y = recorder.pointwise("relu", x)
    recorder.block(make_mesh([5]), x, 0)
    assert X in propagated(recorder).schedule(y).bindings.values()


def test_an_updated_input_stays_as_it_is() -> None:
    recorder = Recorder()
    x, total = recorder.input([4]), recorder.input([4])
    y = recorder.pointwise("add", x, total)
    recorder.program = build.add_output(recorder.program, y, total)
    recorder.block(LINE, x, 0)
    program = propagated(recorder)
    assert text(program, total) == text(program, y) == "[4]"


@final
@dataclass(frozen=True, slots=True)
class Mystery(UnaryExpr):
    """An expression that no table knows."""

    out: TensorName
    src: TensorName

    @property
    def ins(self) -> tuple[Operand, ...]:
        return (self.src,)


def test_an_expression_without_a_rule_takes_its_operand_whole_and_says_so() -> None:
    recorder = Recorder()
    x = recorder.input([4])
    program, y = copy_tensor(recorder.program, x)
    recorder.program = append(program, Mystery(y, x))
    recorder.block(LINE, x, 0)
    program, notes = propagate_sharding(recorder.program)
    assert text(program, y) == "[4]"
    assert [str(note) for note in notes] == [
        "propagate_sharding: T1: gathered: Mystery has no sharding rule: T0 is needed whole"
    ]


def test_unsound_annotations_are_reported_where_they_stand() -> None:
    recorder = Recorder()
    x = recorder.input([6])
    recorder.program = transforms.split(recorder.program, x, 0, 4, inner_split=False)
    recorder.bind(x, 0, X)
    schedule = recorder.program.schedule(x)
    for ranks in (4, 2):
        placed = type(schedule)(
            schedule.leaves, schedule.steps, schedule.bindings, make_mesh(range(ranks))
        )
        program = recorder.program.with_schedule(x, placed)
        if ranks == 4:
            assert propagate_sharding(program) == (program, ())  # 2, 2, 2 and none
        else:
            with pytest.raises(UserError, match=r"T0.* has 2 ranks there, not 4"):
                propagate_sharding(program)


def test_golden(golden: GoldenCheck) -> None:
    recorder = Recorder()
    x, weight = recorder.input([-1, 8]), recorder.input([12, 8])
    y = recorder.pointwise("gelu", recorder.add(build.linear, x, weight))
    recorder.output(y)
    recorder.replicate(LINE, x)
    recorder.block(LINE, weight, 0)
    golden("propagate_sharding", print_program(propagated(recorder)))
