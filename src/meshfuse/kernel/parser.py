"""Read a Kernel back from the text that printer.py writes."""

from __future__ import annotations

from meshfuse.base.text import TextError
from meshfuse.kernel.nodes import (
    Buffer,
    GridAxis,
    IndexName,
    Kernel,
    ScalarParameter,
    Statement,
    TileAxis,
)
from meshfuse.kernel.printer import (
    KERNEL_GRAMMAR,
    GridStatement,
    KernelStatement,
    ScalarStatement,
    SizesStatement,
    TileStatement,
)


def parse_kernel(text: str) -> Kernel:
    """The Kernel that `text` denotes; `parse_kernel(print_kernel(k)) == k`.

    Names and types are not checked here: that is the verifier's. Raises TextError, a ValueError,
    with line and column.
    """
    statement = KERNEL_GRAMMAR.parse(text)
    if not isinstance(statement, KernelStatement):
        raise TextError(text, 0, "kernel(...)")
    buffers: list[Buffer] = []
    scalars: list[ScalarParameter] = []
    sizes: list[IndexName] = []
    grid: list[GridAxis] = []
    tiles: list[TileAxis] = []
    body: list[Statement] = []
    for line in statement.lines:
        match line:
            case Buffer():
                buffers.append(line)
            case ScalarStatement():
                scalars.append(ScalarParameter(line.name, line.dtype))
            case SizesStatement():
                sizes += line.names
            case GridStatement():
                grid.append(GridAxis(line.name, line.extent))
            case TileStatement():
                tiles.append(TileAxis(line.name, line.size))
            case _:
                body.append(line)
    return Kernel(
        statement.name,
        tuple(buffers),
        tuple(scalars),
        tuple(sizes),
        tuple(grid),
        tuple(tiles),
        tuple(body),
    )
