"""FusionDefinition before it runs: inputs, outputs, and the Python that repeats it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import meshfuse
from meshfuse import DataType, FusionDefinition, ParallelType, multidevice
from meshfuse.multidevice import DeviceMesh


def last_line(fd: FusionDefinition) -> str:
    return str(fd).strip().splitlines()[-1].strip()


@pytest.mark.parametrize(
    ("define", "statement"),
    [
        (
            lambda fd: fd.define_tensor([2, -1], [True, False], DataType.Half, False, [0, 1]),
            "shape=[2, -1], contiguity=[True, False], dtype=DataType.Half, is_cpu=False, "
            "stride_order=[0, 1]",
        ),
        (
            lambda fd: fd.define_tensor(shape=[1, 4], contiguity=True),
            "shape=[1, 4], contiguity=True, dtype=DataType.Float, is_cpu=False",
        ),
        (
            lambda fd: fd.define_tensor([2, 4]),
            "shape=[2, 4], contiguity=False, dtype=DataType.Float, is_cpu=False",
        ),
        (
            lambda fd: fd.define_tensor([2, 1, 4], [4, 4, 1], DataType.Int),
            "shape=[-1, 1, -1], contiguity=[True, None, True], dtype=DataType.Int, is_cpu=False",
        ),
        (
            lambda fd: fd.define_tensor(sizes=[2, 4], strides=[1, 2], static_sizes=True),
            "shape=[2, 4], contiguity=[True, True], dtype=DataType.Float, is_cpu=False, "
            "stride_order=[0, 1]",
        ),
        (
            lambda fd: fd.from_pytorch(torch.zeros(3, 8)[:, ::2]),
            "shape=[-1, -1], contiguity=[True, False], dtype=DataType.Float, is_cpu=False",
        ),
        (
            lambda fd: fd.from_pytorch(torch.zeros(4, 1).expand(4, 6), static_sizes=True),
            "shape=[4, 6], contiguity=[True, None], dtype=DataType.Float, is_cpu=False",
        ),
    ],
)
def test_the_three_ways_to_define_a_tensor(
    define: Callable[[FusionDefinition], object], statement: str
) -> None:
    fd = FusionDefinition()
    define(fd)
    assert last_line(fd) == f"tv0 = fd.define_tensor({statement})"


@pytest.mark.parametrize(
    ("define", "error", "message"),
    [
        (
            lambda fd: fd.define_tensor([2, 2], [True]),
            RuntimeError,
            "Length of contiguity argument",
        ),
        (lambda fd: fd.define_tensor([2, -2]), RuntimeError, "-2"),
        (lambda fd: fd.define_tensor([1 << 70]), TypeError, "no 64-bit integer"),
        (lambda fd: fd.define_tensor([2.0]), TypeError, "list of ints"),
        (lambda fd: fd.define_tensor(4), TypeError, "list of ints"),
        (lambda fd: fd.define_tensor(shape=[2, 2], contiguity=[1, 0]), TypeError, "True, False"),
        (lambda fd: fd.define_tensor([2, 2], stride_order=[0, 0]), RuntimeError, "twice"),
        (lambda fd: fd.define_tensor([2, 2], stride_order=[0, 2]), RuntimeError, "stride_order"),
        (lambda fd: fd.define_tensor([2, 2], stride_order=[0]), RuntimeError, "stride_order"),
        (lambda fd: fd.define_tensor([2], is_cpu=True), RuntimeError, "CPU non-scalar"),
        (lambda fd: fd.define_tensor([2], dtype=torch.float32), TypeError, "be a DataType"),
        (lambda fd: fd.define_tensor(sizes=[2, 2], strides=[1]), RuntimeError, "strides"),
        (lambda fd: fd.define_tensor(sizes=[2]), TypeError, "sizes come with strides"),
        (lambda fd: fd.define_tensor(), TypeError, "takes .shape"),
        (lambda fd: fd.define_tensor([2], size=3), TypeError, "takes .shape"),
        (lambda fd: fd.from_pytorch([1.0]), TypeError, "takes a torch tensor"),
        (lambda fd: fd.from_pytorch(torch.zeros(2, dtype=torch.int8)), TypeError, "torch.int8"),
        (lambda fd: fd.define_scalar("a"), TypeError, "bool, int or float"),
        (lambda fd: fd.define_vector(-1), TypeError, "0 or more"),
        (lambda fd: fd.add_output(fd.define_scalar()), RuntimeError, "Non-TensorView outputs"),
    ],
)
def test_refusals(
    define: Callable[[FusionDefinition], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        define(FusionDefinition())


def test_scalars_and_vectors_are_inputs_in_order() -> None:
    fd = FusionDefinition()
    a = fd.define_scalar()
    b = fd.define_scalar(None, DataType.Int)
    c, d = fd.define_vector(2)
    constant = fd.define_scalar(2.5)
    assert fd.fusion.inputs() == [a, b, c, d]
    assert [value.dtype() for value in (a, b, c, constant)] == [
        DataType.Double,
        DataType.Int,
        DataType.Int,
        DataType.Double,
    ]


def test_validation_says_what_is_missing() -> None:
    fd = FusionDefinition()
    assert fd.validate_definition() == (
        False,
        "Fusion is empty! Use `with FusionDefinition() as fd: ...` to define a fusion.",
    )
    x = fd.define_tensor([2])
    valid, message = fd.validate_definition()
    assert not valid
    assert message is not None
    assert "no outputs" in message
    fd.add_output(x)
    assert fd.validate_definition() == (True, None)


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError, meshfuse.UserError])
def test_a_definition_without_outputs_does_not_run(error: type[Exception]) -> None:
    with FusionDefinition() as fd:
        fd.define_tensor([2])
    with pytest.raises(error, match="execute: Fusion is empty! It has no outputs"):
        fd.execute([torch.zeros(2)])


def test_an_exception_inside_with_goes_on() -> None:
    with pytest.raises(ZeroDivisionError), FusionDefinition():
        _ = 1 / 0


def layer(fd: FusionDefinition) -> None:
    """Every kind of statement."""
    x = fd.define_tensor([-1, 1, 6], contiguity=[True, None, True])
    scale = fd.define_scalar(DataType.Float)
    weight = fd.define_tensor([8, 6], stride_order=[0, 1])
    bias = fd.define_tensor([8])
    variance, mean = fd.ops.var_mean(x, [-1], correction=0, keepdim=True)
    normal = (x - mean) * fd.ops.rsqrt(variance + 1e-5) * scale
    rows = x.size(0)
    wide = fd.ops.broadcast_in_dim(normal, [rows, 4, fd.ops.size(x, 2)], [0, 1, 2])
    wide = fd.ops.add(wide, fd.define_scalar(0.1, dtype=DataType.Float))
    y = fd.ops.linear(wide, weight, bias)
    z = fd.ops.where(y > 0, y, float("-inf"))
    z = fd.ops.mul(z, rows * 2 + 1)
    total = fd.ops.sum(z, dims=[0], dtype=DataType.Double)
    largest = fd.ops.max(z, dim=1, keepdim=True)
    turned = fd.ops.permute(fd.ops.squeeze(fd.ops.broadcast(bias, [False, True]), [1]), [0])
    fd.add_output(fd.ops.cast(z, DataType.BFloat16))
    fd.add_output(total)
    fd.add_output(largest)
    fd.add_output(turned + bias, bias)
    mesh = DeviceMesh([[0, 1], [2, 3]], names=["dp", "tp"])
    weight.set_device_mesh(mesh)
    weight.outer_split(0, 2)
    weight.axis(0).parallelize(mesh.axis("tp"))
    y.set_device_mesh(DeviceMesh([0, 1]))
    y.split(2, 2, inner_split=False).reorder({2: 0})
    y.axis(0).parallelize(ParallelType.mesh_x)
    total.merge(1, 2)
    z.set_allocation_domain([z.axis(2), z.axis(0), z.axis(1)], True)


def test_repr_rebuilds_the_same_program() -> None:
    with FusionDefinition() as fd:
        layer(fd)
    scope = {
        name: getattr(meshfuse, name)
        for name in ("FusionDefinition", "DataType", "ParallelType", "multidevice")
    }
    exec(str(fd), scope)
    with FusionDefinition() as again:
        scope["nvfuser_fusion"](again)
    assert str(again.fusion) == str(fd.fusion)
    assert str(again) == str(fd)


def test_repr_of_a_small_program() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1], contiguity=True)
        fd.add_output(fd.ops.sum(fd.ops.exp(x) * 2.0))
    assert str(fd) == (
        "def nvfuser_fusion(fd : FusionDefinition) -> None :\n"
        "    tv0 = fd.define_tensor(shape=[-1], contiguity=True, dtype=DataType.Float, "
        "is_cpu=False)\n"
        "    tv1 = fd.ops.exp(tv0)\n"
        "    tv2 = fd.ops.mul(tv1, 2.0)\n"
        "    tv3 = fd.ops.sum(tv2)\n"
        "    fd.add_output(tv3)\n"
    )


def test_repr_of_an_empty_definition_runs() -> None:
    scope = {"FusionDefinition": FusionDefinition}
    exec(str(FusionDefinition()), scope)
    scope["nvfuser_fusion"](FusionDefinition())  # type: ignore[operator]  # made by exec


def test_the_module_has_the_names_of_the_surface() -> None:
    for name in (
        "FusionDefinition TensorView Val IterDomain DataType ParallelType MemoryType "
        "DistributedTensor DeviceMesh multidevice ops version __version__ UserError Unsupported"
    ).split():
        assert hasattr(meshfuse, name), name
    assert meshfuse.version() == meshfuse.__version__
    assert multidevice.DeviceMesh is meshfuse.DeviceMesh
    assert getattr(meshfuse.MemoryType, "global").value == "global"
