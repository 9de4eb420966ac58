"""Law 1: local extents, no mesh, and size symbols that say what they are globally."""

from __future__ import annotations

import pytest

from kernel_programs import finished, reduced
from meshfuse.base.errors import Unsupported
from meshfuse.expr import evaluate
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.parser import parse_program
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import step_sources
from meshfuse.ir.verify import verify
from meshfuse.kernel.localize import Localized, localize
from program_recorder import Recorder

LINE = make_mesh([0, 1])
SQUARE = make_mesh([[0, 1], [2, 3]])


def shape_of(localized: Localized, tensor: TensorName) -> list[str]:
    return [str(axis.extent) for axis in localized.program.tensor(tensor).logical]


def sizes_of(localized: Localized) -> dict[str, str]:
    return {name: str(size) for name, size in localized.sizes.items()}


def test_without_a_mesh_nothing_changes_but_the_sizes_are_listed() -> None:
    program = reduced("sum", (-1, 8), [0])
    localized = localize(program)
    assert localized.program == program
    assert sizes_of(localized) == {"i0": "i0"}


def block_of(size: str) -> str:
    """What the running rank of two holds of an axis of this size."""
    return f"min(max({size} - x_2_0*(({size} + 1) // 2), 0), ({size} + 1) // 2)"


def test_a_block_becomes_a_fresh_size() -> None:
    r = Recorder()
    x = r.input((-1, -1))
    y = r.pointwise("neg", x)
    r.output(y)
    for tensor in (x, y):
        r.block(LINE, tensor, 0)
    localized = localize(finished(r))
    verify(localized.program)
    assert shape_of(localized, x) == shape_of(localized, y) == ["e0", "i1"]
    assert sizes_of(localized) == {"e0": block_of("i0"), "i1": "i1"}
    assert all(schedule.mesh is None for schedule in localized.program.schedules.values())
    assert all(not schedule.steps for schedule in localized.program.schedules.values())


def test_equal_local_extents_share_a_symbol_and_static_ones_need_none() -> None:
    r = Recorder()
    x, y = r.input((-1, 64)), r.input((-1, 64))
    r.block(LINE, x, 0)
    r.block(LINE, y, 1)
    r.output(r.pointwise("neg", x))
    localized = localize(r.program)
    assert shape_of(localized, x) == ["e0", "64"]
    assert shape_of(localized, y) == ["i1", "32"]


def test_cyclic_and_whole_axes_and_two_mesh_axes() -> None:
    r = Recorder()
    cyclic, whole, both = r.input((8, -1)), r.input((2, -1)), r.input((8, 12))
    r.program = transforms.set_device_mesh(r.program, cyclic, LINE)
    r.program = transforms.split(r.program, cyclic, 0, 2)
    r.bind(cyclic, 1, ParallelType.mesh_x)
    r.whole(LINE, whole, 0)
    r.block(SQUARE, both, 0, ParallelType.mesh_y)
    r.block(SQUARE, both, 2, ParallelType.mesh_x)
    localized = localize(r.program)
    assert shape_of(localized, cyclic) == ["4", "i0"]
    assert shape_of(localized, whole) == ["1", "i1"]
    assert localized.program.tensor(whole).logical[0].kind is AxisKind.iteration
    assert shape_of(localized, both) == ["4", "6"]


def test_strided_pieces_count_like_one_block() -> None:
    r = Recorder()
    x = r.input((24,))
    r.program = transforms.set_device_mesh(r.program, x, LINE)
    r.program = transforms.split(r.program, x, 0, 3, inner_split=False)
    r.program = transforms.split(r.program, x, 1, 2, inner_split=False)
    r.bind(x, 1, ParallelType.mesh_x)
    assert shape_of(localize(r.program), x) == ["12"]


def test_blocks_that_are_not_alike_are_one_size_that_ranks_fill_in() -> None:
    r = Recorder()
    x, y = r.input((7, 2)), r.input((2, 7))
    r.block(LINE, x, 0)
    r.program = transforms.set_device_mesh(r.program, y, LINE)
    r.program = transforms.split(r.program, y, 1, 2)
    r.bind(y, 2, ParallelType.mesh_x)
    localized = localize(r.program)
    assert shape_of(localized, x) == ["e0", "2"]
    assert shape_of(localized, y) == ["2", "e1"]
    for rank, (block, cyclic) in enumerate([(4, 4), (3, 3)]):
        place = {"x_2_0": rank}
        assert evaluate(localized.sizes["e0"], place) == block
        assert evaluate(localized.sizes["e1"], place) == cyclic


def test_a_stream_leaf_is_not_supported_yet() -> None:
    r = Recorder()
    r.bind(r.input((8,)), 0, ParallelType.stream)
    with pytest.raises(Unsupported, match="T0 has a stream leaf"):
        localize(r.program)


