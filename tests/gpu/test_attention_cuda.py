"""Attention through torch's flash kernels on CUDA, and random numbers equal to a CPU's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from meshfuse import DataType, FusionDefinition

DATA_TYPES = {
    torch.float32: DataType.Float,
    torch.float16: DataType.Half,
    torch.bfloat16: DataType.BFloat16,
}
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", DATA_TYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("features", [64, 12])
def test_values_and_gradients(features: int, causal: bool, dtype: torch.dtype) -> None:
    """12 features: 16-bit floats go through products, as float32 does anyway."""
    shape = (2, 3, 33, features)
    with FusionDefinition() as fd:
        query, key, value, grad = (
            fd.define_tensor(shape, dtype=DATA_TYPES[dtype], contiguity=True) for _ in range(4)
        )
        made = fd.ops.sdpfa_fwd(query, key, value, is_causal=causal)
        out, logsumexp, seed, offset = made
        back = fd.ops.sdpfa_bwd(
            grad, query, key, value, out, logsumexp, 0.0, causal, seed, offset, None
        )
        for output in (*made, *back):
            fd.add_output(output)
    inputs = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4)]
    outputs = fd.execute(inputs)
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    gradients = torch.autograd.grad(wanted, (q, k, v), inputs[3].double())
    for found, want in zip((outputs[0], *outputs[4:]), (wanted, *gradients), strict=True):
        assert found.is_cuda
        assert found.is_contiguous()
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(found, want.to(dtype), rtol=tolerance, atol=tolerance)
    assert outputs[1].dtype == torch.float32
    assert outputs[1].shape == shape[:3]


def test_numbers_are_those_of_a_cpu() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 7])
        fd.add_output(fd.ops.mul(x, fd.ops.rand_like(x)))
    data = torch.ones(1001, 7)
    torch.manual_seed(3)
    wanted = [fd.execute([data])[0] for _ in range(3)]
    torch.manual_seed(3)
    found = [fd.execute([data.cuda()])[0].cpu() for _ in range(3)]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
