"""Handles: identity, what they answer, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshfuse import DataType, FusionDefinition, ParallelType, TensorView, Val
from meshfuse.multidevice import DeviceMesh


def define(*shape: int, dtype: DataType = DataType.Float) -> tuple[FusionDefinition, TensorView]:
    fd = FusionDefinition()
    return fd, fd.define_tensor(list(shape), contiguity=True, dtype=dtype)


def test_one_object_per_name() -> None:
    fd, x = define(4, -1)
    y = fd.ops.exp(x)
    fd.add_output(y)
    assert fd.fusion.inputs() == [x]
    assert fd.fusion.inputs()[0] is x
    assert fd.fusion.outputs()[0] is y
    assert [v for v in fd.fusion.vals() if v is x or v is y] == [x, y]
    assert x.axis(0) is x.axis(-2) is x.get_loop_domain()[0] is x.get_logical_domain()[0]
    assert x.size(1) is x.size(-1) is fd.ops.size(x, 1) is x.shape()[1]
    assert fd.ops.size(y, 1) is x.size(1), "sizes of y are sizes of x"


def test_equality_is_identity() -> None:
    fd, x = define(4)
    other = fd.define_tensor([4])
    assert x != other
    assert len({x, other, x}) == 2


def test_axis_keeps_its_name_through_a_split() -> None:
    _, x = define(8, 6)
    inner = x.axis(1)
    x.outer_split(0, 2)
    assert x.axis(2) is inner
    assert [str(axis.extent().to_text()) for axis in x.get_loop_domain()] == ["2", "4", "6"]
    assert len(x.get_logical_domain()) == 2
    assert x.get_root_domain() == []
    assert not x.has_root()


def test_splits_merge_and_reorder_chain() -> None:
    _, x = define(8, 6)
    assert x.split(0, 4).inner_split(2, 3).reorder({0: -1}).merge(0, 1) is x
    assert [axis.extent().to_text() for axis in x.get_loop_domain()] == ["8", "3", "2"]


def test_reduced_axes_count_among_loop_axes_only() -> None:
    fd, x = define(4, 6, 8)
    y = fd.ops.sum(x, [1])
    assert y.ndim == 2
    assert [axis.is_reduction() for axis in y.get_loop_domain()] == [False, True, False]
    assert [size.to_text() for size in y.shape()] == ["4", "8"]


def test_reprs_say_what_a_newcomer_reads() -> None:
    fd, x = define(8, -1)
    total = fd.ops.sum(x, [0])
    scale = fd.define_scalar(DataType.Float)
    assert repr(x) == "T0 f32[8, i0]"
    assert repr(total) == "T1 f32[i0], loops [8 reduction, i0]"
    assert repr(scale) == "c0 f32"
    assert repr(x.size(1)) == "(i0)"
    x.set_device_mesh(DeviceMesh([0, 1]))
    x.outer_split(0, 2)
    x.axis(0).parallelize(ParallelType.mesh_x)
    assert repr(x) == "T0 f32[8, i0], loops [2 mesh_x, 4, i0] on DeviceMesh{0 1}"
    assert repr(x.axis(0)) == "axis a4 of T0: size 2, bound to mesh_x, the outer part of a0"
    assert repr(x.domain()) == "[2 mesh_x, 4, i0]"


def test_operators_record_the_operations() -> None:
    fd, x = define(4)
    y = fd.define_tensor([4])
    z = -(2.0 * (x + y) / (y - 1) - x)
    fd.add_output(z)
    fd.add_output(x < y)
    fd.add_output(x > y)
    fd.add_output(x < 1)
    fd.add_output(x >= y)
    fd.add_output(2 <= x)  # noqa: SIM300  # the reflected operator
    fd.add_output(abs(x) ** 2)
    fd.add_output(2**x)
    text = str(fd)
    for statement in (
        "tv2 = fd.ops.add(tv0, tv1)",
        "tv3 = fd.ops.mul(2.0, tv2)",
        "tv4 = fd.ops.sub(tv1, 1)",
        "tv5 = fd.ops.div(tv3, tv4)",
        "tv6 = fd.ops.sub(tv5, tv0)",
        "tv7 = fd.ops.neg(tv6)",
        "tv8 = fd.ops.lt(tv0, tv1)",
        "tv9 = fd.ops.gt(tv0, tv1)",
        "tv10 = fd.ops.lt(tv0, 1)",
        "tv11 = fd.ops.ge(tv0, tv1)",
        "tv12 = fd.ops.ge(tv0, 2)",
        "tv13 = fd.ops.abs(tv0)",
        "tv14 = fd.ops.pow(tv13, 2)",
        "tv15 = fd.ops.pow(2, tv0)",
    ):
        assert statement in text


def test_arithmetic_on_sizes_stays_a_size() -> None:
    fd, x = define(3, -1)
    rows, columns = x.shape()
    assert (rows * columns + 1).to_text() == "3*i0 + 1"
    assert (2 - columns).is_symbolic()
    assert not (rows + 1).is_symbolic()
    y = fd.ops.broadcast_in_dim(x, [columns * 2, rows, columns], [1, 2])
    assert y.size(0) is columns * 2


def test_scalar_arithmetic_is_recorded() -> None:
    fd, _ = define(3)
    a = fd.define_scalar()
    b = fd.define_scalar(DataType.Int)
    total = a * 2 + b
    assert isinstance(total, Val)
    assert total.dtype() is DataType.Double
    assert "c3 = fd.ops.add(c2, c1)" in str(fd)


def test_constants_are_rounded_to_their_type() -> None:
    fd, _ = define(3)
    assert fd.define_scalar(3.9, dtype=DataType.Int).to_text() == "3"
    assert fd.define_scalar(0.1, dtype=DataType.Float).to_text() == "0.10000000149011612"
    assert fd.define_scalar(1.00390625, dtype=DataType.BFloat16).to_text() == "1.0"
    assert fd.define_scalar(1e40, dtype=DataType.Float).to_text() == "inf"
    assert fd.define_scalar(float("nan")).dtype() is DataType.Double
    assert fd.define_scalar(-0.0).to_text() == "-0.0"
    assert fd.define_scalar(True).dtype() is DataType.Bool
    with pytest.raises(ValueError, match="does not fit into"):
        fd.define_scalar(1 << 40, dtype=DataType.Int32)


def test_truth_of_a_handle_is_refused() -> None:
    _, x = define(3)
    with pytest.raises(TypeError, match=r"bool\(T1\): its value is known only when"):
        bool(x < 1)


@pytest.mark.parametrize(
    ("mutate", "error", "message"),
    [
        (lambda x: x.axis(3), RuntimeError, r"T0.axis\(3\): must lie in \[-2, 2\)"),
        (lambda x: x.axis("0"), TypeError, r"T0.axis\('0'\): an axis number is an int"),
        (lambda x: x.size(2), RuntimeError, r"T0.size\(2\): dim must lie in \[-2, 2\)"),
        (lambda x: x.split(5, 2), RuntimeError, "split"),
        (lambda x: x.split(0, 0), RuntimeError, "split"),
        (lambda x: x.merge(0, 0), RuntimeError, "merge"),
        (lambda x: x.reorder({0: 1, 1: 1}), RuntimeError, "reorder"),
        (lambda x: x.set_device_mesh([0, 1]), TypeError, "takes a multidevice.DeviceMesh"),
        (lambda x: x.axis(0).parallelize("mesh_x"), TypeError, "takes a ParallelType"),
    ],
)
def test_schedule_errors_restate_the_call(
    mutate: Callable[[TensorView], object], error: type[Exception], message: str
) -> None:
    _, x = define(4, 6)
    before = repr(x)
    with pytest.raises(error, match=message):
        mutate(x)
    assert repr(x) == before, "a refused call changes nothing"


def shard(x: TensorView) -> None:
    x.set_device_mesh(DeviceMesh([0, 1]))
    x.outer_split(0, 2)
    x.axis(0).parallelize(ParallelType.mesh_x)


def test_splitting_a_parallel_axis() -> None:
    _, x = define(4, 6)
    shard(x)
    with pytest.raises(RuntimeError, match="mesh_x"):
        x.outer_split(0, 2)


def test_the_same_mesh_axis_twice() -> None:
    _, x = define(4, 6)
    shard(x)
    with pytest.raises(RuntimeError, match="mesh_x"):
        x.axis(2).parallelize(ParallelType.mesh_x)


def test_a_stale_axis() -> None:
    _, x = define(4, 6)
    stale = x.axis(0)
    x.split(0, 2)
    with pytest.raises(RuntimeError, match="split"):
        stale.parallelize(ParallelType.mesh_x)


def test_allocation_takes_the_tensors_own_axes() -> None:
    fd, x = define(4, 6)
    y = fd.ops.neg(x)
    rows, columns = y.get_logical_domain()
    y.set_allocation_domain([columns, rows], True)
    with pytest.raises(RuntimeError, match="takes axes of T1"):
        y.set_allocation_domain(x.get_logical_domain(), True)
    with pytest.raises(RuntimeError, match="set_allocation_domain"):
        y.set_allocation_domain([rows], True)


def test_a_handle_of_another_definition() -> None:
    fd, x = define(4)
    _, stranger = define(4)
    with pytest.raises(
        RuntimeError, match=r"add\(T0, T0\): T0 belongs to another FusionDefinition"
    ):
        fd.ops.add(x, stranger)
    with pytest.raises(RuntimeError, match=r"exp\(T0\): T0 belongs to another"):
        fd.ops.exp(stranger)
    with pytest.raises(RuntimeError, match=r"add_output\(T0\): T0 belongs to another"):
        fd.add_output(stranger)
    with pytest.raises(RuntimeError, match="belongs to another"):
        _ = x + stranger
    _, symbolic = define(-1)
    with pytest.raises(RuntimeError, match=r"broadcast_in_dim\(T0, .*: i0 belongs to another"):
        fd.ops.broadcast_in_dim(x, [symbolic.size(0), 4], [1])


def test_every_handle_says_its_dtype() -> None:
    fd, x = define(4, dtype=DataType.BFloat16)
    assert x.dtype() is DataType.BFloat16
    assert (x + 1.0).dtype() is DataType.Float
    assert fd.ops.set(x).dtype() is DataType.BFloat16
