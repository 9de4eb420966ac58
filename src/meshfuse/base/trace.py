"""Notes: what a stage did, or did not do, and why. `explain()` prints them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Note:
    """One decision of the compiler.

    `subject` is the tensor or expression concerned, `kind` a short stable word (for example
    "all_gather", "copy", "fallback", "gathered"), `bytes` an expression in the program's sizes for
    what moves or is written on one rank ("" where nothing does).
    """

    stage: str
    subject: str
    kind: str
    reason: str
    bytes: str = ""

    def __str__(self) -> str:
        moved = f" [{self.bytes} bytes]" if self.bytes else ""
        return f"{self.stage}: {self.subject}: {self.kind}{moved}: {self.reason}"