PARTIAL = """
program() {
  T0 = tensor(f32, [a0:i{i0}, a1:i{64}])
  schedule(T0, [a0, a2, a3], steps=[SPLIT_a1], bindings={a2: mesh_x}, mesh=DeviceMesh{0 1})
  T1 = tensor(f32, [a4:i{i0}, a6:p{2}, a7:r{32}], root=[a4:i{i0}, a5:r{64}], root_steps=[SPLIT_a5])
  schedule(T1, [a4, a6, a7], bindings={a6: mesh_x}, mesh=DeviceMesh{0 1})
  input(T0)
  T1 = sum(T0, [1])
  output(T1)
}
"""
SPLITS = {"SPLIT_a1": "Split(a1, a2, a3, 2, false)", "SPLIT_a5": "Split(a5, a6, a7, 2, false)"}


def program_with_a_partial_result(text: str = PARTIAL) -> Program:
    for short, step in SPLITS.items():
        text = text.replace(short, step)
    return parse_program(text)


def test_a_partial_result_is_an_ordinary_reduction_on_each_rank() -> None:
    localized = localize(program_with_a_partial_result())
    definition: TensorDef = localized.program.tensor(TensorName("T1"))
    assert str(definition.logical) == "(a4:i{i0}, a7:r{32})"
    assert definition.root == () and definition.root_steps == ()
    assert localized.program.schedule(TensorName("T1")).leaves == ("a4", "a7")
    verify(localized.program)


def test_terms_in_another_shape() -> None:
    """Each rank of the team has a term of the whole, in blocks along the other mesh axis."""
    text = """
program() {
  T0 = tensor(f32, [a0:i{6}, a1:i{4}, a2:p{2}])
  schedule(T0, [a0, a3, a4, a2], steps=[Split(a1, a3, a4, 2, false)], bindings={a2: mesh_y, a3: mesh_x}, mesh=DeviceMesh{{0 1} {2 3}})
  T1 = tensor(f32, [a5:i{2}, a6:i{3}, a7:i{4}, a8:p{2}], root=[a9:i{6}, a7:i{4}, a8:p{2}], root_steps=[Split(a9, a5, a6, 3, true)])
  schedule(T1, [a5, a6, a10, a11, a8], steps=[Split(a7, a10, a11, 2, false)], bindings={a8: mesh_y, a10: mesh_x}, mesh=DeviceMesh{{0 1} {2 3}})
  T2 = tensor(f32, [a12:i{6}, a13:i{4}, a14:p{2}], root=[a15:i{2}, a16:i{3}, a13:i{4}, a14:p{2}], root_steps=[Merge(a15, a16, a12)])
  schedule(T2, [a12, a17, a18, a14], steps=[Split(a13, a17, a18, 2, false)], bindings={a14: mesh_y, a17: mesh_x}, mesh=DeviceMesh{{0 1} {2 3}})
  input(T0)
  T1 = reshape(T0)
  T2 = reshape(T1)
  output(T2)
}
"""  # noqa: E501  # a tensor with its schedule is one line of a program
    localized = localize(parse_program(text))
    verify(localized.program)
    for name, shape in (("T0", ["6", "2"]), ("T1", ["2", "3", "2"]), ("T2", ["6", "2"])):
        assert shape_of(localized, TensorName(name)) == shape
    split, merged = (localized.program.tensor(TensorName(name)) for name in ("T1", "T2"))
    assert [str(axis.extent) for axis in split.root] == ["6", "2"]
    assert [str(axis.extent) for axis in merged.root] == ["2", "3", "2"]


def test_integer_operands_stay_global() -> None:
    """A mean over all ranks divides by the global count."""
    r = Recorder()
    x = r.input((-1, -1))
    y = r.pointwise("div", x, build.size(r.program, x, 0))
    r.output(y)
    for tensor in (x, y):
        r.block(LINE, tensor, 0)
    localized = localize(finished(r))
    assert str(localized.program.fusion.exprs[-1].ins[1]) == "i0"
    assert sizes_of(localized) == {"e0": block_of("i0"), "i0": "i0", "i1": "i1"}


def test_fresh_names_are_not_taken() -> None:
    text = PARTIAL.replace("i0", "e0").replace("a1:i{64}", "a1:i{i5}")
    localized = localize(program_with_a_partial_result(text))
    assert shape_of(localized, TensorName("T0")) == ["e0", "e1"]
    assert sizes_of(localized) == {"e0": "e0", "e1": block_of("i5")}


def test_kernel_bindings_stay_where_the_mesh_split_comes_first() -> None:
    r = Recorder()
    x = r.input((-1, -1))
    r.block(LINE, x, 0)
    r.program = transforms.split(r.program, x, 1, 4)
    r.bind(x, 1, ParallelType.grid_x)
    schedule = localize(r.program).program.schedule(x)
    a0 = r.program.tensor(x).logical[0].name
    assert [step_sources(step) for step in schedule.steps] == [(a0,)]
    assert list(schedule.bindings.values()) == [ParallelType.grid_x]
    assert len(schedule.leaves) == 3


def test_a_kernel_split_above_a_mesh_split_is_refused() -> None:
    r = Recorder()
    x = r.input((64,))
    r.program = transforms.set_device_mesh(r.program, x, LINE)
    r.program = transforms.split(r.program, x, 0, 8)
    r.program = transforms.split(r.program, x, 1, 2)
    r.bind(x, 2, ParallelType.mesh_x)
    r.bind(x, 0, ParallelType.grid_x)
    with pytest.raises(Unsupported, match="split over the mesh first"):
        localize(r.program)
