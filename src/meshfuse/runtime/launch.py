"""Call a compiled C++ kernel on tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from meshfuse.base.dtypes import Scalar, is_floating
from meshfuse.base.errors import InvariantError
from meshfuse.codegen.source import KernelSource
from meshfuse.expr import Symbol
from meshfuse.kernel.nodes import IndexName, Kernel, ValueName
from meshfuse.runtime.torch_types import to_torch_dtype

PARALLEL_ELEMENTS = 64 * 1024
"""Below this many elements in the largest buffer, starting threads costs more than they save."""

EntryPoint = Callable[..., None]


@final
@dataclass(frozen=True, slots=True)
class StrideSource:
    """A stride symbol's place: axis `axis` of buffer number `buffer`."""

    buffer: int
    axis: int


@final
@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel in memory. Calls may overlap, from any threads."""

    source: KernelSource
    library: ctypes.CDLL = field(repr=False)
    entry: EntryPoint = field(init=False, repr=False)
    stride_sources: Mapping[IndexName, StrideSource] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        entry = self.library[self.source.entry]
        entry.restype = None
        entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        object.__setattr__(self, "entry", entry)
        object.__setattr__(self, "stride_sources", find_stride_sources(self.source.kernel))

    def __call__(
        self,
        buffers: Sequence[torch.Tensor],
        scalars: Mapping[ValueName, Scalar],
        sizes: Mapping[str, int],
        threads: int | None = None,
    ) -> None:
        """Run the kernel on CPU tensors, in the order of its buffers, and return when it is done.

        A size symbol that `sizes` lacks is the stride of the buffer that declares it. `threads`
        defaults to torch's number for big tensors and to 1 for small ones. The GIL is released.
        Raises InvariantError for tensors of another number, device or type than the kernel's.
        """
        kernel = self.source.kernel
        _check_buffers(kernel, buffers)
        floats = [float(scalars[p.name]) for p in kernel.scalars if is_floating(p.dtype)]
        integers = [int(scalars[p.name]) for p in kernel.scalars if not is_floating(p.dtype)]
        integers += [self._size(name, buffers, sizes) for name in kernel.sizes]
        pointers = [tensor.data_ptr() for tensor in buffers]
        self.entry(
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_double * len(floats))(*floats),
            (ctypes.c_int64 * len(integers))(*integers),
            choose_threads(buffers) if threads is None else threads,
        )

    def _size(
        self, name: IndexName, buffers: Sequence[torch.Tensor], sizes: Mapping[str, int]
    ) -> int:
        if name in sizes:
            return sizes[name]
        if name in self.stride_sources:
            place = self.stride_sources[name]
            return buffers[place.buffer].stride(place.axis)
        given = ", ".join(sizes) or "none"
        raise InvariantError(
            f"kernel {self.source.kernel.name}: no value for size {name}; given: {given}"
        )


def find_stride_sources(kernel: Kernel) -> dict[IndexName, StrideSource]:
    """Where each size symbol that is some buffer's stride can be read."""
    places: dict[IndexName, StrideSource] = {}
    for position, buffer in enumerate(kernel.buffers):
        for axis, stride in enumerate(buffer.strides):
            if isinstance(stride, Symbol):
                places.setdefault(IndexName(stride.name), StrideSource(position, axis))
    return places


def choose_threads(buffers: Sequence[torch.Tensor]) -> int:
    """How many threads work of this size is worth."""
    largest = max((tensor.numel() for tensor in buffers), default=0)
    return torch.get_num_threads() if largest >= PARALLEL_ELEMENTS else 1


def _check_buffers(kernel: Kernel, buffers: Sequence[torch.Tensor]) -> None:
    if len(buffers) != len(kernel.buffers):
        raise InvariantError(
            f"kernel {kernel.name} takes {len(kernel.buffers)} buffers, not {len(buffers)}"
        )
    for declared, tensor in zip(kernel.buffers, buffers, strict=True):
        if tensor.dtype != to_torch_dtype(declared.dtype) or tensor.device.type != "cpu":
            raise InvariantError(
                f"kernel {kernel.name}: {declared.name} is {declared.dtype} on the CPU, "
                f"the tensor is {tensor.dtype} on {tensor.device}"
            )
