"""A Program as text, by the grammar of base/text.py. `parser.parse_program` reads it back.

    program() {
      T0 = tensor(f32, [a0:i{i0}, a1:i{64}])
      T1 = tensor(f32, [a2:i{i0}, a3:r{64}])
      schedule(T1, [a4, a5, a3], steps=[Split(a2, a4, a5, 2, false)], bindings={a4: mesh_x})
      input(T0)
      T1 = sum(T0, [1])
      output(T1)
    }

The statement classes and codecs here serve the text of kernels and host programs, too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, fields
from typing import Any, Final, NewType, final

from meshfuse.base.codecs import enum_codec, parse_bool, render_bool
from meshfuse.base.dtypes import DataType, dtype_of_value
from meshfuse.base.errors import UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.text import (
    Block,
    Codec,
    Cursor,
    Grammar,
    Out,
    Rest,
    raw_codec,
)
from meshfuse.expr import IntExpr, free_symbols, parse, render
from meshfuse.ir.axes import AxisKind, AxisName, IterDomain, ScalarName, TensorName
from meshfuse.ir.comm import (
    AllGather,
    AllReduce,
    Deliver,
    Exchange,
    Fetch,
    LocalSlice,
    ReduceScatter,
)
from meshfuse.ir.fusion import TensorDef
from meshfuse.ir.mesh import PARALLEL_TYPE_NAMES, DeviceMesh, ParallelType, make_mesh
from meshfuse.ir.ops import (
    Broadcast,
    Cast,
    Expand,
    Expr,
    Linear,
    Literal,
    MatMul,
    Permute,
    Pointwise,
    Reduction,
    Reshape,
    Set,
    Squeeze,
    Welford,
)
from meshfuse.ir.ops_attention import SdpfaBwd, SdpfaFwd
from meshfuse.ir.ops_indexing import (
    Cat,
    IndexSelect,
    Iota,
    Pad,
    Scan,
    Slice,
    TakeAlongAxis,
    TopK,
)
from meshfuse.ir.ops_random import Random, RandomSource
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Allocation, MemoryType, Schedule, Step, step_results
from meshfuse.ir.terms import Terms

EXPR_STATEMENTS: Final[tuple[type[Expr], ...]] = (
    Pointwise,
    Cast,
    Set,
    Broadcast,
    Expand,
    Permute,
    Squeeze,
    Reshape,
    Reduction,
    Welford,
    MatMul,
    Linear,
    Slice,
    Pad,
    Cat,
    IndexSelect,
    TakeAlongAxis,
    Scan,
    Iota,
    TopK,
    SdpfaFwd,
    SdpfaBwd,
    RandomSource,
    Random,
    AllGather,
    AllReduce,
    ReduceScatter,
    LocalSlice,
    Exchange,
    Fetch,
    Deliver,
    Terms,
)
"""The expressions that may stand on a line."""


Letter = NewType("Letter", str)
"""The letter of a numbered name."""

# Statements. Each mirrors an entry of one of the Program's tables.


@final
@frozen_dataclass
class TensorStatement:
    """`T0 = tensor(f32, [a0:i{i0}, a1:i{64}])`: a TensorDef with its name."""

    name: Out[TensorName]
    dtype: DataType
    logical: tuple[IterDomain, ...]
    root: tuple[IterDomain, ...] = ()
    root_steps: tuple[Step, ...] = ()
    is_cpu: bool = False


@final
@frozen_dataclass
class ScalarStatement:
    """`c0 = scalar(f64)`: a ScalarDef with its name."""

    name: Out[ScalarName]
    dtype: DataType


@final
@frozen_dataclass
class ScheduleStatement:
    """A Schedule with its tensor. Left out if the leaves are the logical axes, all else default."""

    tensor: TensorName
    leaves: tuple[AxisName, ...]
    steps: tuple[Step, ...] = ()
    bindings: Mapping[AxisName, ParallelType] = field(default_factory=dict[AxisName, ParallelType])
    mesh: DeviceMesh | None = None
    allocation: Allocation | None = None
    memory: MemoryType = MemoryType.global_
    inline_depth: int = 0
    stages: int = 1


@final
@frozen_dataclass
class InputStatement:
    """`input(T0, c0)`: the inputs, in call order."""

    names: Rest[tuple[TensorName | ScalarName, ...]]


@final
@frozen_dataclass
class OutputStatement:
    """`output(T3, alias=T0)`: one Output."""

    tensor: TensorName
    alias: TensorName | None = None


ProgramLine = (
    TensorStatement | ScalarStatement | ScheduleStatement | InputStatement | OutputStatement | Expr
)


@final
@frozen_dataclass
class ProgramStatement:
    """`program() { ... }`. `serials` None: per letter, one more than the highest name in use."""

    body: Block[tuple[ProgramLine, ...]]
    serials: Mapping[Letter, int] | None = None


# Codecs: how values of these types print.

_AXIS_KIND: Final = enum_codec(AxisKind)
_DTYPE: Final = enum_codec(DataType)
_INT_EXPR: Final = raw_codec(render, parse)
_NUMBERED: Final = re.compile(r"([A-Za-z]+)(\d+)")
_CONSECUTIVE: Final = re.compile(r"[1-9]\d*(?:x[1-9]\d*)* ranks from \d+")
_MESH_TYPE: Final = re.compile(r"mesh_(x|y|z|[1-9]\d*)")


def _render_axis(axis: IterDomain) -> str:
    return f"{axis.name}:{axis.kind.value}{{{render(axis.extent)}}}"


def _parse_axis(cursor: Cursor) -> IterDomain:
    name = AxisName(cursor.identifier("an axis, as a0:i{64}"))
    cursor.expect(":")
    kind = _AXIS_KIND.parse(cursor)
    cursor.expect("{")
    extent = _INT_EXPR.parse(cursor)
    cursor.expect("}")
    return IterDomain(name, kind, extent)


def _render_literal(literal: Literal) -> str:
    """`2.0`, or `2.0:f32` where the type is not the one that the value has in Python."""
    text = render_bool(literal.value) if isinstance(literal.value, bool) else repr(literal.value)
    plain = literal.dtype is dtype_of_value(literal.value)
    return text if plain else f"{text}:{literal.dtype.value}"


def _parse_literal(cursor: Cursor) -> Literal:
    value = (
        parse_bool(cursor)
        if cursor.looking_at("true") or cursor.looking_at("false")
        else cursor.number()
    )
    if not cursor.accept(":"):
        return Literal(value, dtype_of_value(value))
    return Literal(value, _DTYPE.parse(cursor))


def _parse_parallel_type(cursor: Cursor) -> ParallelType:
    cursor.skip_spaces()
    start = cursor.position
    name = cursor.identifier("a parallel type")
    if not _MESH_TYPE.fullmatch(name) and name not in PARALLEL_TYPE_NAMES:
        raise cursor.fail(f"a parallel type, one of {', '.join(PARALLEL_TYPE_NAMES)}", at=start)
    return ParallelType(name)


def _render_mesh(mesh: DeviceMesh) -> str:
    """As `str(mesh)`, or `DeviceMesh("dp", "tp"){{0 1} {2 3}}` with names."""
    ranks = str(mesh).removeprefix("DeviceMesh")
    names = f"({', '.join(map(json.dumps, mesh.names))})" if any(mesh.names) else ""
    return f"DeviceMesh{names}{ranks}"


def _parse_mesh(cursor: Cursor) -> DeviceMesh:
    cursor.skip_spaces()
    start = cursor.position
    cursor.expect("DeviceMesh")
    names: list[str] = []
    if cursor.accept("("):
        while not cursor.accept(")"):
            if names:
                cursor.expect(",")
            names.append(cursor.string())
    ranks = _parse_ranks(cursor)
    try:
        return make_mesh(ranks, names)
    except UserError as error:
        raise cursor.fail(f"a mesh ({error})", at=start) from error


def _parse_ranks(cursor: Cursor) -> list[Any]:
    cursor.expect("{")
    items: list[Any] = []
    while not cursor.accept("}"):
        consecutive = cursor.match(_CONSECUTIVE)
        if consecutive is not None:
            items = _consecutive_ranks(consecutive)
        elif cursor.looking_at("{"):
            items.append(_parse_ranks(cursor))
        else:
            items.append(cursor.integer())
    return items


def _consecutive_ranks(text: str) -> list[Any]:
    """The nested list of `128x8 ranks from 0`."""
    first = int(text.rpartition(" ")[2])
    sizes = [int(size) for size in text.partition(" ")[0].split("x")]
    ranks: list[Any] = list(range(first, first + math.prod(sizes)))
    for size in reversed(sizes[1:]):
        ranks = [ranks[place : place + size] for place in range(0, len(ranks), size)]
    return ranks


IR_CODECS: Final[Mapping[type, Codec]] = {
    IntExpr: _INT_EXPR,
    IterDomain: Codec(_render_axis, _parse_axis),
    Literal: Codec(_render_literal, _parse_literal),
    ParallelType: Codec(str, _parse_parallel_type),
    DeviceMesh: Codec(_render_mesh, _parse_mesh),
}
"""How the values in expressions and schedules print."""

PROGRAM_GRAMMAR: Final = Grammar(
    (
        ProgramStatement,
        TensorStatement,
        ScalarStatement,
        ScheduleStatement,
        InputStatement,
        OutputStatement,
        *EXPR_STATEMENTS,
    ),
    IR_CODECS,
)


def print_program(program: Program) -> str:
    """The text of a Program, without a final newline."""
    return PROGRAM_GRAMMAR.print(program_statement(program))


def print_expr(expr: Expr) -> str:
    """One expression on one line."""
    return PROGRAM_GRAMMAR.print(expr)


def op_name(expr: Expr) -> str:
    """The name of an expression's operation in a program's text: `index_select`, `add`."""
    return PROGRAM_GRAMMAR.op_name(expr)


def program_statement(program: Program) -> ProgramStatement:
    """The tables as statements: tensors with schedules, scalars, inputs, expressions, outputs."""
    fusion = program.fusion
    lines: list[ProgramLine] = []
    for name, definition in fusion.tensors.items():
        lines.append(TensorStatement(name, *_values(definition)))
        schedule = program.schedule(name)
        if schedule != Schedule(tuple(axis.name for axis in definition.logical)):
            lines.append(ScheduleStatement(name, *_values(schedule)))
    lines += [ScalarStatement(name, scalar.dtype) for name, scalar in fusion.scalars.items()]
    if fusion.inputs:
        lines.append(InputStatement(fusion.inputs))
    lines += fusion.exprs
    lines += [OutputStatement(output.tensor, output.alias) for output in fusion.outputs]
    body = tuple(lines)
    if program.serials == highest_serials(body):
        return ProgramStatement(body)
    return ProgramStatement(body, {Letter(k): count for k, count in program.serials.items()})


def _values(entry: TensorDef | Schedule) -> tuple[Any, ...]:
    """The fields of a table's entry; its statement has the same, after the name."""
    return tuple(getattr(entry, each.name) for each in fields(entry) if each.init)


def highest_serials(body: Iterable[ProgramLine]) -> Mapping[str, int]:
    """Per letter of numbered names, one more than the highest number among the statements."""
    serials: dict[str, int] = {}
    for name in _names_in(body):
        found = _NUMBERED.fullmatch(name)
        if found is not None:
            serials[found[1]] = max(serials.get(found[1], 0), int(found[2]) + 1)
    return serials


def _names_in(body: Iterable[ProgramLine]) -> Iterator[str]:
    """Names of tensors and scalars, of their axes, and of the symbols in extents."""
    for line in body:
        match line:
            case TensorStatement():
                yield line.name
                for axis in (*line.root, *line.logical):
                    yield axis.name
                    yield from (found.name for found in free_symbols(axis.extent))
                yield from (made for step in line.root_steps for made in step_results(step))
            case ScheduleStatement():
                yield from (made for step in line.steps for made in step_results(step))
            case ScalarStatement():
                yield line.name
            case _:
                pass
