"""`fd.ops`: what each operation accepts and refuses when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshfuse
from meshfuse import DataType, FusionDefinition, TensorView, Val
from meshfuse.ir.pointwise import SCALAR_FUNCTIONS

Case = Callable[[FusionDefinition, TensorView], Any]


@pytest.fixture
def fd() -> FusionDefinition:
    return FusionDefinition()


@pytest.fixture
def x(fd: FusionDefinition) -> TensorView:
    return fd.define_tensor([2, 3], contiguity=True)


def test_every_scalar_function_is_an_operation(fd: FusionDefinition) -> None:
    assert set(SCALAR_FUNCTIONS) <= set(dir(fd.ops))
    for name in dir(fd.ops):
        assert callable(getattr(fd.ops, name))


def test_an_unknown_operation_lists_the_known_ones(fd: FusionDefinition) -> None:
    with pytest.raises(AttributeError, match="no operation 'tanhh'; it has abs, add, broadcast"):
        fd.ops.tanhh  # noqa: B018  # the access is what raises


def test_pointwise_operands_are_positional(fd: FusionDefinition, x: TensorView) -> None:
    with pytest.raises(TypeError):
        fd.ops.add(a=x, b=x)  # type: ignore[call-overload]  # the point of the test


def test_operations_without_a_definition_find_it_by_operands(x: TensorView) -> None:
    assert isinstance(meshfuse.ops.add(x, 1.0), TensorView)
    with pytest.raises(TypeError, match=r"add\(1, 2\): takes at least one TensorView or Val"):
        meshfuse.ops.add(1, 2)


def test_scalars_alone_give_a_scalar(fd: FusionDefinition) -> None:
    assert isinstance(fd.ops.add(1, 2.0), Val)
    assert fd.ops.add(1, 2.0).dtype() is DataType.Double
    assert fd.ops.lt(1, 2).dtype() is DataType.Bool
    assert fd.ops.cast(3.7, DataType.Int).to_text() == "3"


@pytest.mark.parametrize(
    ("build", "shape", "dtype"),
    [
        (lambda fd, x: fd.ops.set(x), "[2, 3]", DataType.Float),
        (lambda fd, x: fd.ops.cast(x, DataType.BFloat16), "[2, 3]", DataType.BFloat16),
        (lambda fd, x: fd.ops.cast(arg=x, dtype=DataType.Int), "[2, 3]", DataType.Int),
        (lambda fd, x: fd.ops.lt(x, 0), "[2, 3]", DataType.Bool),
        (lambda fd, x: fd.ops.where(fd.ops.lt(x, 0), x, 0.0), "[2, 3]", DataType.Float),
        (lambda fd, x: fd.ops.broadcast(x, [True, False, False]), "[1, 2, 3]", DataType.Float),
        (lambda fd, x: fd.ops.broadcast_in_dim(x, [4, 2, 3], [1, 2]), "[4, 2, 3]", DataType.Float),
        (lambda fd, x: fd.ops.permute(x, [1, 0]), "[3, 2]", DataType.Float),
        (lambda fd, x: fd.ops.permute(x, dims=(-1, 0)), "[3, 2]", DataType.Float),
        (lambda fd, x: fd.ops.sum(x), "[]", DataType.Float),
        (lambda fd, x: fd.ops.sum(x, 0), "[3]", DataType.Float),
        (lambda fd, x: fd.ops.sum(x, dim=-1, keepdim=True), "[2, 1]", DataType.Float),
        (lambda fd, x: fd.ops.sum(x, [0, 1], True), "[1, 1]", DataType.Float),
        (lambda fd, x: fd.ops.sum(x, dims=[1], dtype=DataType.Double), "[2]", DataType.Double),
        (lambda fd, x: fd.ops.sum(fd.ops.lt(x, 0), [1]), "[2]", DataType.Int),
        (lambda fd, x: fd.ops.max(x, [1]), "[2]", DataType.Float),
        (lambda fd, x: fd.ops.var_mean(x, [1])[0], "[2]", DataType.Float),
        (lambda fd, x: fd.ops.var_mean(x, dims=[1], keepdim=True)[1], "[2, 1]", DataType.Float),
        (lambda fd, x: fd.ops.linear(x, x), "[2, 2]", DataType.Float),
        (lambda fd, x: fd.ops.matmul(x, fd.ops.permute(x, [1, 0])), "[2, 2]", DataType.Float),
        (
            lambda fd, x: fd.ops.squeeze(fd.ops.sum(x, [0], keepdim=True), [0]),
            "[3]",
            DataType.Float,
        ),
    ],
)
def test_shape_and_type(
    fd: FusionDefinition, x: TensorView, build: Case, shape: str, dtype: DataType
) -> None:
    y = build(fd, x)
    assert f"[{', '.join(size.to_text() for size in y.shape())}]" == shape
    assert y.dtype() is dtype


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda fd, x: fd.ops.add(x, torch.ones(2)), TypeError, "got Tensor; torch tensors enter"),
        (lambda fd, x: fd.ops.add(x, None), TypeError, r"add\(T0, None\)"),
        (lambda fd, x: fd.ops.cast(x, torch.float32), TypeError, "dtype must be a DataType"),
        (lambda fd, x: fd.ops.where(x, x, x), RuntimeError, "(?i)bool"),
        (lambda fd, x: fd.ops.add(x, fd.define_tensor([2, 4])), RuntimeError, "add"),
        (lambda fd, x: fd.ops.broadcast(x, [False]), RuntimeError, "broadcast"),
        (lambda fd, x: fd.ops.broadcast(x, [False] * 3), RuntimeError, "broadcast"),
        (lambda fd, x: fd.ops.broadcast(x, [0, 0]), TypeError, "list of bools, got 0 among"),
        (lambda fd, x: fd.ops.broadcast_in_dim(x, [2, 3], [0]), RuntimeError, "broadcast_in_dim"),
        (lambda fd, x: fd.ops.broadcast_in_dim(x, [3], [0, 1]), RuntimeError, "broadcast_in_dim"),
        (lambda fd, x: fd.ops.broadcast_in_dim(x, [2, 3], [0, 0]), RuntimeError, "twice"),
        (lambda fd, x: fd.ops.broadcast_in_dim(x, [2, 3], [0, 2]), RuntimeError, "dim 2"),
        (lambda fd, x: fd.ops.broadcast_in_dim(x, [2, 3], 0), TypeError, "list of ints"),
        (lambda fd, x: fd.ops.broadcast_in_dim(x, [2.0, 3], [0, 1]), TypeError, "got float"),
        (lambda fd, x: fd.ops.broadcast_in_dim(x, [-2, 3], [0, 1]), RuntimeError, "negative"),
        (lambda fd, x: fd.ops.permute(x, 0), TypeError, "dims must be a list of ints, got int"),
        (lambda fd, x: fd.ops.permute(x, [0, 0]), RuntimeError, "permute"),
        (lambda fd, x: fd.ops.permute(x, [0, 2]), RuntimeError, "permute"),
        (lambda fd, x: fd.ops.permute(x, [0]), RuntimeError, "permute"),
        (lambda fd, x: fd.ops.squeeze(x, [0]), RuntimeError, "squeeze"),
        (lambda fd, x: fd.ops.squeeze(x, [7]), RuntimeError, "squeeze"),
        (lambda fd, x: fd.ops.size(x, 2), RuntimeError, r"size\(T0, 2\): dim must lie in"),
        (lambda fd, x: fd.ops.size(x, -3), RuntimeError, "dim must lie in"),
        (lambda fd, x: fd.ops.sum(x, [0, -2]), RuntimeError, "sum"),
        (lambda fd, x: fd.ops.sum(x, [2]), RuntimeError, "sum"),
        (lambda fd, x: fd.ops.sum(x, []), RuntimeError, "sum"),
        (lambda fd, x: fd.ops.sum(x, [0], dim=1), TypeError, "takes dims or dim, not both"),
        (lambda fd, x: fd.ops.sum(2.0), TypeError, "takes a TensorView, got float"),
        (lambda fd, x: fd.ops.max(x, [0], dtype=DataType.Double), RuntimeError, "max"),
        (lambda fd, x: fd.ops.var_mean(x, 1), TypeError, "dims must be a list of ints"),
        (lambda fd, x: fd.ops.var_mean(x, [1, 1]), RuntimeError, "var_mean"),
        (lambda fd, x: fd.ops.var_mean(x, [3]), RuntimeError, "var_mean"),
        (lambda fd, x: fd.ops.matmul(x, x), RuntimeError, "matmul"),
        (
            lambda fd, x: fd.ops.matmul(x, fd.define_tensor([3, 2], dtype=DataType.Double)),
            RuntimeError,
            "matmul",
        ),
        (lambda fd, x: fd.ops.linear(x, fd.define_tensor([4, 5])), RuntimeError, "linear"),
        (lambda fd, x: fd.ops.linear(x, fd.define_tensor([3])), RuntimeError, "linear"),
        (lambda fd, x: fd.ops.linear(x, x, 2.0), TypeError, "takes a TensorView, got float"),
    ],
)
def test_refusals_restate_the_call_and_change_nothing(
    fd: FusionDefinition, x: TensorView, build: Case, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(fd, x)
    assert "fd.ops" not in str(fd), "a refused call leaves no trace"
