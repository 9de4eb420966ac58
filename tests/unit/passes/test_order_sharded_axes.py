"""Memory order around communications. Layouts read `T0 [1, 0]`, with a `!` where gaps may lie."""

from __future__ import annotations

from golden_text import GoldenCheck
from meshfuse.facts.layout import layout_of
from meshfuse.ir import build, transforms
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.printer import print_expr, print_program
from meshfuse.ir.program import Program
from meshfuse.passes.pipeline import run_passes
from program_recorder import Recorder

X, Y = ParallelType.mesh_x, ParallelType.mesh_y
LINE = make_mesh(range(2))


def passed(recorder: Recorder) -> tuple[Program, list[str], list[str]]:
    """The program after all passes, its expressions, and the notes of this pass."""
    program, notes = run_passes(recorder.program)
    texts = [print_expr(expr) for expr in program.fusion.exprs]
    return program, texts, [str(note) for note in notes if note.stage == "order_sharded_axes"]


def layout(program: Program, name: str) -> str:
    found = layout_of(program, TensorName(name))
    gaps = "!" if False in found.contiguity else ""
    return f"{name} {list(found.order)}{gaps}"


def gather(axis: int, shape: list[int], contiguity: bool = True) -> Recorder:
    recorder = Recorder()
    x = recorder.input(shape, contiguity=contiguity)
    y = recorder.add(build.set_, x)
    recorder.output(y)
    recorder.block(LINE, x, axis)
    recorder.replicate(LINE, y)
    return recorder


def test_the_outer_axis_of_a_contiguous_tensor_is_ready() -> None:
    _, texts, notes = passed(gather(0, [4, 6]))
    assert texts == ["T1 = all_gather(T0, mesh_x, 0)"]
    assert notes == []


def test_axes_of_local_size_1_do_not_count() -> None:
    _, texts, _ = passed(gather(1, [1, 4, 6]))
    assert texts == ["T1 = all_gather(T0, mesh_x, 1)"]
    _, texts, _ = passed(gather(1, [3, 2]))
    assert texts == ["T2 = all_gather(T0, mesh_x, 1)", "T1 = set(T2)"]


def test_an_inner_axis_is_copied_to_the_front_and_back() -> None:
    program, texts, notes = passed(gather(1, [3, 4]))
    assert texts == [
        "T2 = set(T0)",
        "T3 = all_gather(T2, mesh_x, 1)",
        "T1 = set(T3)",
    ]
    assert [layout(program, name) for name in ("T2", "T3", "T1")] == [
        "T2 [1, 0]",
        "T3 [1, 0]",
        "T1 [0, 1]",
    ]
    assert notes == [
        "order_sharded_axes: T2: copy [24 bytes]: "
        "all_gather T1 reads whole blocks, and T0 has gaps or another order",
        "order_sharded_axes: T1: copy [48 bytes]: all_gather writes another memory order",
    ]


def test_an_input_that_may_have_gaps_is_copied() -> None:
    _, texts, _ = passed(gather(0, [4, 6], contiguity=False))
    assert texts == ["T2 = set(T0)", "T1 = all_gather(T2, mesh_x, 0)"]


def test_an_order_that_the_user_chose_may_be_ready() -> None:
    recorder = gather(1, [3, 4])
    for name in ("T0", "T1"):
        tensor = TensorName(name)
        axes = [axis.name for axis in recorder.program.tensor(tensor).logical]
        recorder.program = transforms.set_allocation_domain(
            recorder.program, tensor, axes[::-1], True
        )
    _, texts, _ = passed(recorder)
    assert texts == ["T1 = all_gather(T0, mesh_x, 1)"]


def test_an_inner_tensor_takes_the_order_of_its_communication() -> None:
    recorder = Recorder()
    x = recorder.input([3, 4])
    y = recorder.add(build.set_, x)
    recorder.output(recorder.pointwise("neg", y))
    recorder.block(LINE, x, 1)
    recorder.replicate(LINE, y)
    program, texts, _ = passed(recorder)
    assert texts == ["T3 = set(T0)", "T1 = all_gather(T3, mesh_x, 1)", "T2 = neg(T1)"]
    assert layout(program, "T1") == "T1 [1, 0]"


