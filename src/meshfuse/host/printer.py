"""A HostProgram as text, by the grammar of base/text.py. `parser.parse_host_program` reads it back.

    host() {
      input(T0)
      output(T1)
      i0 = size_of(T0, 0, factor=2)
      divides(2, i0, T0)
      T0 = buffer(f32, [(i0 + 1) // 2, 64], mesh=DeviceMesh{0 1}, sharded={mesh_x: 0})
      T1 = buffer(f32, [i0, 64], mesh=DeviceMesh{0 1})
      T1 = allocate(global, 256*i0)
      T1 = communicate(all_gather, T0, 0, DeviceMesh{0 1}, mesh_x, 256*((i0 + 1) // 2), "output T1")
      wait(0)
    }

The kernels follow, each as kernel/printer.py prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final

from meshfuse.base.dtypes import DataType
from meshfuse.base.text import Block, Grammar, Out
from meshfuse.expr import IntExpr
from meshfuse.host.nodes import (
    NODES,
    Demand,
    Divides,
    Equals,
    HostProgram,
    Node,
    NotNegative,
    SizeOf,
)
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.ir.printer import (
    EXPR_STATEMENTS,
    IR_CODECS,
    InputStatement,
    OutputStatement,
    ScalarStatement,
)
from meshfuse.kernel.printer import print_kernel


@final
@dataclass(frozen=True, slots=True)
class BufferStatement:
    """`T0 = buffer(f32, [i0, 64], order=[1, 0], mesh=..., sharded={mesh_x: 0})`: a HostBuffer."""

    name: Out[TensorName]
    dtype: DataType
    shape: tuple[IntExpr, ...]
    order: tuple[int, ...] = ()
    mesh: DeviceMesh | None = None
    sharded: Mapping[ParallelType, int] = field(default_factory=dict[ParallelType, int])
    partial: Mapping[ParallelType, str] = field(default_factory=dict[ParallelType, str])
    gaps: bool = False


HostLine = (
    InputStatement | OutputStatement | ScalarStatement | SizeOf | Demand | BufferStatement | Node
)


@final
@dataclass(frozen=True, slots=True)
class HostStatement:
    """`host() { ... }`."""

    body: Block[tuple[HostLine, ...]]


HOST_GRAMMAR: Final = Grammar(
    (
        HostStatement,
        InputStatement,
        OutputStatement,
        ScalarStatement,
        SizeOf,
        Divides,
        Equals,
        NotNegative,
        BufferStatement,
        *NODES,
        *EXPR_STATEMENTS,
    ),
    IR_CODECS,
)


def print_host_program(program: HostProgram) -> str:
    """The text of a host program and its kernels, without a final newline."""
    lines: list[HostLine] = [InputStatement(program.inputs)] if program.inputs else []
    lines += [OutputStatement(output.buffer, output.alias) for output in program.outputs]
    lines += [ScalarStatement(name, dtype) for name, dtype in program.scalars.items()]
    lines += [*program.symbols, *program.demands]
    lines += [
        BufferStatement(b.name, b.dtype, b.shape, b.order, b.mesh, b.sharded, b.partial, b.gaps)
        for b in program.buffers.values()
    ]
    lines += program.body
    host = HOST_GRAMMAR.print(HostStatement(tuple(lines)))
    return "\n\n".join([host, *map(print_kernel, program.kernels.values())])


def print_node(node: Node) -> str:
    """One node, with its block if it has one."""
    return HOST_GRAMMAR.print(node)
