"""Where tensors lie in memory that users keep."""

from __future__ import annotations

from typing import Any, cast

import torch

from meshfuse.dist.kept_memory import KeptMemories, KeptMemory, order_in_memory


def test_tensors_are_found_where_they_lie() -> None:
    whole = torch.arange(100, dtype=torch.int32)
    window: Any = cast(Any, None)
    ranges = [(40, 60), (0, 10), (60, 61)]  # in elements, in the order in which they were made
    memories = KeptMemories()
    assert memories.find(whole) is None and not memories
    for serial, (start, stop) in enumerate(ranges):
        size = 4 * (stop - start)
        memories.add(KeptMemory((0, 1), serial, window, whole[start:].data_ptr(), size))
    assert len(memories) == 3
    for start in range(100):
        for stop in range(start + 1, 101):
            found = memories.find(whole[start:stop])
            wanted = [
                (serial, 4 * (start - first))
                for serial, (first, last) in enumerate(ranges)
                if first <= start and stop <= last
            ]
            assert ([(found[0].serial, found[1])] if found else []) == wanted


def test_the_order_of_axes_in_memory() -> None:
    whole = torch.zeros(2, 3, 4)
    assert order_in_memory(whole) == order_in_memory(whole[:, :1].contiguous()) == (0, 1, 2)
    assert order_in_memory(whole.permute(2, 0, 1)) == (1, 2, 0)
    assert order_in_memory(whole[:1].expand(1, 3, 4).as_strided((1, 3, 4), (1, 4, 1))) == (0, 1, 2)
    assert order_in_memory(whole[:, :2]) == order_in_memory(whole[0, 0].expand(3, 4)) == ()
