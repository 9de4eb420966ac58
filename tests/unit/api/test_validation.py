"""Tolerances by type and reduced size, and what `validate` accepts."""

from __future__ import annotations

import pytest
import torch

from meshfuse import (
    DataType,
    FusionDefinition,
    get_val_tolerances,
    validate_with_auto_inferred_outputs,
)
from meshfuse.api.validation import tolerance
from meshfuse.multidevice import DeviceMesh

X = torch.linspace(-2, 2, 12).reshape(3, 4)


def sums(*dims: list[int], dtype: DataType = DataType.Float) -> FusionDefinition:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], dtype=dtype)
        for dim in dims:
            x = fd.ops.sum(x, dim)
        fd.add_output(x if dims else fd.ops.neg(x))
    return fd


@pytest.mark.parametrize(
    ("dtype", "reduced", "expected"),
    [
        (DataType.Float, 1, (1.68222e-6, 2.23704e-6)),
        (DataType.Float, 4, (2.23704e-6, 2.23704e-8)),
        (DataType.Double, 1000, (5.78476e-5, 5.78476e-7)),
        (DataType.Float, 3_000_000, (2 * 3.43043e-3, 2 * 3.43043e-5)),
        (DataType.Half, 1, (0.00390625, 0.0078125)),
        (DataType.Half, 1024, (0.124686, 0.00124686)),
        (DataType.BFloat16, 1, (0.00390625, 0.0078125)),
        (DataType.BFloat16, 1024, (1.24686, 0.0124686)),
        (DataType.Int, 1024, (0, 0)),
    ],
)
def test_tolerance(dtype: DataType, reduced: int, expected: tuple[float, float]) -> None:
    assert tolerance(dtype, reduced) == pytest.approx(expected)


def test_reductions_in_a_row_multiply() -> None:
    x = torch.zeros(8, 16)
    assert get_val_tolerances(sums().fusion, [x]) == [tolerance(DataType.Float, 1)]
    assert get_val_tolerances(sums([1]).fusion, [x]) == [tolerance(DataType.Float, 16)]
    assert get_val_tolerances(sums([1], [0]).fusion, [x]) == [tolerance(DataType.Float, 128)]


def test_contractions_reduce() -> None:
    with FusionDefinition() as fd:
        x, w = fd.define_tensor([-1, -1]), fd.define_tensor([-1, -1])
        fd.add_output(fd.ops.linear(x, w))
    args = [torch.zeros(2, 64), torch.zeros(3, 64)]
    assert get_val_tolerances(fd.fusion, args) == [tolerance(DataType.Float, 64)]


def test_validate_returns_the_outputs() -> None:
    fd = sums([1])
    assert torch.equal(fd.validate([X])[0], fd.execute([X])[0])
    assert torch.equal(fd.validate([X], [X.sum(1)])[0], fd.execute([X])[0])


def test_references_must_agree() -> None:
    fd = sums([1])
    with pytest.raises(AssertionError, match=r"output 0 differs by up to 1; accepted are 2\.23"):
        fd.validate([X], [X.sum(1) + 1])
    with pytest.raises(AssertionError, match=r"has shape \[3\], expected \[4\]"):
        fd.validate([X], [X.sum(0)])
    with pytest.raises(AssertionError, match="0 outputs were expected, there are 1"):
        fd.validate([X], [])


def test_nan_equals_nan_only_when_evaluated() -> None:
    fd = sums()
    x = torch.full((2, 2), float("nan"))
    fd.validate([x])
    with pytest.raises(AssertionError, match="output 0 differs"):
        fd.validate([x], [-x])


def test_wrong_outputs_of_a_program() -> None:
    fusion = sums().fusion
    with pytest.raises(RuntimeError, match="output 0 differs by up to 2"):
        validate_with_auto_inferred_outputs(fusion, [2 - X], [X])


def test_updates_in_place_are_validated_on_the_inputs_before() -> None:
    with FusionDefinition() as fd:
        x = fd.from_pytorch(X)
        y = fd.ops.add(x, 1.0)
        fd.add_output(y, x)
        fd.add_output(fd.ops.mul(y, 2.0))
    x = X.clone()
    [doubled] = fd.validate([x])
    torch.testing.assert_close(doubled, 2 * (X + 1))
    torch.testing.assert_close(x, X + 1)


def test_a_mesh_needs_references() -> None:
    fd = FusionDefinition()
    x = fd.from_pytorch(X)
    x.set_device_mesh(DeviceMesh([0]))
    fd.add_output(fd.ops.neg(x))
    with pytest.raises(RuntimeError, match=r"T0 lies on .*; pass reference_outputs"):
        fd.validate([X])
    fd.validate([X], [-X])


def test_a_kernel_scheduled_by_hand_is_validated() -> None:
    fd = sums([1])
    assert torch.equal(fd.manual_validate([X])[0], fd.manual_execute([X])[0])
    with pytest.raises(AssertionError, match="output 0 differs by up to 1"):
        fd.manual_validate([X], [X.sum(1) + 1])
