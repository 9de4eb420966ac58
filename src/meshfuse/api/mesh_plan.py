"""What `multidevice.plan` finds out, and its table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.host.memory_use import MemoryUse

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_OPERATION: Final = re.compile(r"(?:[^=(]+ = )?(\w+)")

_HEADINGS: Final = ("count", "communication", "along", "link", "ranks", "received", "for")


@final
@frozen_dataclass
class PlannedCommunication:
    """One communication of a plan. `kind` is all_gather, all_reduce, reduce_scatter or exchange.

    `mesh_axes`: the names of those along which data moves, none between two meshes. `team`: how
    many ranks meet. `bytes`: what the rank that receives most receives. `cause`: the operation that
    needs it. `seconds`: at the bandwidth of its link, None where that is not given.
    """

    number: int
    kind: str
    mesh_axes: tuple[str, ...]
    link: str
    team: int
    bytes: int
    cause: str
    seconds: float | None


@final
@frozen_dataclass
class MeshPlan:
    """What every rank would do, and what that takes of the rank that needs most. `str` is a table.

    `program` is the host program's text. Its kernels are planned and not lowered: each is launched
    over the buffers that it will have. `sizes` are the numbers taken for symbols; those in
    `nominal` were not given. `links` has the bytes that one rank receives over each link class.
    """

    program: str
    ranks: int
    communications: tuple[PlannedCommunication, ...]
    links: Mapping[str, int]
    memory: MemoryUse
    sizes: Mapping[str, int]
    nominal: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """What one rank receives in all."""
        return sum(self.links.values())

    @property
    def seconds(self) -> float | None:
        """For all communications, one after the other; None where a bandwidth is missing."""
        times = [each.seconds for each in self.communications]
        return None if None in times else sum(time for time in times if time is not None)

    def __str__(self) -> str:
        return "\n".join(_plan_lines(self))

    def __repr__(self) -> str:
        return str(self)


# The table.


def _plan_lines(plan: MeshPlan) -> Iterator[str]:
    where = "1 rank" if plan.ranks == 1 else f"{plan.ranks} ranks"
    yield f"plan for {where}; bytes are those of the rank that holds or receives most"
    for name, value in plan.sizes.items():
        yield f"{name} = {value}{', taken for want of a size' if name in plan.nominal else ''}"
    yield ""
    yield from _table([_HEADINGS, *_rows(plan.communications)])
    yield ""
    for link, amount in plan.links.items():
        times = [each.seconds for each in plan.communications if each.link == link]
        count = f"{len(times)} communication{'s' * (len(times) != 1)}"
        seconds = [time for time in times if time is not None]
        time = f", {_time_text(sum(seconds))}" if seconds else ""
        yield f"received over {link}: {bytes_text(amount)} in {count}{time}"
    memory = plan.memory
    yield (
        f"memory: {bytes_text(memory.peak)} at most, of which {bytes_text(memory.inputs)} are "
        f"inputs; {bytes_text(memory.outputs)} are new outputs"
    )
    yield "kernels are planned, not lowered; what operations use inside is not counted"


def _rows(communications: Sequence[PlannedCommunication]) -> Iterator[tuple[str, ...]]:
    """Like communications together, in the order of the first of each."""
    counts: dict[tuple[str, ...], int] = {}
    for each in communications:
        operation = _OPERATION.match(each.cause)
        row = (
            each.kind,
            ", ".join(each.mesh_axes) or "-",
            each.link,
            str(each.team),
            bytes_text(each.bytes),
            operation[1] if operation else each.cause,
        )
        counts[row] = counts.get(row, 0) + 1
    yield from ((str(count), *row) for row, count in counts.items())
    if not counts:
        yield ("0", "none", "", "", "", "", "")


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns of one width; numbers at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if heading in ("count", "ranks", "received") else cell.ljust(width)
            for cell, width, heading in zip(row, widths, rows[0], strict=True)
        )
        yield "  ".join(cells).rstrip()


def bytes_text(count: int) -> str:
    """`96 B`, `1.50 KiB`, `3.00 GiB`: three digits, of the unit that gives a number below 1024."""
    size, unit = float(count), 0
    while size >= 1023.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{size:#.3g} {_UNITS[unit]}".replace(". ", " ")


def _time_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
