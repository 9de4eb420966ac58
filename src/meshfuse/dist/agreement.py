"""Before ranks communicate for a program, they make sure that they run the same one.

Ranks that post different collectives would wait for one another, or mix up their data. So each puts
a hash of its sequence of collectives into the store, and compares all others' with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from meshfuse.base.frozen import frozen_dataclass
from hashlib import blake2b
from itertools import zip_longest
from typing import final

from meshfuse.base.errors import CommunicationError
from meshfuse.dist.board import Board, Notice, Standing
from meshfuse.dist.deadlines import Deadline, await_arrival

_SEPARATOR = "\n"


@final
@frozen_dataclass
class CommunicationSequence:
    """What the ranks of `team`, ascending, do together: one line for each collective, in order.

    `digest` stands for all of it.
    """

    team: tuple[int, ...]
    entries: tuple[str, ...]
    digest: str

    @property
    def purpose(self) -> str:
        """What messages say that the ranks meet for."""
        return self.entries[0] if self.entries else "no collective"

    @staticmethod
    def of(team: Sequence[int], entries: Sequence[str]) -> CommunicationSequence:
        team = tuple(sorted(team))
        text = _SEPARATOR.join((str(team), *entries))
        digest = blake2b(text.encode(), digest_size=16).hexdigest()
        return CommunicationSequence(team, tuple(entries), digest)


def compare_sequences(board: Board, mine: CommunicationSequence, seconds: float) -> None:
    """Block until all ranks of the board's team have said what they will do, and compare.

    `board` is for this comparison alone. Raises CommunicationError on every rank if two of them
    differ, naming the first entry that does, and as await_arrival does if one does not come.
    """
    purpose = mine.purpose
    try:
        board.notices.set(f"entries {board.rank}", _SEPARATOR.join(mine.entries))
        board.notices.set(f"digest {board.rank}", mine.digest)
        await_arrival(board, Deadline.after(seconds), purpose)
        for rank in board.peers:
            if board.notices.get(f"digest {rank}").decode() != mine.digest:
                text = board.notices.get(f"entries {rank}").decode()
                theirs = text.split(_SEPARATOR) if text else []
                raise CommunicationError(_difference(board.rank, mine.entries, rank, theirs))
    except KeyboardInterrupt:
        board.announce(Notice(Standing.failed, 0, f"interrupted before {purpose}"))
        raise


def _difference(rank: int, mine: Sequence[str], other: int, theirs: Sequence[str]) -> str:
    pairs = enumerate(zip_longest(mine, theirs, fillvalue="nothing more"))
    place, (here, there) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    return (
        f"ranks {rank} and {other} run different programs: their collective {place} is\n"
        f"  {here} on rank {rank}\n  {there} on rank {other}\n"
        "All ranks of a mesh must execute the same definitions, with the same options, in the same "
        "order."
    )
