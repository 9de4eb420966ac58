"""Read a HostProgram back from the text that printer.py writes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshfuse.base.dtypes import DataType
from meshfuse.base.text import TextError
from meshfuse.expr import IntExpr, Symbol, const, free_symbols, substitute
from meshfuse.facts.holdings import coordinate_symbol
from meshfuse.facts.streams import loop_index
from meshfuse.host.nodes import (
    ForLoop,
    HostBuffer,
    HostOutput,
    HostProgram,
    KernelName,
    Node,
    all_nodes,
)
from meshfuse.host.printer import (
    HOST_GRAMMAR,
    BufferStatement,
    HostStatement,
    host_grammar,
    read_buffer,
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
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.ops_random import RandomSource
from meshfuse.ir.printer import InputStatement, OutputStatement, ScalarStatement
from meshfuse.kernel.parser import parse_kernel

_BETWEEN_STATEMENTS = re.compile(r"\n\s*\n(?=\w)")
"""What stands inside a statement is indented."""


def parse_host_program(text: str) -> HostProgram:
    """The program that `text` denotes; `parse_host_program(print_host_program(p)) == p`.

    Names are not checked here: that is the verifier's. Raises TextError, a ValueError, with line
    and column, counted from the start of the host program or the kernel.
    """
    host, *kernels = _BETWEEN_STATEMENTS.split(text.strip())
    statement = HOST_GRAMMAR.parse(host)
    if not isinstance(statement, HostStatement):
        raise TextError(text, 0, "host()")
    ranks = [line for line in statement.body if isinstance(line, Coordinate)]
    loops = [line for line in all_nodes(_nodes_of(statement)) if isinstance(line, ForLoop)]
    if ranks or loops:  # the ranges of their symbols simplify sizes
        places = {str(r.symbol): coordinate_symbol(r.mesh, r.mesh_axis) for r in ranks}
        for loop in loops:
            places[str(loop.index)] = loop_index(loop.index, _most_iterations(loop, places))
        statement = host_grammar(places).parse(host)
    inputs: list[TensorName | ScalarName] = []
    outputs: list[HostOutput] = []
    scalars: dict[ScalarName, DataType] = {}
    symbols: list[SizeOf] = []
    coordinates: list[Coordinate] = []
    demands: list[Demand] = []
    buffers: dict[TensorName, HostBuffer] = {}
    body: list[Node] = []
    random: RandomSource | None = None
    for line in statement.body:
        match line:
            case InputStatement(names):
                inputs += names
            case OutputStatement(buffer, alias):
                outputs.append(HostOutput(buffer, alias))
            case ScalarStatement(name, dtype):
                scalars[name] = dtype
            case SizeOf():
                symbols.append(line)
            case Divides() | Covers() | Equals() | NotNegative():
                demands.append(line)
            case Coordinate():
                coordinates.append(line)
            case RandomSource():
                random = line
            case BufferStatement():
                buffers[line.name] = read_buffer(line)
            case _:
                body.append(line)
    return HostProgram(
        tuple(inputs),
        tuple(outputs),
        scalars,
        tuple(symbols),
        tuple(demands),
        buffers,
        {KernelName(kernel.name): kernel for kernel in map(parse_kernel, kernels)},
        tuple(body),
        tuple(coordinates),
        random,
    )


def _most_iterations(loop: ForLoop, places: Mapping[str, Symbol]) -> IntExpr:
    """The count of a loop; in an iteration that others choose, the largest."""
    count = substitute(loop.count, dict(places.items()))
    is_chosen = any(found.name in places for found in free_symbols(count))
    return const(count.high) if is_chosen and count.high is not None else count


def _nodes_of(statement: HostStatement) -> list[Node]:
    return [line for line in statement.body if isinstance(line, Node)]
