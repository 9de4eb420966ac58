"""sdpfa_fwd and sdpfa_bwd on one device: by value, by memory layout, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from attention_programs import (
    BF16,
    DATA_TYPES,
    F16,
    F32,
    TOLERANCES,
    bshe,
    check,
    define_three,
    gradients,
    random_tensors,
    reference,
)
from kernel_paths import PATHS
from meshfuse import DataType, FusionDefinition
from meshfuse.base.errors import UserError, UserTypeError
from meshfuse.ir.parser import parse_program
from meshfuse.ir.printer import print_program


def forward_and_backward(
    shape: Sequence[int], keys: Sequence[int], dtype: torch.dtype = F32, **arguments: Any
) -> FusionDefinition:
    """Inputs: query, key, value, the gradient of the output. Outputs: all seven."""
    with FusionDefinition() as fd:
        kind = {"dtype": DATA_TYPES[dtype], "contiguity": True}
        query = fd.define_tensor(shape, **kind)
        key, value = (fd.define_tensor(keys, **kind) for _ in range(2))
        grad = fd.define_tensor([*shape[:-1], keys[-1]], **kind)
        made = fd.ops.sdpfa_fwd(query, key, value, **arguments)
        given = {"dropout_p": 0.0, "is_causal": False, "scale": None, **arguments}
        back = fd.ops.sdpfa_bwd(
            grad,
            query,
            key,
            value,
            made[0],
            made[1],
            given["dropout_p"],
            given["is_causal"],
            made[2],
            made[3],
            given["scale"],
        )
        for output in (*made, *back):
            fd.add_output(output)
    return fd


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_values_and_gradients(dtype: torch.dtype, causal: bool, scale: float | None) -> None:
    shape = (2, 3, 5, 16)
    fd = forward_and_backward(shape, shape, dtype, is_causal=causal, scale=scale)
    inputs = random_tensors(4, shape, dtype)
    outputs = fd.execute(inputs)
    out, logsumexp = reference(inputs[:3], causal, scale)
    check(outputs[0], out, dtype)
    assert outputs[0].dtype == dtype
    assert outputs[1].dtype == F32
    torch.testing.assert_close(outputs[1], logsumexp.float(), rtol=1e-4, atol=1e-4)
    assert outputs[2].tolist() == [0, 0]
    assert outputs[3].item() == 0
    wanted = gradients(inputs[3], inputs[:3], causal=causal, scale=scale)
    for found, want in zip(outputs[4:], wanted, strict=True):
        assert found.is_contiguous()
        check(found, want, dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (1, 4), (0, 3), (3, 0)])
def test_other_numbers_of_queries_than_of_keys(queries: int, keys: int, causal: bool) -> None:
    """Empty ones, too: torch's flash kernel ends the process there."""
    fd = forward_and_backward([-1, 2, -1, 8], [-1, 2, -1, 8], is_causal=causal)
    inputs = [
        *random_tensors(1, (3, 2, queries, 8), seed=1),
        *random_tensors(2, (3, 2, keys, 8), seed=2),
        *random_tensors(1, (3, 2, queries, 8), seed=3),
    ]
    outputs = fd.execute(inputs)
    out, logsumexp = reference(inputs[:3], causal)
    check(outputs[0], out, F32)
    torch.testing.assert_close(outputs[1], logsumexp.float())
    for found, want in zip(
        outputs[4:], gradients(inputs[3], inputs[:3], causal=causal), strict=True
    ):
        check(found, want, F32)


@pytest.mark.parametrize("features", [7, 12, 300])
@pytest.mark.parametrize("values", [7, 16])
def test_any_number_of_features(features: int, values: int) -> None:
    fd = forward_and_backward([2, 2, 4, features], [2, 2, 4, features])
    inputs = random_tensors(4, (2, 2, 4, features))
    outputs = fd.execute(inputs)
    check(outputs[0], reference(inputs[:3])[0], F32)
    check(outputs[4], gradients(inputs[3], inputs[:3])[0], F32)
    with FusionDefinition() as fd:
        query, key = (fd.define_tensor([2, 2, 4, features]) for _ in range(2))
        value = fd.define_tensor([2, 2, 4, values])
        fd.add_output(fd.ops.sdpfa_fwd(query, key, value)[0])
    inputs[2] = random_tensors(1, (2, 2, 4, values))[0]
    check(fd.execute(inputs[:3])[0], reference(inputs[:3])[0], F32)


@pytest.mark.parametrize("path", PATHS)
def test_leading_axes_are_batch_axes_on_every_path(path: str) -> None:
    shape = (3, 2, 4, 5, 8)
    fd = forward_and_backward(shape, shape, is_causal=True)
    inputs = random_tensors(4, shape)
    outputs = PATHS[path](fd, inputs)
    out, logsumexp = reference(inputs[:3], causal=True)
    check(outputs[0], out, F32)
    check(outputs[1], logsumexp, F32)
    for found, want in zip(outputs[4:], gradients(inputs[3], inputs[:3], causal=True), strict=True):
        check(found, want, F32)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias_shape", [None, (2, 3, 5, 6), (1, 3, 1, 6), (2, 1, 5, 1)])
