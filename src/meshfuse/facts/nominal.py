"""Numbers for sizes that a program leaves open, so that choices can be compared before it runs.

Whatever is chosen by them is a function of the program alone, and ranks agree on it (law 9).
"""

from __future__ import annotations

from typing import Final

from meshfuse.expr import IntExpr, Symbol, const_value, evaluate, free_symbols
from meshfuse.facts.layout import local_bytes
from meshfuse.ir.axes import TensorName
from meshfuse.ir.program import Program

NOMINAL_SIZE: Final = 1024
"""What a size that is not known counts as."""


def nominal_size(symbol: Symbol, wanted: int = NOMINAL_SIZE) -> int:
    """`wanted`, or the nearest value above that the symbol can have; else the largest below."""
    value = -(-wanted // symbol.multiple) * symbol.multiple
    value = value if symbol.low is None else max(value, symbol.low)
    return value if symbol.high is None else min(value, symbol.high)


def nominal_value(size: IntExpr, wanted: int = NOMINAL_SIZE) -> int:
    """`size` with every symbol at its nominal size."""
    value = const_value(size)
    if value is not None:
        return value
    return evaluate(size, {found.name: nominal_size(found, wanted) for found in free_symbols(size)})


def nominal_bytes(program: Program, tensor: TensorName) -> int:
    """The bytes of a tensor that one rank holds."""
    return nominal_value(local_bytes(program, tensor))
