"""The tile program: what one kernel does, for any target, on local shapes (law 1).

A grid of independent programs runs the body. A value varies over a set of tile axes (named,
unordered); operands broadcast by name. Indices are integer expressions in sizes, grid axes, loop
variables and tile axes (whose symbol runs over 0..size-1 across the lanes). A value of a 16-bit
float type is held in float32 and rounded where it is made.
"""

from __future__ import annotations

from typing import NewType, final

from meshfuse.base.dtypes import DataType
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.text import Block, Out, Rest
from meshfuse.expr.nodes import IntExpr
from meshfuse.ir.ops import Literal

ValueName = NewType("ValueName", str)
"""`v0`, ...: defined once; a carry is defined by its loop. Also a scalar parameter's name, `c0`."""
BufferName = NewType("BufferName", str)
"""A tensor in memory, named like the program's tensor."""
IndexName = NewType("IndexName", str)
"""`g0` a grid axis, `k0` a loop variable, `n0` a tile axis: a symbol of the index expressions."""

KernelOperand = ValueName | Literal


@final
@frozen_dataclass
class Buffer:
    """A tensor argument. `shape` and `strides` (in elements) are in the kernel's size symbols.

    A stride of constant 1 or 0 is a promise of the signature, a stride symbol is passed at launch.
    """

    name: Out[BufferName]
    dtype: DataType
    shape: tuple[IntExpr, ...]
    strides: tuple[IntExpr, ...]
    written: bool = False


@final
@frozen_dataclass
class ScalarParameter:
    """A scalar argument, passed as a C double, int64 or bool according to its type."""

    name: ValueName
    dtype: DataType


@final
@frozen_dataclass
class GridAxis:
    """Independent programs 0..extent-1; they may run in any order and at the same time."""

    name: IndexName
    extent: IntExpr


@final
@frozen_dataclass
class TileAxis:
    """Lanes 0..size-1 of a value."""

    name: IndexName
    size: int


@final
@frozen_dataclass
class Bound:
    """`index < limit`, lane by lane. A mask is a tuple of bounds, all of which must hold."""

    index: IntExpr
    limit: IntExpr


Mask = tuple[Bound, ...]


@final
@frozen_dataclass
class Carry:
    """A value that a loop carries: `initial` before the first iteration, then `following`.

    In the body `name` is the value on entry of the iteration; after the loop it is the final one.
    It varies over `tiles`; a carry of an enclosing loop as `initial` makes the two loops one
    reduction.
    """

    name: ValueName
    dtype: DataType
    initial: KernelOperand
    following: ValueName
    tiles: tuple[IndexName, ...] = ()


@final
@frozen_dataclass
class Load:
    """Read `buffer` at `index`, one expression per axis. Lanes outside `mask` are not read: 0."""

    out: Out[ValueName]
    buffer: BufferName
    index: tuple[IntExpr, ...]
    mask: Mask = ()


@final
@frozen_dataclass
class Store:
    """Write `value`, rounded to the buffer's type, where `mask` holds."""

    buffer: BufferName
    index: tuple[IntExpr, ...]
    value: KernelOperand
    mask: Mask = ()


@final
@frozen_dataclass
class Size:
    """An integer expression as an int64 value."""

    out: Out[ValueName]
    value: IntExpr


@final
@frozen_dataclass
class Compute:
    """Apply a row of SCALAR_FUNCTIONS to operands of one type (`where`: its last two are)."""

    out: Out[ValueName]
    function: str
    dtype: DataType
    args: Rest[tuple[KernelOperand, ...]]


@final
@frozen_dataclass
class Convert:
    """The value in another element type, rounded to nearest even; float to integer truncates."""

    out: Out[ValueName]
    dtype: DataType
    src: KernelOperand


@final
@frozen_dataclass
class Combine:
    """src into the accumulator by a row of REDUCTION_FUNCTIONS where `mask` holds."""

    out: Out[ValueName]
    function: str
    accumulator: ValueName
    src: KernelOperand
    mask: Mask = ()


@final
@frozen_dataclass
class Reduce:
    """Combine the lanes along `tiles`; the result does not vary over them."""

    out: Out[ValueName]
    function: str
    src: ValueName
    tiles: tuple[IndexName, ...]


@final
@frozen_dataclass
class WelfordStep:
    """Take `src` into the running moments; lanes outside `mask` keep theirs. Counts are int64.

    With `src_m2` and `src_count`, `src` is the mean of a part, and all its moments are taken in.
    """

    mean: Out[ValueName]
    m2: Out[ValueName]
    count: Out[ValueName]
    old_mean: ValueName
    old_m2: ValueName
    old_count: ValueName
    src: KernelOperand
    mask: Mask = ()
    src_m2: KernelOperand | None = None
    src_count: KernelOperand | None = None


@final
@frozen_dataclass
class WelfordReduce:
    """Combine (mean, m2, count) over the lanes along `tiles` by Chan's formula."""

    mean: Out[ValueName]
    m2: Out[ValueName]
    count: Out[ValueName]
    src_mean: ValueName
    src_m2: ValueName
    src_count: ValueName
    tiles: tuple[IndexName, ...]


@final
@frozen_dataclass
class For:
    """Run the body for `variable` in 0..trip-1, in order."""

    variable: IndexName
    trip: IntExpr
    carries: tuple[Carry, ...]
    body: Block[tuple[Statement, ...]]


Statement = (
    Load | Store | Size | Compute | Convert | Combine | Reduce | WelfordStep | WelfordReduce | For
)
STATEMENTS: tuple[type, ...] = (
    Load,
    Store,
    Size,
    Compute,
    Convert,
    Combine,
    Reduce,
    WelfordStep,
    WelfordReduce,
    For,
)


@final
@frozen_dataclass
class Kernel:
    """One kernel. Arguments in order: buffers, scalars, `sizes` (int64: extents, then strides)."""

    name: str
    buffers: tuple[Buffer, ...]
    scalars: tuple[ScalarParameter, ...]
    sizes: tuple[IndexName, ...]
    grid: tuple[GridAxis, ...]
    tiles: tuple[TileAxis, ...]
    body: Block[tuple[Statement, ...]]
