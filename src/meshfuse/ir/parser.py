"""Read a Program back from the text that printer.py writes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from meshfuse.base.text import TextError
from meshfuse.ir.axes import ScalarName, TensorName
from meshfuse.ir.fusion import Fusion, Output, ScalarDef, TensorDef
from meshfuse.ir.ops import Expr
from meshfuse.ir.printer import (
    PROGRAM_GRAMMAR,
    InputStatement,
    OutputStatement,
    ProgramStatement,
    ScalarStatement,
    ScheduleStatement,
    TensorStatement,
    highest_serials,
)
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Schedule


def parse_program(text: str) -> Program:
    """The Program that `text` denotes; `parse_program(print_program(p)) == p`.

    Names are not checked here: that is the verifier's. Raises TextError, a ValueError, with line
    and column.
    """
    statement = PROGRAM_GRAMMAR.parse(text)
    if not isinstance(statement, ProgramStatement):
        raise TextError(text, 0, "program()")
    return program_of_statement(statement)


def program_of_statement(statement: ProgramStatement) -> Program:
    """The Program whose tables the statements describe."""
    tensors: dict[TensorName, TensorDef] = {}
    scalars: dict[ScalarName, ScalarDef] = {}
    schedules: dict[TensorName, Schedule] = {}
    inputs: list[TensorName | ScalarName] = []
    outputs: list[Output] = []
    exprs: list[Expr] = []
    for line in statement.body:
        match line:
            case TensorStatement(name):
                tensors[name] = TensorDef(*_entry(line))
                schedules[name] = Schedule(tuple(axis.name for axis in line.logical))
            case ScheduleStatement(name):
                schedules[name] = Schedule(*_entry(line))
            case ScalarStatement(name, dtype):
                scalars[name] = ScalarDef(dtype)
            case InputStatement(names):
                inputs += names
            case OutputStatement(name, alias):
                outputs.append(Output(name, alias))
            case Expr():
                exprs.append(line)
    fusion = Fusion(tensors, scalars, tuple(exprs), tuple(inputs), tuple(outputs))
    given = statement.serials
    if given is None:
        return Program(fusion, schedules, highest_serials(statement.body))
    return Program(fusion, schedules, {str(letter): count for letter, count in given.items()})


def _entry(line: TensorStatement | ScheduleStatement) -> tuple[Any, ...]:
    """A statement's fields but the name: those of the table's entry."""
    return tuple(getattr(line, each.name) for each in fields(line)[1:])
