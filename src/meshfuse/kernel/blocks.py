"""A kernel body under construction: nested blocks, and what each has already computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from meshfuse.base.dtypes import DataType
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr import IntExpr
from meshfuse.kernel.nodes import IndexName, KernelOperand, Mask, Statement, ValueName

ValueKey = tuple[str, tuple[IntExpr, ...], Mask]
"""A tensor or scalar, the index of its element, and the bounds where the value is right."""


@final
@frozen_dataclass
class Value:
    """A value in a block. `dtype` is its logical type: a 16-bit float is held in float32."""

    operand: KernelOperand
    dtype: DataType
    depth: int


@final
@dataclass(slots=True)
class Block:
    """The statements of one loop body. `variables` are the loop variables in scope."""

    variables: frozenset[str]
    statements: list[Statement] = field(default_factory=list[Statement])
    values: dict[ValueKey, Value] = field(default_factory=dict[ValueKey, Value])


@final
@dataclass(slots=True, eq=False, repr=False)
class BodyBuilder:
    """The open blocks, outermost first: mutable, and private to one lowering.

    A statement goes to the outermost block that knows its indices and operands, so that what does
    not vary with a loop is computed once outside. `taken` are names that no loop variable may have.
    """

    taken: frozenset[str]
    blocks: list[Block] = field(default_factory=lambda: [Block(frozenset())])
    _values: int = 0
    _loops: int = 0

    @property
    def depth(self) -> int:
        return len(self.blocks) - 1

    def fresh_value(self) -> ValueName:
        name = f"v{self._values}"
        self._values += 1
        return ValueName(name)

    def fresh_variable(self) -> IndexName:
        while True:
            name = f"k{self._loops}"
            self._loops += 1
            if name not in self.taken:
                return IndexName(name)

    def open(self, variable: IndexName) -> None:
        self.blocks.append(Block(self.blocks[-1].variables | {variable}))

    def close(self) -> tuple[Statement, ...]:
        return tuple(self.blocks.pop().statements)

    def emit(self, statement: Statement, depth: int | None = None) -> None:
        self.blocks[self.depth if depth is None else depth].statements.append(statement)

    def depth_of(self, names: frozenset[str]) -> int:
        """The outermost block in which loop variables among `names` are all in scope."""
        variables = names & self.blocks[-1].variables
        return next(d for d, block in enumerate(self.blocks) if variables <= block.variables)

    def find(self, key: ValueKey) -> Value | None:
        """The value that an open block has for `key`."""
        for block in self.blocks:
            if key in block.values:
                return block.values[key]
        return None

    def keep(self, key: ValueKey, value: Value) -> Value:
        """Remember a value for as long as the block of its depth is open."""
        self.blocks[value.depth].values[key] = value
        return value