@pytest.mark.parametrize("mask_shape", [None, (2, 3, 5, 6), (2, 1, 1, 6)])
def test_bias_and_mask(
    bias_shape: tuple[int, ...] | None,
    mask_shape: tuple[int, ...] | None,
    causal: bool,
    dtype: torch.dtype,
) -> None:
    queries, keys = (2, 3, 5, 8), (2, 3, 6, 8)
    inputs = [*random_tensors(1, queries, dtype, 1), *random_tensors(2, keys, dtype, 2)]
    added = torch.zeros(2, 3, 5, 6)
    with FusionDefinition() as fd:
        query, key, value = (
            fd.define_tensor(list(x.shape), dtype=DATA_TYPES[dtype]) for x in inputs
        )
        bias = mask = None
        if bias_shape is not None:
            bias = fd.define_tensor(bias_shape, dtype=DATA_TYPES[dtype])
            inputs += random_tensors(1, bias_shape, dtype, 3)
            added = added + inputs[-1]
        if mask_shape is not None:
            mask = fd.define_tensor(mask_shape, dtype=DataType.Bool)
            kept = random_tensors(1, mask_shape, seed=4)[0] > 0
            kept[0] = False  # rows that may see nothing
            inputs.append(kept)
            added = added.masked_fill(~kept, -math.inf)
        made = fd.ops.sdpfa_fwd(query, key, value, bias, mask, is_causal=causal)
        fd.add_output(made[0])
        fd.add_output(made[1])
    out, logsumexp = reference(inputs[:3], causal, added=added)
    found = fd.execute(inputs)
    check(found[0], out, dtype)
    torch.testing.assert_close(found[1], logsumexp.float(), rtol=1e-4, atol=1e-4)


def test_it_is_what_torch_computes() -> None:
    inputs = random_tensors(3, (2, 4, 33, 64))
    fd = forward_and_backward((2, 4, 33, 64), (2, 4, 33, 64), is_causal=True)
    outputs = fd.execute([*inputs, torch.ones(2, 4, 33, 64)])
    leaves = [x.clone().requires_grad_() for x in inputs]
    query, key, value = leaves
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(outputs[0], out.detach())
    wanted = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close(outputs[4:], list(wanted))


def test_scalars_may_be_inputs() -> None:
    with FusionDefinition() as fd:
        tensors = define_three(fd, [2, 2, 4, 8])
        causal = fd.define_scalar(DataType.Bool)
        scale = fd.define_scalar(DataType.Double)
        dropout = fd.define_scalar(DataType.Double)
        fd.add_output(fd.ops.sdpfa_fwd(*tensors, None, None, dropout, causal, scale)[0])
    inputs = random_tensors(3, (2, 2, 4, 8))
    for is_causal, factor in ((True, 0.5), (False, 2.0)):
        (found,) = fd.execute([*inputs, is_causal, factor, 0.0])
        check(found, reference(inputs, is_causal, factor)[0], F32)
    with pytest.raises(UserError, match=r"dropout_p must lie in \[0, 1\)"):
        fd.execute([*inputs, True, 1.0, 1.5])


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a step between features."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


