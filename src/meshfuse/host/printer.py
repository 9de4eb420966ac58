"""A HostProgram as text, by the grammar of base/text.py. `parser.parse_host_program` reads it back.

    host() {
      input(T0)
      output(T1)
      T0 = buffer(f32, [4, 64], mesh=DeviceMesh{0 1}, digits=[[mesh_x{2}, 4], [64]], whole=[8, 64])
      T1 = buffer(f32, [8, 64], mesh=DeviceMesh{0 1})
      T1 = allocate(global, 2048)
      T1 = communicate(all_gather, T0, 0, DeviceMesh{0 1}, mesh_x, 1024, "output T1")
      wait(0)
    }

The kernels follow, each as kernel/printer.py prints it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Final, final

from meshfuse.base.dtypes import DataType
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.text import Block, Codec, Cursor, Grammar, Out, raw_codec
from meshfuse.expr import IntExpr, Symbol, parse, render
from meshfuse.facts.sharding import Digit, Digits, Sharding
from meshfuse.host.nodes import (
    NODES,
    HostBuffer,
    HostProgram,
    Node,
)
from meshfuse.host.symbols import (
    Coordinate,
    Covers,
    Demand,
    Divides,
    Equals,
    NotNegative,
    SizeOf,
)
from meshfuse.ir.axes import TensorName
from meshfuse.ir.mesh import DeviceMesh, ParallelType
from meshfuse.ir.ops_random import RandomSource
from meshfuse.ir.printer import (
    EXPR_STATEMENTS,
    IR_CODECS,
    InputStatement,
    OutputStatement,
    ScalarStatement,
)
from meshfuse.kernel.printer import print_kernel


@final
@frozen_dataclass
class BufferStatement:
    """A HostBuffer, its sharding in parts. `digits` are left out where ranks hold whole axes."""

    name: Out[TensorName]
    dtype: DataType
    shape: tuple[IntExpr, ...]
    order: tuple[int, ...] = ()
    mesh: DeviceMesh | None = None
    digits: tuple[Digits, ...] = ()
    partial: Mapping[ParallelType, str] = field(default_factory=dict[ParallelType, str])
    whole: tuple[IntExpr, ...] = ()
    gaps: bool = False


def buffer_statement(buffer: HostBuffer) -> BufferStatement:
    sharding = buffer.sharding
    if sharding is None:
        sharding = Sharding(None, ())
    digits = () if sharding.axes == _undivided(buffer.shape) else sharding.axes
    return BufferStatement(
        buffer.name,
        buffer.dtype,
        buffer.shape,
        buffer.order,
        sharding.mesh,
        digits,
        sharding.partial,
        buffer.whole,
        buffer.gaps,
    )


def read_buffer(line: BufferStatement) -> HostBuffer:
    """The inverse of `buffer_statement`."""
    sharding = None
    if line.mesh is not None:
        axes = line.digits or _undivided(line.shape)
        sharding = Sharding(line.mesh, axes, line.partial)
    return HostBuffer(
        line.name, line.dtype, line.shape, line.order, sharding, line.whole, line.gaps
    )


def _undivided(shape: Sequence[IntExpr]) -> tuple[Digits, ...]:
    return tuple((Digit(extent),) for extent in shape)


def _render_digit(digit: Digit) -> str:
    """`mesh_x{2}`, or the extent of local memory."""
    text = render(digit.extent)
    return text if digit.owner is None else f"{digit.owner}{{{text}}}"


def _digit_codec(extents: Codec) -> Codec:
    def parse_digit(cursor: Cursor) -> Digit:
        cursor.skip_spaces()
        start = cursor.position
        owner = cursor.accept_identifier()
        if owner is None or not cursor.looking_at("{"):
            cursor.position = start
            return Digit(extents.parse(cursor))
        cursor.expect("{")
        extent = extents.parse(cursor)
        cursor.expect("}")
        return Digit(extent, ParallelType(owner))

    return Codec(_render_digit, parse_digit)


HostLine = (
    InputStatement
    | OutputStatement
    | ScalarStatement
    | SizeOf
    | Coordinate
    | Demand
    | BufferStatement
    | RandomSource
    | Node
)


@final
@frozen_dataclass
class HostStatement:
    """`host() { ... }`."""

    body: Block[tuple[HostLine, ...]]


_STATEMENTS: Final[tuple[type, ...]] = (
    HostStatement,
    InputStatement,
    OutputStatement,
    ScalarStatement,
    SizeOf,
    Coordinate,
    Divides,
    Covers,
    Equals,
    NotNegative,
    BufferStatement,
    *NODES,
    *EXPR_STATEMENTS,
)


def host_grammar(symbols: Mapping[str, Symbol]) -> Grammar:
    """The grammar; `symbols` have more facts than their names say: the coordinates of ranks."""
    extents = raw_codec(render, partial(parse, symbols=symbols))
    codecs = {**IR_CODECS, IntExpr: extents, Digit: _digit_codec(extents)}
    return Grammar(_STATEMENTS, codecs)


HOST_GRAMMAR: Final = host_grammar({})


def print_host_program(program: HostProgram) -> str:
    """The text of a host program and its kernels, without a final newline."""
    lines: list[HostLine] = [InputStatement(program.inputs)] if program.inputs else []
    lines += [OutputStatement(output.buffer, output.alias) for output in program.outputs]
    lines += [ScalarStatement(name, dtype) for name, dtype in program.scalars.items()]
    lines += [program.random] if program.random is not None else []
    lines += [*program.symbols, *program.coordinates, *program.demands]
    lines += map(buffer_statement, program.buffers.values())
    lines += program.body
    host = HOST_GRAMMAR.print(HostStatement(tuple(lines)))
    return "\n\n".join([host, *map(print_kernel, program.kernels.values())])


def print_node(node: Node) -> str:
    """One node, with its block if it has one."""
    return HOST_GRAMMAR.print(node)
