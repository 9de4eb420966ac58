"""Memory orders and contiguity of strided tensors."""

import pytest

from meshfuse.base.errors import UserError
from meshfuse.base.orders import compute_tensor_descriptor, memory_order

T, F, N = True, False, None


@pytest.mark.parametrize(
    ("sizes", "strides", "contiguity", "stride_order"),
    [
        ([], [], [], []),
        ([2, 1, 3, 1, 4, 3], [12, 4, 4, 4, 1, 0], [T, N, T, N, T, N], [5, 4, 3, 2, 1, 0]),
        ([2, 3, 1, 5, 4], [28, 4, 14, 0, 1], [F, N, T, N, T], [4, 2, 3, 1, 0]),
        ([2, 2, 2, 2], [8, 4, 2, 1], [T, T, T, T], [3, 2, 1, 0]),
        (
            [2, 2, 1, 1, 2, 2, 2],
            [8, 4, 3, 9, 2, 0, 1],
            [N, T, T, N, T, N, T],
            [5, 4, 3, 6, 2, 1, 0],
        ),
        ([2, 2, 2, 2], [8, 4, 0, 2], [T, T, N, F], [3, 2, 1, 0]),
        ([3, 2], [1, 3], [T, T], [0, 1]),
    ],
)
def test_descriptor(
    sizes: list[int], strides: list[int], contiguity: list[bool | None], stride_order: list[int]
) -> None:
    assert compute_tensor_descriptor(sizes, strides) == (tuple(contiguity), tuple(stride_order))


def test_memory_order_is_slowest_first() -> None:
    assert memory_order([3, 2, 4], [1, 12, 3]) == (1, 2, 0)


def test_errors() -> None:
    with pytest.raises(UserError, match="differ in length"):
        compute_tensor_descriptor([2], [])
    with pytest.raises(UserError, match="negative"):
        compute_tensor_descriptor([2], [-1])