def test_an_all_reduce_keeps_any_order() -> None:
    recorder = Recorder()
    x = recorder.input([4, 3, 6])
    y = recorder.add(build.reduction, "sum", x, [0])
    recorder.output(y)
    recorder.block(LINE, x, 0)
    _, texts, notes = passed(recorder)
    assert texts == ["T2 = sum(T0, [0])", "T1 = all_reduce(T2, mesh_x)"]
    assert notes == []


def test_a_reduce_scatter_wants_its_scattered_axis_slowest() -> None:
    recorder = Recorder()
    x = recorder.input([2, 3, 8])
    y = recorder.add(build.reduction, "sum", x, [0])
    recorder.output(y)
    recorder.whole(LINE, x, 0)
    recorder.block(LINE, y, 2)
    program, texts, _ = passed(recorder)
    assert texts == [
        "T2 = sum(T0, [0])",
        "T3 = set(T2)",
        "T4 = reduce_scatter(T3, mesh_x, 1)",
        "T1 = set(T4)",
    ]
    assert layout(program, "T3") == "T3 [1, 0]"


def test_a_local_slice_is_a_view_with_gaps() -> None:
    recorder = Recorder()
    x = recorder.input([3, 4])
    y = recorder.pointwise("relu", x)
    recorder.output(y)
    recorder.replicate(LINE, x)
    recorder.block(LINE, y, 1)
    program, texts, notes = passed(recorder)
    assert texts == ["T2 = local_slice(T0, mesh_x, 1)", "T1 = relu(T2)"]
    assert layout(program, "T2") == "T2 [0, 1]!"
    assert notes == []


def test_an_output_is_no_view() -> None:
    recorder = Recorder()
    x = recorder.input([4, 3])
    y = recorder.add(build.set_, x)
    recorder.output(y)
    recorder.replicate(LINE, x)
    recorder.block(LINE, y, 0)
    _, texts, notes = passed(recorder)
    assert texts == ["T2 = local_slice(T0, mesh_x, 0)", "T1 = set(T2)"]
    assert notes == [
        "order_sharded_axes: T1: copy [24 bytes]: a local slice is a view, and this is an output"
    ]


def test_golden(golden: GoldenCheck) -> None:
    program, _, _ = passed(gather(1, [3, -1]))
    golden("order_sharded_axes", print_program(program))


def parts(first: list[int], second: list[int] | None = None) -> Recorder:
    """A set between two shardings of a [6, 8] tensor: it is split by these, bound where -1 is."""
    recorder = Recorder()
    x = recorder.input([6, 8])
    y = recorder.add(build.set_, x)
    recorder.output(y)
    for tensor, factors in ((x, first), (y, second)):
        recorder.replicate(LINE, tensor)
        if factors is None:
            continue
        axis, factor, bound = factors
        recorder.program = transforms.split(
            recorder.program, tensor, axis, factor, inner_split=bound == axis + 1
        )
        recorder.bind(tensor, bound, X)
    return recorder


def test_cyclic_parts_are_packed_from_any_order_to_any() -> None:
    _, texts, notes = passed(parts([1, 2, 2]))
    assert texts == ["T1 = all_gather(T0, mesh_x, 1)"]
    assert notes == [
        "order_sharded_axes: T1: packed [192 bytes]: all_gather: axis 1 of T0 is dealt out along "
        "mesh_x in more than one piece a rank"
    ]


def test_an_exchange_is_packed() -> None:
    _, texts, notes = passed(parts([0, 2, 0], [1, 2, 1]))
    assert texts == ["T1 = exchange(T0)"]
    assert notes == [
        "order_sharded_axes: T1: packed [96 bytes]: exchange: ranks send one another pieces of any "
        "shape"
    ]


def test_a_cyclic_slice_is_a_view_whose_axis_has_a_stride_of_its_own() -> None:
    recorder = Recorder()
    x = recorder.input([3, 4])
    y = recorder.pointwise("relu", x)
    recorder.output(y)
    recorder.replicate(LINE, x, y)
    recorder.program = transforms.split(recorder.program, y, 1, 2, inner_split=True)
    recorder.bind(y, 2, X)
    program, texts, _ = passed(recorder)
    assert texts == ["T2 = local_slice(T0, mesh_x, 1)", "T1 = relu(T2)"]
    found = layout_of(program, TensorName("T2"))
    assert found.contiguity == (False, False)
