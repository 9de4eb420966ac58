"""Graphs with flags, over a stand-in for the driver: launches have the values they are given."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshfuse.base.errors import Unsupported
from meshfuse.dist.graph_flags import FlaggedGraph

GRAPH, EXECUTABLE = 11, 22
KERNEL, FLAG = 0, 12
"""Types of nodes."""
CONTEXT = 33


class Operation(ctypes.Structure):
    """As the driver's header lays it out: 48 bytes."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


@dataclass
class Driver:
    """`nodes`: the flags of each, none of a kernel's. `values`: of the next launch, by node."""

    nodes: list[list[tuple[int, int]]]
    fails: bool = False
    values: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    launches: list[tuple[int, dict[int, list[int]]]] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        self.operations = [
            (Operation * len(flags))(*(Operation(1, *flag, 7) for flag in flags))
            for flags in self.nodes
        ]

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        assert graph.value == GRAPH
        count._obj.value = len(self.nodes)
        if nodes is not None:
            nodes[:] = range(100, 100 + len(self.nodes))
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = FLAG if self.nodes[node.value - 100] else KERNEL
        return 0

    def cuGraphBatchMemOpNodeGetParams(self, node: Any, batch: Any) -> int:
        operations, found = self.operations[node.value - 100], batch._obj
        found.context, found.count, found.flags = CONTEXT, len(operations), 0
        pointer = ctypes.addressof(operations)
        ctypes.c_void_p.from_buffer(found, type(found).operations.offset).value = pointer
        return 0

    def cuGraphExecBatchMemOpNodeSetParams(self, executable: Any, node: Any, batch: Any) -> int:
        given, place = batch._obj, node.value - 100
        operations = ctypes.cast(given.operations, ctypes.POINTER(Operation))[: given.count]
        assert (executable.value, given.context) == (EXECUTABLE, CONTEXT)
        found = [(operation.kind, operation.address, operation.flags) for operation in operations]
        assert found == [(1, address, 7) for address, _ in self.nodes[place]]
        self.values[place] = [operation.value for operation in operations]
        return int(self.fails)

    def cuGraphLaunch(self, executable: Any, stream: Any) -> int:
        assert executable.value == EXECUTABLE
        self.launches.append((stream.value, dict(self.values)))
        return 0


def flagged(driver: Driver, flags: list[tuple[int, int]]) -> FlaggedGraph:
    graph = SimpleNamespace(raw_cuda_graph=lambda: GRAPH, raw_cuda_graph_exec=lambda: EXECUTABLE)
    return FlaggedGraph(cast(torch.cuda.CUDAGraph, graph), flags, driver)


def test_each_launch_has_its_values() -> None:
    """Nodes come in any order, and one flag may be awaited twice."""
    driver = Driver([[(8, 5)], [], [(4, 6), (8, 6)], [], [(4, 6)]])
    graph = flagged(driver, [(4, 6), (8, 5), (8, 6), (4, 6)])
    graph.launch(7, [60, 50, 61, 60])
    graph.launch(9, [70, 55, 71, 70])
    assert driver.launches == [
        (7, {0: [50], 2: [60, 61], 4: [60]}),
        (9, {0: [55], 2: [70, 71], 4: [70]}),
    ]


def test_all_flags_are_known_on_both_sides() -> None:
    with pytest.raises(Unsupported, match="not known here"):
        flagged(Driver([[(4, 6)], [(8, 1)]]), [(4, 6)])
    with pytest.raises(Unsupported, match="not in the graph"):
        flagged(Driver([[(4, 6)]]), [(4, 6), (4, 7)])


def test_the_drivers_errors_are_raised() -> None:
    driver = Driver([[(4, 6)]])
    graph = flagged(driver, [(4, 6)])
    driver.fails = True
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        graph.launch(7, [8])
    assert not driver.launches
