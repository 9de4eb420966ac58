"""Which form of overlap a call runs in: what users ask for, and what was decided, and why."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Final, Literal, final

import torch

from meshfuse.api.mesh_plan import bytes_text
from meshfuse.api.predicted_timeline import predict_call
from meshfuse.base.errors import UserError, UserTypeError, UserValueError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.options import NO_OPTIONS, OVERLAP_MODES, Options
from meshfuse.base.trace import Note
from meshfuse.base.version import VERSION
from meshfuse.facts.overlap_form import PLAIN, Overlap
from meshfuse.host.device_rates import CPU_RATES, H200_RATES
from meshfuse.host.nodes import Communicate, all_nodes
from meshfuse.host.race import WORTH_IT, RaceRow
from meshfuse.host.traffic import traffic_of
from meshfuse.pipeline import Compilation
from meshfuse.runtime.arguments import Signature

Overlapping = Literal["auto", "off", "require"] | Overlap
"""What `overlap=` takes: how a form is chosen, or the form."""

LEAST_BYTES: Final = 1 << 20
"""What communications must bring to a rank for a race."""
LEAST_GAIN: Final = 0.03
"""The part of the time that perfect overlap must save, by the cost model, for a race."""


@final
@frozen_dataclass
class OverlapChoice:
    """The form that calls run in, why, and the race that it was found by.

    `source`: "asked" (by the call), "rule" (nothing was measured), "race", "memory" (of this
    process) or "disk". `rows` are those of the race, on ranks that know them; `notes` say what
    forms could not do.
    """

    form: Overlap
    source: str
    reason: str
    rows: tuple[RaceRow, ...] = ()
    notes: tuple[Note, ...] = field(default_factory=tuple)


# What users say.


def read_overlap(call: str, overlap: object, options: Options) -> Overlapping:
    """What a call says, else the option `overlap`. UserValueError for what is neither a mode nor a
    form, UserTypeError for another type."""
    given: object = options.overlap if overlap is None else overlap
    accepted = f"{', '.join(map(repr, OVERLAP_MODES))}, multidevice.Overlap.chunks(n) or .peers()"
    if isinstance(given, Overlap):
        return given
    if not isinstance(given, str):  # before it is compared: arrays have no truth value
        raise UserTypeError(f"{call}(overlap={given!r}): takes {accepted}")
    match given:
        case "auto":
            return "auto"
        case "off":
            return "off"
        case "require":
            return "require"
        case _:
            raise UserValueError(f"{call}(overlap={given!r}): takes {accepted}")


def form_unmeasured(call: str, overlap: object) -> Overlap:
    """The form of a program that nobody runs on devices: the one that is asked for, else plain.

    UserValueError for "require": there is nothing to measure.
    """
    wanted = read_overlap(call, "auto" if overlap is None else overlap, NO_OPTIONS)
    if wanted == "require":
        raise UserValueError(
            f"{call}(overlap='require'): forms are raced on devices, and here there are none; ask "
            "for one: multidevice.Overlap.chunks(n) or .peers()"
        )
    return wanted if isinstance(wanted, Overlap) else PLAIN


def check_segments_overlap(overlap: object, options: Options) -> None:
    """UserError where a form is asked of a program that runs segment by segment."""
    wanted = read_overlap("execute", overlap, options)
    if wanted == "require" or isinstance(wanted, Overlap):
        raise UserError(
            f"execute(overlap={wanted!r}): this definition runs segment by segment, after "
            "segment(); loops go around segments, so execute another definition as a whole"
        )


# Whether it is worth a race.


def reason_against_race(
    compilation: Compilation, sizes: Mapping[str, int], device: torch.device
) -> str | None:
    """Why the plain form does without measuring; None where others may be better.

    It depends on the program, sizes and the kind of device only: ranks come to one answer.
    """
    host = compilation.host
    first = {coordinate.symbol: 0 for coordinate in host.coordinates}
    moved = sum(traffic.received for traffic in traffic_of(host, {**sizes, **first}))
    if moved < LEAST_BYTES:
        return (
            f"communications bring {bytes_text(moved)} to a rank; forms are raced from "
            f"{bytes_text(LEAST_BYTES)} on"
        )
    rates = H200_RATES if device.type == "cuda" else CPU_RATES
    predicted = predict_call(compilation, sizes, host.meshes[0].ids[0], rates)
    gain = 1 - predicted.bound_seconds / predicted.seconds if predicted.seconds else 0.0
    if gain < LEAST_GAIN:
        return (
            f"perfect overlap would save {gain:.1%} of the time, as predicted; forms are raced "
            f"from {LEAST_GAIN:.0%} on"
        )
    return None


def one_team(compilation: Compilation) -> tuple[int, ...] | None:
    """The ranks of all meshes, ascending; None where two meshes have different ones, or none
    communicates."""
    found = {tuple(sorted(mesh.ids)) for mesh in compilation.host.meshes}
    if len(found) != 1 or not communicates(compilation):
        return None
    return found.pop()


def communicates(compilation: Compilation) -> bool:
    """Whether any data moves between ranks."""
    nodes = all_nodes(compilation.host.body)
    return any(isinstance(node, Communicate) and node.moves for node in nodes)


def size_class(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Sizes by powers of two: for sizes of one class, one choice."""
    return tuple((name, size.bit_length()) for name, size in sorted(sizes.items()))


