"""Flags that a CUDA graph writes and awaits, and what they are written to at each launch.

torch's graphs repeat stream memory operations with the values of their capture. The CUDA driver
takes others for a launch to come, and leaves those under way alone. Source: CUDA driver API, "Graph
Management", batch memory operation nodes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch

from meshfuse.base.errors import Unsupported
from meshfuse.dist.cuda_driver import FlagOperation, driver

_BATCH_OF_OPERATIONS: Final = 12
"""The type of a node."""

Flag = tuple[int, int]
"""An address, and the value that is written or awaited there."""


class _Batch(ctypes.Structure):
    """CUDA_BATCH_MEM_OP_NODE_PARAMS."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("count", ctypes.c_uint),
        ("operations", ctypes.POINTER(FlagOperation)),
        ("flags", ctypes.c_uint),
    )


@final
class FlaggedGraph:
    """A graph with flags, which was captured with `keep_graph` and instantiated. It draws no random
    numbers: torch, which would see to them, is not asked at a launch."""

    __slots__ = ("_executable", "_flags", "_graph", "_launch", "_nodes", "_update")

    def __init__(
        self, graph: torch.cuda.CUDAGraph, flags: Sequence[Flag], library: Any = None
    ) -> None:
        """`flags`: all that were written or awaited in the capture; one may have come twice.

        Raises Unsupported for others in the graph, or if one of them is not there, RuntimeError as
        the driver does.
        """
        library = library or driver()
        self._graph = graph
        self._executable = ctypes.c_void_p(graph.raw_cuda_graph_exec())
        self._update = library.cuGraphExecBatchMemOpNodeSetParams
        self._launch = library.cuGraphLaunch
        places: Mapping[Flag, int] = {flag: place for place, flag in enumerate(flags)}
        self._flags: list[tuple[int, FlagOperation]] = []
        self._nodes: list[tuple[ctypes.c_void_p, Any]] = []
        for node, batch in _batches(library, ctypes.c_void_p(graph.raw_cuda_graph())):
            operations = (FlagOperation * batch.count)(*batch.operations[: batch.count])
            for operation in operations:
                place = places.get((operation.address, operation.value))
                if place is None:
                    raise Unsupported("a graph has flags that are not known here")
                self._flags.append((place, operation))
            own = _Batch(batch.context, batch.count, operations, batch.flags)
            self._nodes.append((node, ctypes.byref(own)))
        if {place for place, _ in self._flags} != set(places.values()):
            raise Unsupported("flags that were written or awaited are not in the graph")

    def launch(self, stream: int, values: Sequence[int]) -> None:
        """Onto the stream with this handle, with a value for each flag, in their order."""
        update, executable = self._update, self._executable
        for place, operation in self._flags:
            operation.value = values[place]
        for node, batch in self._nodes:
            _check(update(executable, node, batch))
        _check(self._launch(executable, ctypes.c_void_p(stream)))


def _batches(library: Any, graph: ctypes.c_void_p) -> Iterator[tuple[ctypes.c_void_p, _Batch]]:
    """The nodes of a graph with operations on flags."""
    count = ctypes.c_size_t(0)
    _check(library.cuGraphGetNodes(graph, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _check(library.cuGraphGetNodes(graph, nodes, ctypes.byref(count)))
    for handle in nodes:
        node, kind = ctypes.c_void_p(handle), ctypes.c_int()
        _check(library.cuGraphNodeGetType(node, ctypes.byref(kind)))
        if kind.value == _BATCH_OF_OPERATIONS:
            batch = _Batch()
            _check(library.cuGraphBatchMemOpNodeGetParams(node, ctypes.byref(batch)))
            yield node, batch


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"an operation on a graph with flags failed with CUDA error {code}")
