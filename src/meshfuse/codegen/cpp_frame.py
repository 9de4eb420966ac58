"""The state of printing one C++ kernel: the lines so far, and what each value is."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

from meshfuse.base.dtypes import DataType
from meshfuse.base.errors import InvariantError, ScheduleError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.codegen.cpp_ops import convert, literal, spread, value_type
from meshfuse.expr import IntExpr, Symbol, free_symbols, render
from meshfuse.ir.ops import Literal
from meshfuse.kernel.nodes import (
    Buffer,
    BufferName,
    IndexName,
    Kernel,
    KernelOperand,
    Mask,
    ValueName,
)

Tile = IndexName | None
"""The tile axis that something varies over. An axis of one lane varies nothing and is None too."""


@final
@frozen_dataclass
class Printed:
    """A C++ expression without operators at its outermost level, its element type and tile axis."""

    text: str
    dtype: DataType
    tile: Tile


@final
@dataclass(slots=True, eq=False, repr=False)
class CppFrame:
    """Mutable while a kernel is printed. `actives` holds the lane counts that are in scope."""

    kernel: Kernel
    lines: list[str] = field(default_factory=list[str])
    depth: int = 0
    values: dict[ValueName, Printed] = field(default_factory=dict[ValueName, Printed])
    actives: dict[tuple[Mask, IndexName], str] = field(
        default_factory=dict[tuple[Mask, IndexName], str]
    )
    actives_made: int = 0

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    @contextmanager
    def block(self, head: str) -> Generator[None]:
        """Braces after `head`. Names of lane counts defined inside are forgotten after it."""
        outer = dict(self.actives)
        self.line(f"{head} {{".lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        self.line("}")
        self.actives = outer

    def buffer(self, name: BufferName) -> Buffer:
        return next(b for b in self.kernel.buffers if b.name == name)

    def lanes(self, tile: Tile) -> int:
        """How many lanes a value over `tile` has; 1 for a scalar."""
        return next((a.size for a in self.kernel.tiles if a.name == tile), 1)

    def join(self, what: str, *tiles: Tile) -> Tile:
        """The one axis among `tiles`. Raises ScheduleError if `what` varies over two."""
        found = list(dict.fromkeys(tile for tile in tiles if self.lanes(tile) > 1))
        if len(found) > 1:
            raise ScheduleError(
                "tile-rank",
                what,
                str(found[1]),
                f"varies over the tile axes {' and '.join(map(str, found))}",
                "A C++ kernel has values over one tile axis: make the other one a loop.",
            )
        return found[0] if found else None

    def tile_of(self, what: str, *expressions: IntExpr) -> Tile:
        """The tile axis that index expressions vary over."""
        names = [IndexName(s.name) for e in expressions for s in free_symbols(e)]
        return self.join(what, *names)

    def tile_of_mask(self, what: str, mask: Mask) -> Tile:
        return self.tile_of(what, *(e for bound in mask for e in (bound.index, bound.limit)))

    def operand(self, operand: KernelOperand) -> Printed:
        if isinstance(operand, Literal):
            return Printed(literal(operand.value, operand.dtype), operand.dtype, None)
        if operand not in self.values:
            raise InvariantError(f"kernel {self.kernel.name}: {operand} is used but not defined")
        return self.values[operand]

    def widened(self, value: Printed, tile: Tile) -> str:
        """The value in each lane of `tile`."""
        if value.tile == tile:
            return value.text
        return spread(value.text, value.dtype, self.lanes(tile))

    def converted(self, value: Printed, dtype: DataType, tile: Tile) -> str:
        return convert(self.widened(value, tile), value.dtype, dtype, self.lanes(tile))

    def define(self, name: ValueName, text: str, dtype: DataType, tile: Tile) -> None:
        """`const T name = text;`"""
        self.line(f"const {value_type(dtype, self.lanes(tile))} {name} = {text};")
        self.values[name] = Printed(name, dtype, tile)


def symbol_named(e: IntExpr, name: IndexName) -> Symbol | None:
    """The symbol of that name in e, if there is just one."""
    found = [s for s in free_symbols(e) if s.name == name]
    return found[0] if len(found) == 1 else None


def index_text(e: IntExpr) -> str:
    return render(e, style="c")
