"""Bodies of host programs written by hand: buffers T0 to T5 of four floats on two ranks."""

from __future__ import annotations

from meshfuse.base.dtypes import DataType
from meshfuse.expr import const
from meshfuse.facts.sharding import Digit, Sharding
from meshfuse.host.nodes import (
    Allocate,
    Collective,
    Communicate,
    Evaluate,
    HostBuffer,
    HostOutput,
    HostProgram,
    Node,
)
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import ParallelType, make_mesh
from meshfuse.ir.ops import Set
from meshfuse.ir.schedule import MemoryType

A, B, C, D, E, F = (TensorName(f"T{i}") for i in range(6))
MESH = make_mesh(range(2))


def buffer_of(name: TensorName) -> HostBuffer:
    whole = Sharding(MESH, ((Digit(const(4)),),))
    return HostBuffer(name, DataType.Float, (const(4),), sharding=whole)


def program_of(*body: Node, names: tuple[TensorName, ...] = (A, B, C)) -> HostProgram:
    """T0 is an input, T1 an output."""
    buffers = {name: buffer_of(name) for name in names}
    return HostProgram((A,), (HostOutput(B),), {}, (), (), buffers, {}, body)


def allocate(buffer: TensorName) -> Allocate:
    return Allocate(buffer, MemoryType.global_, const(16))


def reduce(out: TensorName, src: TensorName, number: int) -> Communicate:
    return Communicate(
        out,
        Collective.all_reduce,
        src,
        number,
        MESH,
        ParallelType.mesh_x,
        const(16),
        "a test",
        "sum",
    )


def copy(out: TensorName, src: TensorName, into: TensorName | None = None) -> Evaluate:
    return Evaluate(into, (Set(out, src),))
