"""What is sound before segmentation, and the pipeline that leads there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshfuse.base.errors import InvariantError, UserError
from meshfuse.base.trace import Note
from meshfuse.ir import transforms
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.program import Program
from meshfuse.passes.finalize_multidevice import check_tensor, finalize_multidevice
from meshfuse.passes.pipeline import PRESEGMENTATION, run_passes
from program_recorder import Recorder

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
LINE = make_mesh(range(2))


def relu(size: int = 4) -> Recorder:
    recorder = Recorder()
    recorder.output(recorder.pointwise("relu", recorder.input([size])))
    return recorder


def test_a_single_device_program_passes() -> None:
    program = relu().program
    assert run_passes(program) == (program, ())


def test_a_mesh_on_some_tensors_only() -> None:
    recorder = relu()
    recorder.replicate(LINE, *recorder.program.fusion.exprs[0].outs)  # type: ignore[arg-type]  # all tensors
    with pytest.raises(InvariantError, match="T0 of a program with a mesh have none"):
        finalize_multidevice(recorder.program)


def test_an_expression_that_needs_data_of_other_ranks() -> None:
    recorder = relu()
    x, y = recorder.program.fusion.tensors
    recorder.block(LINE, x, 0)
    recorder.replicate(LINE, y)
    with pytest.raises(InvariantError, match="neither local nor a communication"):
        finalize_multidevice(recorder.program)


def test_a_mesh_axis_without_a_mesh() -> None:
    recorder = relu()
    x, _ = recorder.program.fusion.tensors
    recorder.program = transforms.split(recorder.program, x, 0, 2, inner_split=False)
    recorder.bind(x, 0, X)
    with pytest.raises(UserError, match=r"T0, loop axis .* has no mesh; call set_device_mesh"):
        run_passes(recorder.program)


def test_uneven_blocks_are_sound() -> None:
    recorder = relu(6)
    x, y = recorder.program.fusion.tensors
    recorder.replicate(make_mesh(range(4)), y)
    recorder.program = transforms.split(recorder.program, x, 0, 4, inner_split=False)
    recorder.bind(x, 0, X)
    schedule = recorder.program.schedule(x)
    program = recorder.program.with_schedule(x, replace(schedule, mesh=make_mesh(range(4))))
    check_tensor(program, x)
    with pytest.raises(InvariantError, match="neither local nor a communication"):
        finalize_multidevice(program)


def test_notes_stand_in_order_and_passes_are_verified() -> None:
    def says(text: str) -> tuple[Note, ...]:
        return (Note("test", "T0", "said", text),)

    program = relu().program
    _, notes = run_passes(program, [lambda p: (p, says("a")), lambda p: (p, says("b"))])
    assert [note.reason for note in notes] == ["a", "b"]

    def drop_schedules(program: Program) -> tuple[Program, tuple[Note, ...]]:
        return replace(program, schedules={}), ()

    with pytest.raises(InvariantError, match="tensors and schedules differ"):
        run_passes(program, [drop_schedules])


def test_running_all_passes_again_changes_nothing() -> None:
    recorder = relu()
    x, y = recorder.program.fusion.tensors
    recorder.block(LINE, x, 0)
    recorder.replicate(LINE, y)
    once, _ = run_passes(recorder.program)
    assert run_passes(once, PRESEGMENTATION) == (once, ())
