"""Call a compiled C++ kernel on tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from meshfuse.base.dtypes import Scalar, is_floating
from meshfuse.base.errors import InvariantError, UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.codegen.source import KernelSource
from meshfuse.expr import Symbol
from meshfuse.kernel.nodes import IndexName, Kernel, ValueName
from meshfuse.runtime.torch_types import to_torch_dtype

PARALLEL_ELEMENTS = 64 * 1024
"""Below this many elements in the largest buffer, starting threads costs more than they save."""

EntryPoint = Callable[..., None]

BoundKernel = Callable[[Sequence[torch.Tensor], Sequence[Scalar]], None]
"""A kernel whose sizes are known: runs on buffers and scalars, each in the kernel's order."""


@final
@frozen_dataclass
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
        pointers = _addresses(buffers)
        self.entry(
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_double * len(floats))(*floats),
            (ctypes.c_int64 * len(integers))(*integers),
            choose_threads(buffers) if threads is None else threads,
        )

    def bind(self, sizes: Mapping[str, int], elements: int) -> BoundKernel:
        """The kernel for these sizes, of which nothing is looked up again.

        `elements` are those of the largest buffer. What it is called with is not checked: buffers
        must have the kernel's types and the sizes bound here, and lie on the CPU.
        """
        kernel = self.source.kernel
        is_large = elements >= PARALLEL_ELEMENTS
        if kernel.scalars or any(name not in sizes for name in kernel.sizes):
            return self._bind_changing(sizes, is_large)
        integers = (ctypes.c_int64 * len(kernel.sizes))(*[sizes[name] for name in kernel.sizes])
        floats = (ctypes.c_double * 0)()
        entry, pointers = self.entry, ctypes.c_void_p * len(kernel.buffers)

        def launch(buffers: Sequence[torch.Tensor], scalars: Sequence[Scalar]) -> None:
            addresses = pointers(*_addresses(buffers))
            entry(addresses, floats, integers, torch.get_num_threads() if is_large else 1)

        return launch

    def _bind_changing(self, sizes: Mapping[str, int], is_large: bool) -> BoundKernel:
        """Scalars and strides may differ between calls."""
        kernel, entry = self.source.kernel, self.entry
        known = [sizes.get(name, 0) for name in kernel.sizes]
        strides = [
            (position, self._stride_source(name, sizes))
            for position, name in enumerate(kernel.sizes)
            if name not in sizes
        ]
        real = [i for i, p in enumerate(kernel.scalars) if is_floating(p.dtype)]
        whole = [i for i, p in enumerate(kernel.scalars) if not is_floating(p.dtype)]
        pointers = ctypes.c_void_p * len(kernel.buffers)
        doubles, int64s = ctypes.c_double * len(real), ctypes.c_int64 * (len(whole) + len(known))

        def launch(buffers: Sequence[torch.Tensor], scalars: Sequence[Scalar]) -> None:
            values = known.copy()
            for position, place in strides:
                values[position] = buffers[place.buffer].stride(place.axis)
            entry(
                pointers(*_addresses(buffers)),
                doubles(*[float(scalars[i]) for i in real]),
                int64s(*[int(scalars[i]) for i in whole], *values),
                torch.get_num_threads() if is_large else 1,
            )

        return launch

    def _size(
        self, name: IndexName, buffers: Sequence[torch.Tensor], sizes: Mapping[str, int]
    ) -> int:
        if name in sizes:
            return sizes[name]
        place = self._stride_source(name, sizes)
        return buffers[place.buffer].stride(place.axis)

    def _stride_source(self, name: IndexName, sizes: Iterable[str]) -> StrideSource:
        if name in self.stride_sources:
            return self.stride_sources[name]
        given = ", ".join(sizes) or "none"
        raise InvariantError(
            f"kernel {self.source.kernel.name}: no value for size {name}; given: {given}"
        )


def _addresses(buffers: Sequence[torch.Tensor]) -> list[int]:
    """Where the buffers lie.

    UserError for elements that lie nowhere, as those of fake and freed tensors: a kernel would end
    the process.
    """
    addresses = [tensor.data_ptr() for tensor in buffers]
    if 0 in addresses:
        for tensor, address in zip(buffers, addresses, strict=True):
            if address == 0 and tensor.numel():
                raise UserError(
                    f"a {type(tensor).__name__} of shape {list(tensor.shape)} has no memory: it is "
                    "fake, or its storage has been freed; kernels take tensors that hold their "
                    "elements"
                )
    return addresses


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