@pytest.mark.parametrize("lay_out", [bshe, strided, lambda x: x.mT.contiguous().mT])
def test_inputs_with_other_strides_than_declared(
    lay_out: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    shape = (2, 3, 5, 8)
    with FusionDefinition() as fd:
        tensors = define_three(fd, shape)
        made = fd.ops.sdpfa_fwd(*tensors, is_causal=True)
        fd.add_output(made[0])
        fd.add_output(made[1])
    inputs = random_tensors(3, shape)
    outputs = fd.execute([lay_out(x) for x in inputs])
    out, logsumexp = reference(inputs, causal=True)
    check(outputs[0], out, F32)
    check(outputs[1], logsumexp, F32)
    assert outputs[0].is_contiguous()


@pytest.mark.parametrize("dropout_p", [0.25])
def test_dropout_drops_alike_forward_and_backward(dropout_p: float) -> None:
    shape = (2, 3, 16, 8)
    fd = forward_and_backward(shape, shape, dropout_p=dropout_p)
    inputs = random_tensors(4, shape)
    inputs[2] = torch.eye(16, 8).expand(shape).contiguous()
    torch.manual_seed(3)
    first = fd.execute(inputs)
    second = fd.execute(inputs)
    torch.manual_seed(3)
    again = fd.execute(inputs)
    assert first[2].tolist() == [3, 0]
    assert first[3].item() == 0
    assert second[3].item() == 1
    assert not torch.equal(first[0], second[0])
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    # value is the identity: the output has the weights of 8 keys, dropped or scaled.
    weights = (inputs[0] @ inputs[1].mT / math.sqrt(8)).softmax(-1)[..., :8]
    kept = first[0] != 0
    assert abs(kept.float().mean() - (1 - dropout_p)) < 0.06
    torch.testing.assert_close(first[0], weights * kept / (1 - dropout_p))
    # grad_value is the dropped weights, transposed, times what comes in.
    part = first[0].mT @ inputs[3]
    torch.testing.assert_close(first[6][..., :8, :], part, rtol=1e-4, atol=1e-5)


# Text, and what is refused.


def test_text_and_repr_define_it_again() -> None:
    with FusionDefinition() as fd:
        tensors = define_three(fd, [-1, 4, -1, 8])
        bias = fd.define_tensor([-1, 4, -1, -1])
        scale = fd.define_scalar(DataType.Double)
        made = fd.ops.sdpfa_fwd(*tensors, bias, dropout_p=0.5, is_causal=True, scale=scale)
        fd.add_output(made[0])
        back = fd.ops.sdpfa_bwd(
            made[0], *tensors, made[0], made[1], 0.5, False, made[2], made[3], scale
        )
        fd.add_output(back[2])
    text = repr(fd.fusion)
    assert "= sdpfa_fwd(T0, T1, T2, 0.5, true, scale=c0, bias=T3, rng_seed=c1" in text
    assert "= sdpfa_bwd(T4, T0, T1, T2, T4, T5, 0.5, false, T6, T7, scale=c0)" in text
    assert print_program(parse_program(text)) == text
    scope: dict[str, Any] = {}
    exec("from meshfuse import *\n" + repr(fd), scope)
    with FusionDefinition() as again:
        scope["nvfuser_fusion"](again)
    assert repr(again.fusion) == text


SHAPE = [2, 4, 5, 8]


@pytest.mark.parametrize(
    ("shapes", "dtypes", "message"),
    [
        ([SHAPE, [2, 2, 5, 8], [2, 2, 5, 8]], [F32] * 3, "batch and heads .* sizes 4 and 2"),
        ([SHAPE, [2, 1, 5, 8], [2, 1, 5, 8]], [F32] * 3, "batch and heads .* sizes 4 and 1"),
        ([SHAPE, [2, 4, 6, 8], [2, 4, 7, 8]], [F32] * 3, "sequences of key and value"),
        ([SHAPE, [2, 4, 5, 6], SHAPE], [F32] * 3, "features of query and key"),
        ([[4, 5, 8]] * 3, [F32] * 3, "one rank, 4 or more"),
        ([SHAPE, SHAPE, [1, 2, 4, 5, 8]], [F32] * 3, "one rank, 4 or more"),
        ([SHAPE] * 3, [F32, F32, BF16], "one floating type"),
        ([SHAPE] * 3 + [SHAPE[:3]], [F32] * 4, "bias must be f32 of 4 axes"),
        ([SHAPE] * 3 + [[2, 4, 5, 5]], [*[F32] * 3, BF16], "bias must be f32 of 4 axes"),
        ([SHAPE] * 3 + [[2, 4, 5, 7]], [F32] * 4, "sizes 7 and 5"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], message: str
) -> None:
    with FusionDefinition() as fd:
        tensors = [
            fd.define_tensor(shape, dtype=DATA_TYPES[dtype])
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        with pytest.raises(UserError, match=rf"^sdpfa_fwd\(T0 f32.*{message}"):
            bias = tensors[3] if len(tensors) > 3 else None
            fd.ops.sdpfa_fwd(tensors[0], tensors[1], tensors[2], bias)


def test_scalars_of_other_kinds_are_refused() -> None:
    with FusionDefinition() as fd:
        tensors = define_three(fd, SHAPE)
        with pytest.raises(UserError, match="dropout_p must be a real number"):
            fd.ops.sdpfa_fwd(*tensors, dropout_p=True)
        with pytest.raises(UserError, match=r"dropout_p must lie in \[0, 1\), got 1.0"):
            fd.ops.sdpfa_fwd(*tensors, dropout_p=1.0)
        with pytest.raises(UserError, match="is_causal must be a Bool"):
            fd.ops.sdpfa_fwd(*tensors, is_causal=1)
        with pytest.raises(UserError, match="scale must be a real number"):
            fd.ops.sdpfa_fwd(*tensors, scale=False)
        with pytest.raises(UserTypeError, match="takes a TensorView, got float"):
            fd.ops.sdpfa_fwd(tensors[0], tensors[1], 1.0)  # pyright: ignore[reportArgumentType]  # the point
        mask = fd.define_tensor([1, 1, 5, 5])
        with pytest.raises(UserError, match="mask must be bool of 4 axes"):
            fd.ops.sdpfa_fwd(*tensors, mask=mask)


def test_sizes_that_differ_when_run_are_refused() -> None:
    with FusionDefinition() as fd:
        tensors = define_three(fd, [-1, -1, -1, -1])
        fd.add_output(fd.ops.sdpfa_fwd(*tensors)[0])
    query, key, value = random_tensors(3, SHAPE)
    fd.execute([query, key, value])
    for wrong in (key[:, :2], key[:1], key[..., :6], key[..., :3, :]):
        with pytest.raises(UserError, match="of size"):
            fd.execute([query, wrong, value])
