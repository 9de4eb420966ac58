"""Arguments against what a program expects: every refusal, and what the signature tells apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import UserError
from meshfuse.ir import build
from meshfuse.ir.mesh import make_mesh
from meshfuse.ir.program import Program
from meshfuse.runtime.arguments import (
    Expected,
    ExpectedTensor,
    check_arguments,
    expected_inputs,
    flatten_inputs,
    signature_of,
)

CPU = torch.device("cpu")


def tensor_input(
    shape: Sequence[int],
    dtype: DataType = DataType.Float,
    contiguity: Sequence[bool | None] | bool = True,
    stride_order: Sequence[int] = (),
) -> tuple[Expected, ...]:
    """The one input of a program that takes a tensor."""
    program, name = build.define_tensor(Program(), shape, dtype, contiguity, stride_order)
    return expected_inputs(build.add_input(program, name))


def scalar_input(dtype: DataType) -> tuple[Expected, ...]:
    program, name = build.define_scalar(Program(), dtype)
    return expected_inputs(build.add_input(program, name))


def refuse(expected: Sequence[Expected], value: torch.Tensor | complex, pattern: str) -> None:
    with pytest.raises(UserError, match=pattern):
        check_arguments(expected, [value])


def test_what_fits_is_taken_and_scalars_are_converted() -> None:
    x = torch.zeros(2, 3)
    expected = (*tensor_input([-1, 3]), *scalar_input(DataType.Double))
    assert check_arguments(expected, [x, 2]) == ([x, 2.0], CPU)


def test_the_device_of_a_rank_that_holds_no_input_is_that_of_the_empty_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    (want,) = tensor_input([3])
    assert isinstance(want, ExpectedTensor)
    elsewhere = replace(want, sharding=replace(want.sharding, mesh=make_mesh([1])))
    assert check_arguments([elsewhere], [torch.zeros(0)])[1] == CPU
    assert check_arguments([], [])[1] == torch.device("cuda", 1)


def test_the_number_of_inputs() -> None:
    with pytest.raises(UserError, match=r"expected 1 inputs \(T0 float\[3\]\), but got 2"):
        check_arguments(tensor_input([3]), [torch.zeros(3), 1])


def test_a_scalar_for_a_tensor_and_the_other_way_round() -> None:
    refuse(tensor_input([3]), 2, r"Expected input 0, T0.*, to be an at::Tensor but got scalar 2")
    refuse(
        scalar_input(DataType.Double),
        torch.zeros(3),
        r"Expected input 0, d0, to be a scalar but got float tensor of rank 1",
    )


def test_rank_and_element_type() -> None:
    refuse(tensor_input([3]), torch.zeros(3, 1), "a tensor of rank 1, but got a tensor of rank 2")
    refuse(
        tensor_input([3]),
        torch.zeros(3).half(),
        "to be bound to a tensor of dtype float, but got a tensor of dtype __half",
    )
    refuse(tensor_input([3], DataType.Int), torch.zeros(3).char(), "dtype int64_t, .*torch.int8")


@pytest.mark.parametrize(
    ("dtype", "value", "pattern"),
    [
        (DataType.Double, 2 + 1j, r"Scalar value \(2,1\) is not compatible .* data type: double\."),
        (DataType.Int, 2.5, r"i0: Scalar value 2.5 is not compatible .* data type: int64_t\."),
        (DataType.Bool, 1, r"b0: Scalar value 1 is not compatible .* data type: bool\."),
    ],
)
def test_kinds_of_scalars(dtype: DataType, value: complex, pattern: str) -> None:
    refuse(scalar_input(dtype), value, pattern)


def test_memory_that_does_not_hold_the_values() -> None:
    refuse(tensor_input([3]), torch.zeros(3).to_sparse(), r"a dense tensor, but its layout is")
    negated = torch.zeros(3, dtype=torch.complex64).conj().imag
    refuse(tensor_input([3], contiguity=False), negated, r"pass resolve_neg\(\) of it")


def test_static_sizes() -> None:
    refuse(tensor_input([-1, 3]), torch.zeros(2, 4), r"of size 3 on axis 1, .* shape \[2, 4\]")
    refuse(tensor_input([1, 3]), torch.zeros(2, 3), r"of size 1 on axis 0")


@pytest.mark.parametrize(
    ("contiguity", "stride_order", "tensor", "pattern"),
    [
        (True, (), torch.zeros(3, 2).T, "contiguous on axis 1 .* stride 1, but got stride 2"),
        (True, (), torch.zeros(2, 4)[:, :3], "contiguous on axis 0 .* stride 3, but got stride 4"),
        ([False, True], (), torch.zeros(2, 6)[:, ::2], "axis 1 .* stride 1, but got stride 2"),
        ([True, True], (0, 1), torch.zeros(2, 3), "axis 0 .* stride 1, but got stride 3"),
        ([True, None], (), torch.zeros(2, 3), r"expanded \(stride 0\) on axis 1, but got stride 1"),
    ],
)
def test_broken_promises_of_contiguity(
    contiguity: list[bool | None] | bool,
    stride_order: Sequence[int],
    tensor: torch.Tensor,
    pattern: str,
) -> None:
    refuse(tensor_input([-1, -1], DataType.Float, contiguity, stride_order), tensor, pattern)


@pytest.mark.parametrize(
    ("contiguity", "stride_order", "tensor"),
    [
        ([False, True], (), torch.zeros(2, 4)[:, :3]),
        (False, (), torch.zeros(3, 2).T),
        ([True, True], (0, 1), torch.zeros(3, 2).T),
        (True, (), torch.zeros(4, 3)[:1].as_strided((1, 3), (77, 1))),
        (True, (), torch.zeros(4, 0).T),
        ([True, None], (), torch.zeros(3, 1).expand(3, 4)),
    ],
)
def test_kept_promises_of_contiguity(
    contiguity: list[bool | None] | bool, stride_order: Sequence[int], tensor: torch.Tensor
) -> None:
    expected = tensor_input([-1, -1], DataType.Float, contiguity, stride_order)
    assert check_arguments(expected, [tensor])[0][0] is tensor


def test_devices() -> None:
    expected = (*tensor_input([3]), *tensor_input([3]))
    meta = torch.zeros(3, device="meta")
    with pytest.raises(UserError, match=r"on one device, but input 0.* cpu; input 1.* meta"):
        check_arguments(expected, [torch.zeros(3), meta])
    with pytest.raises(UserError, match=r"execute\(device=meta\): input 0.* lies on"):
        check_arguments(expected, [torch.zeros(3)] * 2, torch.device("meta"))
    assert check_arguments((), [], CPU) == ([], CPU)


def test_inputs_are_flattened() -> None:
    assert flatten_inputs([1, [2.0, (True, [])]]) == [1, 2.0, True]
    with pytest.raises(UserError, match="input 1 is str 'x'"):
        flatten_inputs([1, "x"])


def test_the_signature_tells_apart_what_code_depends_on() -> None:
    def signature(*inputs: torch.Tensor | float) -> object:
        return signature_of(inputs)

    x = torch.zeros(4, 6)
    same = signature(x, 1.0)
    assert signature(torch.ones(8, 2), 2.5) == same
    assert hash(signature(torch.ones(8, 2), 2.5)) == hash(same)
    different = [
        signature(x.double(), 1.0),
        signature(x.T, 1.0),
        signature(x[:, :3], 1.0),
        signature(x[:1], 1.0),
        signature(x[:, :1].expand(4, 6), 1.0),
        signature(x.to("meta"), 1.0),
        signature(x, 1),
        signature(x),
    ]
    assert same not in different
