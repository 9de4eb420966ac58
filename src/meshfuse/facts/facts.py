"""Who defines and who reads each name of a frozen Program, found once and passed around."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.ir.axes import TensorName
from meshfuse.ir.infer import is_tensor
from meshfuse.ir.ops import Expr
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import Name, read_names


@final
@frozen_dataclass
class Facts:
    """Definitions and uses of one Program, each reading expression once and in program order.

    Inputs have no entry in `definitions`, unread names none in `uses`.
    """

    definitions: Mapping[Name, Expr]
    uses: Mapping[Name, tuple[Expr, ...]]


def facts_of(program: Program) -> Facts:
    """Linear in the size of the program."""
    definitions: dict[Name, Expr] = {}
    uses: dict[Name, list[Expr]] = {}
    for expr in program.fusion.exprs:
        definitions.update(dict.fromkeys(expr.outs, expr))
        for name in read_names(expr):
            uses.setdefault(name, []).append(expr)
    return Facts(definitions, {name: tuple(readers) for name, readers in uses.items()})


def tensor_operands(program: Program, expr: Expr) -> tuple[TensorName, ...]:
    """The tensors that `expr` reads, in operand order, each once."""
    return tuple(TensorName(name) for name in read_names(expr) if is_tensor(program, name))


def tensor_outputs(program: Program, expr: Expr) -> tuple[TensorName, ...]:
    """The tensors that `expr` defines; none for arithmetic on scalars."""
    return tuple(TensorName(name) for name in expr.outs if is_tensor(program, name))


def output_names(program: Program) -> frozenset[TensorName]:
    """The program's outputs, for membership tests."""
    return frozenset(output.tensor for output in program.fusion.outputs)
