"""The CUDA driver's functions as they are called, over a stand-in for it."""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from meshfuse.dist import cuda_driver
from meshfuse.dist.cuda_driver import FlagOperation, StreamMemory

STREAM, ADD_DEPENDENCIES, SET_DEPENDENCIES = 3, 0, 1
FLAG = (FlagOperation.WRITE, 0x100, 9)


class CapturedStream:
    """A stream that captures: `course` has the nodes that what comes next follows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, course: list[int]) -> None:
        self.course = course
        self.followed: list[list[int]] = []
        self.codes: dict[str, int] = {}
        functions = {
            "cuStreamBatchMemOp_v2": partial(self._put),
            "cuStreamGetCaptureInfo_v2": partial(self._tell),
            "cuStreamUpdateCaptureDependencies": partial(self._follow),
        }
        monkeypatch.setattr(cuda_driver, "driver", lambda: SimpleNamespace(**functions))

    def _put(self, stream: int, count: int, batch: Any, flags: int) -> int:
        assert (stream, count, flags) == (STREAM, 1, 0)
        assert (batch[0].kind, batch[0].address, batch[0].value) == FLAG
        self.followed.append(self.course)
        self.course = [100 + len(self.followed)]
        return self.codes.get("cuStreamBatchMemOp", 0)

    def _tell(
        self, stream: int, status: Any, number: Any, graph: Any, nodes: Any, count: Any
    ) -> int:
        self._nodes = (ctypes.c_void_p * len(self.course))(*self.course)
        ctypes.c_void_p.from_buffer(nodes._obj).value = ctypes.addressof(self._nodes)
        count._obj.value = len(self.course)
        return self.codes.get("cuStreamGetCaptureInfo", 0)

    def _follow(self, stream: int, nodes: Any, count: int, how: int) -> int:
        assert stream == STREAM and how in (ADD_DEPENDENCIES, SET_DEPENDENCIES)
        self.course = [*(self.course if how == ADD_DEPENDENCIES else ()), *nodes[:count]]
        return self.codes.get("cuStreamUpdateCaptureDependencies", 0)


@pytest.mark.parametrize("course", [[5], [5, 6], []])
def test_what_stands_beside_is_followed_by_what_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, course: list[int]
) -> None:
    stream = CapturedStream(monkeypatch, course)
    memory = StreamMemory()
    for number in (101, 102):
        assert memory.put_beside(STREAM, [FLAG]) == (number,)
        assert stream.course == course
    memory.put(STREAM, [FLAG])
    assert stream.course == [103]
    assert stream.followed == [course] * 3
    memory.follow(STREAM, (101, 102))
    memory.put(STREAM, [FLAG])
    assert stream.followed[3:] == [[103, 101, 102]]


@pytest.mark.parametrize(
    "function",
    ["cuStreamBatchMemOp", "cuStreamGetCaptureInfo", "cuStreamUpdateCaptureDependencies"],
)
def test_the_drivers_errors_are_raised(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    stream, memory = CapturedStream(monkeypatch, [5]), StreamMemory()
    stream.codes[function] = 700
    wanted = f"^{function} failed with CUDA error 700$"
    with pytest.raises(RuntimeError, match=wanted):
        memory.put_beside(STREAM, [FLAG])