# On disk.


def memory_key(
    program: str,
    signature: Signature,
    options: Options,
    sizes: Mapping[str, int],
    device: torch.device,
    ranks: int,
    mode: str,
) -> dict[str, object]:
    """What a choice holds for. `program` is a fingerprint."""
    return {
        "program": program,
        "signature": repr(signature),
        "options": [str(option) for option in (*options.enable, *options.disable)],
        "sizes": [list(pair) for pair in size_class(sizes)],
        "device": device_name(device),
        "ranks": ranks,
        "mode": mode,
        "torch": torch.__version__,
        "meshfuse": VERSION,
    }


def device_name(device: torch.device) -> str:
    """What kind of device, and of a CPU how many threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def written_choice(choice: OverlapChoice) -> dict[str, Any]:
    """A choice as JSON has it."""
    rows = [
        [str(row.form), row.milliseconds, row.ratio, row.ratio_at_most, row.error]
        for row in choice.rows
    ]
    return {"form": str(choice.form), "rows": rows}


def choice_as_read(
    found: Mapping[str, Any] | None, forms: Sequence[Overlap], source: str
) -> OverlapChoice | None:
    """The choice among `forms` that was written; None for any other."""
    if found is None:
        return None
    by_name = {str(form): form for form in forms}
    try:
        rows = tuple(
            RaceRow(by_name[name], milliseconds, ratio, most, error)
            for name, milliseconds, ratio, most, error in found["rows"]
        )
        form = by_name[found["form"]]
    except (KeyError, TypeError, ValueError):
        return None
    return OverlapChoice(form, source, reason_of(form, rows), rows)


# In words.


def reason_of(form: Overlap, rows: Sequence[RaceRow]) -> str:
    """What a race has shown."""
    ratio = next((row.ratio for row in rows if row.form == form), None)
    if form == PLAIN or ratio is None:
        return f"no form is surely below {WORTH_IT:.2f} of the plain one's time"
    return f"{form} takes {ratio:.3f} of the plain form's time"


def choice_lines(choice: OverlapChoice) -> Iterator[str]:
    """The choice, and a table of the race."""
    known = {
        "memory": ", as an earlier definition of this process found",
        "disk": ", as an earlier process found",
    }
    yield f"{choice.form}: {choice.reason}{known.get(choice.source, '')}"
    if choice.rows:
        table = [("form", "ms", "of plain", "at most", ""), *map(_cells, choice.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row, form in zip(table, [None, *(row.form for row in choice.rows)], strict=True):
            *cells, end = row
            end = end or ("chosen" if form == choice.form else "")
            shown = [cells[0].ljust(widths[0])]
            shown += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=False)]
            yield "  ".join([*shown, end]).rstrip()
    yield from map(str, choice.notes)


def _cells(row: RaceRow) -> tuple[str, ...]:
    numbers = (row.milliseconds, row.ratio, row.ratio_at_most)
    shown = ["" if number is None else f"{number:.3f}" for number in numbers]
    return str(row.form), *shown, "" if row.error is None else f"dropped: {row.error}"
