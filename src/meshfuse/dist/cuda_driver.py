"""What the CUDA driver is asked for directly, as torch has it not, and marks on streams.

Stream memory operations order streams across GPUs: they write and await 32-bit flags, and take
neither a kernel nor a multiprocessor. Source: CUDA driver API, "Stream memory operations" and
"Stream management".
"""

# torch tells a stream's handle to those who ask its private module: the public way takes long.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final, final

import torch

_RELAXED_CAPTURE: Final = 2
_ADD_DEPENDENCIES: Final = 0
_SET_DEPENDENCIES: Final = 1

current_handle: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
"""The handle of the current stream of a device, by the device's index. Torch's own function, with
nothing between; 0 where torch was built without CUDA, as the default stream has it."""


class FlagOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams: a flag of 32 bits that is awaited, until it is at least `value`, or
    written when all before it on the stream is done and visible to all devices. The rest is 0."""

    AWAIT: Final = 1
    WRITE: Final = 2
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint32),
        ("upper", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 3),
    )


@final
class StreamMemory:
    """Flags that streams write and await. Raises OSError or AttributeError where the driver is
    missing or too old, and RuntimeError for errors of its functions."""

    __slots__ = ("_batch", "_capture_info", "_follow_in_capture")

    def __init__(self) -> None:
        library, handle = driver(), ctypes.c_void_p
        self._batch = library.cuStreamBatchMemOp_v2
        self._batch.argtypes = (handle, ctypes.c_uint, handle, ctypes.c_uint)
        self._capture_info = library.cuStreamGetCaptureInfo_v2
        self._capture_info.argtypes = (handle,) * 6
        self._follow_in_capture = library.cuStreamUpdateCaptureDependencies
        self._follow_in_capture.argtypes = (handle, handle, ctypes.c_size_t, ctypes.c_uint)

    def put(self, stream: int, operations: Sequence[tuple[int, int, int]]) -> None:
        """Put operations on a stream, in order: kind, address and value of each."""
        batch = (FlagOperation * len(operations))(*operations)
        _check("cuStreamBatchMemOp", self._batch(stream, len(operations), batch, 0))

    def put_beside(
        self, stream: int, operations: Sequence[tuple[int, int, int]]
    ) -> tuple[int, ...]:
        """Put operations on a stream that captures: they follow what it has so far, and what comes
        behind does not wait for them. The graph ends when all has. The nodes that they are."""
        followed = self._course(stream)
        self.put(stream, operations)
        nodes = self._course(stream)
        self._update(stream, followed, _SET_DEPENDENCIES)
        return nodes

    def follow(self, stream: int, nodes: Sequence[int]) -> None:
        """What comes next on a stream that captures waits for these nodes, too."""
        self._update(stream, nodes, _ADD_DEPENDENCIES)

    def _course(self, stream: int) -> tuple[int, ...]:
        """The nodes that what comes next on a stream follows."""
        status, count, nodes = ctypes.c_int(), ctypes.c_size_t(), ctypes.POINTER(ctypes.c_void_p)()
        asked = (ctypes.byref(status), None, None, ctypes.byref(nodes), ctypes.byref(count))
        _check("cuStreamGetCaptureInfo", self._capture_info(stream, *asked))
        # copied, as the driver's list is good until something is put on the stream
        return tuple(nodes[k] or 0 for k in range(count.value))

    def _update(self, stream: int, nodes: Sequence[int], how: int) -> None:
        handles = (ctypes.c_void_p * len(nodes))(*nodes)
        code = self._follow_in_capture(stream, handles, len(nodes), how)
        _check("cuStreamUpdateCaptureDependencies", code)


def _check(function: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{function} failed with CUDA error {code}")


def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def allow_captures_elsewhere() -> None:
    """From now on this thread may look at events while another one captures a graph."""
    mode = ctypes.c_int(_RELAXED_CAPTURE)
    try:
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError):
        return  # without the driver there is nothing to look at


def set_stream(stream: torch.cuda.Stream) -> None:
    """As torch.cuda.set_stream, in half the time."""
    torch._C._cuda_setStream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def mark_stream(stream: torch.cuda.Stream) -> Callable[[], bool] | None:
    """Mark what a stream has so far: whether that is done. None while the stream captures, for
    nothing runs on it then."""
    if is_capturing(stream):
        return None
    event = torch.cuda.Event()
    event.record(stream)
    return event.query


def is_capturing(stream: torch.cuda.Stream) -> bool:
    """Whether what is put on a stream is recorded into a graph."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


@final
class Streams:
    """The streams of a device that were current here, by their handles."""

    __slots__ = ("_device", "_found")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[int, torch.cuda.Stream] = {}

    def current(self) -> torch.cuda.Stream:
        handle = current_handle(self._device.index)
        stream = self._found.get(handle)
        if stream is None:
            stream = self._found[handle] = torch.cuda.current_stream(self._device)
        return stream
