"""Dense memory in any order."""

from contextlib import nullcontext

import pytest
import torch

from meshfuse.runtime.allocate import (
    allocate,
    allocator,
    as_dense,
    dense_strides,
    is_dense,
    memory_with_room,
)


def test_strides_follow_the_order() -> None:
    assert dense_strides((2, 3, 4), (0, 1, 2)) == (12, 4, 1)
    assert dense_strides((2, 3, 4), (2, 0, 1)) == (3, 1, 6)
    assert dense_strides((2, 0, 4), (0, 1, 2)) == torch.empty(2, 0, 4).stride()
    assert dense_strides((), ()) == ()


def test_allocated_memory_is_dense() -> None:
    made = allocate((2, 3), (1, 0), torch.bfloat16, torch.device("cpu"))
    assert made.dtype == torch.bfloat16
    assert made.T.is_contiguous()
    assert is_dense(made, (1, 0))
    assert not is_dense(made, (0, 1))


def test_only_what_is_not_dense_is_copied() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert as_dense(x, (0, 1)) is x
    assert as_dense(x[:, :1], (0, 1)).stride() == (1, 1)
    part = as_dense(x[:, :2], (1, 0))
    assert part.stride() == (1, 3)
    assert torch.equal(part, x[:, :2])
    single = x[:1].as_strided((1, 4), (99, 1))
    assert as_dense(single, (0, 1)) is single


@pytest.mark.parametrize("is_inference", [False, True])
def test_memory_goes_on_behind_a_tensor_with_room(is_inference: bool) -> None:
    make = allocator((2, 3), (1, 0), torch.float32, torch.device("cpu"), room=4)
    with torch.inference_mode() if is_inference else nullcontext():
        made, other = make(), make()
        memory = memory_with_room(made, (10,))
        memory.copy_(torch.arange(10.0))
        assert torch.equal(made, torch.tensor([[0.0, 2, 4], [1, 3, 5]]))
        assert memory.is_contiguous() and memory.data_ptr() == made.data_ptr()
        assert memory_with_room(made, (8,)).tolist() == list(range(8))
    assert other.data_ptr() != made.data_ptr()
    with pytest.raises(RuntimeError, match="storage"):
        memory_with_room(made, (11,))
