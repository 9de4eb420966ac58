"""Forms in which communications and the contractions beside them can run at once."""

from __future__ import annotations

from enum import Enum
from typing import Final, final

from meshfuse.base.errors import UserTypeError, UserValueError
from meshfuse.base.frozen import frozen_dataclass

MOST_CHUNKS: Final = 1 << 10


class Way(Enum):
    """How a loop communicates."""

    plain = "plain"
    chunks = "chunks"
    peers = "peers"


@final
@frozen_dataclass
class Overlap:
    """One form of a program: made by `plain`, `chunks` and `peers`.

    `count`: of the chunks of `chunks`, of the pieces that `peers` cuts each rank's block into.
    """

    way: Way
    count: int = 1

    @staticmethod
    def plain() -> Overlap:
        """No loop: every communication moves all at once."""
        return PLAIN

    @staticmethod
    def chunks(count: int) -> Overlap:
        """A loop over `count` chunks, each of which has its own, smaller collective."""
        return Overlap(Way.chunks, _read_count("chunks", count, 2))

    @staticmethod
    def peers(pieces: int = 1) -> Overlap:
        """A loop over the ranks' blocks, each fetched from its owner or delivered to it; or over
        `pieces` of each block."""
        return Overlap(Way.peers, _read_count("peers", pieces, 1))

    def __str__(self) -> str:
        match self.way:
            case Way.plain:
                return "plain"
            case Way.chunks:
                return f"{self.count} chunks"
            case Way.peers:
                return "peers" if self.count == 1 else f"peers, {self.count} pieces"


def _read_count(call: str, count: object, least: int) -> int:
    if type(count) is not int:
        raise UserTypeError(f"Overlap.{call}({count!r}): takes an int")
    if not least <= count <= MOST_CHUNKS:
        raise UserValueError(
            f"Overlap.{call}({count}): must be at least {least}, and at most {MOST_CHUNKS}"
        )
    return count


PLAIN: Final = Overlap(Way.plain)
CANDIDATES: Final = (
    Overlap(Way.chunks, 2),
    Overlap(Way.chunks, 4),
    Overlap(Way.chunks, 8),
    Overlap(Way.peers, 1),
    Overlap(Way.peers, 2),
)
"""What is tried beside the plain form."""
REPEATABLE: Final = tuple(form for form in CANDIDATES if form.way is not Way.peers)
"""Those that a graph can repeat: symmetric memory counts its uses."""
