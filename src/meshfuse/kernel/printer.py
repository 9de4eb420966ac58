"""A Kernel as text, by the grammar of base/text.py. `parser.parse_kernel` reads it back.

kernel("k0") {
  T0 = buffer(f32, [i0], [1])
  T1 = buffer(f32, [i0], [1], written=true)
  sizes(i0)
  g0 = grid((i0 + 15) // 16)
  n0 = tile(16)
  v0 = load(T0, [16*g0 + n0], mask=[Bound(16*g0 + n0, i0)])
  v1 = exp(f32, v0)
  store(T1, [16*g0 + n0], v1, mask=[Bound(16*g0 + n0, i0)])
}
"""

from __future__ import annotations

from typing import Final, final

from meshfuse.base.dtypes import DataType
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.text import Block, Grammar, Out, Rest
from meshfuse.expr import IntExpr
from meshfuse.ir.printer import IR_CODECS
from meshfuse.kernel.nodes import STATEMENTS, Buffer, IndexName, Kernel, Statement, ValueName


@final
@frozen_dataclass
class ScalarStatement:
    """`c0 = scalar(f64)`: a ScalarParameter."""

    name: Out[ValueName]
    dtype: DataType


@final
@frozen_dataclass
class SizesStatement:
    """`sizes(i0, T0_s1)`: the size symbols, in argument order."""

    names: Rest[tuple[IndexName, ...]]


@final
@frozen_dataclass
class GridStatement:
    """`g0 = grid(i0)`: a GridAxis."""

    name: Out[IndexName]
    extent: IntExpr


@final
@frozen_dataclass
class TileStatement:
    """`n0 = tile(16)`: a TileAxis."""

    name: Out[IndexName]
    size: int


KernelLine = Buffer | ScalarStatement | SizesStatement | GridStatement | TileStatement | Statement


@final
@frozen_dataclass
class KernelStatement:
    """`kernel("name") { ... }`."""

    name: str
    lines: Block[tuple[KernelLine, ...]]


KERNEL_GRAMMAR: Final = Grammar(
    (
        KernelStatement,
        Buffer,
        ScalarStatement,
        SizesStatement,
        GridStatement,
        TileStatement,
        *STATEMENTS,
    ),
    IR_CODECS,
)


def print_kernel(kernel: Kernel) -> str:
    """The text of a kernel, without a final newline."""
    lines: list[KernelLine] = [
        *kernel.buffers,
        *(ScalarStatement(scalar.name, scalar.dtype) for scalar in kernel.scalars),
    ]
    if kernel.sizes:
        lines.append(SizesStatement(kernel.sizes))
    lines += [GridStatement(axis.name, axis.extent) for axis in kernel.grid]
    lines += [TileStatement(axis.name, axis.size) for axis in kernel.tiles]
    return KERNEL_GRAMMAR.print(KernelStatement(kernel.name, (*lines, *kernel.body)))
