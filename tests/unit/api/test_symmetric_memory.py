"""symmetric_empty where there is no GPU: an ordinary tensor, and the same errors."""

from __future__ import annotations

import pytest
import torch

from meshfuse import DataType
from meshfuse.base.errors import UserError
from meshfuse.multidevice import DeviceMesh, symmetric_empty


def test_on_cpus_it_is_an_ordinary_tensor() -> None:
    found = symmetric_empty((2, 3), DataType.BFloat16, DeviceMesh([0]), device="cpu")
    assert found.shape == (2, 3) and found.dtype == torch.bfloat16 and found.is_contiguous()


def test_errors_name_the_mesh() -> None:
    with pytest.raises(UserError, match=r"rank 0 is not in DeviceMesh\{1 2\}"):
        symmetric_empty((2,), torch.float32, DeviceMesh([1, 2]))
    with pytest.raises(UserError, match="several axes; say along which"):
        symmetric_empty((2,), torch.float32, DeviceMesh([[0, 1]]))
