"""Before ranks communicate for a call, they make sure that they do the same, for the same sizes.

Ranks that post different collectives would wait for one another, or mix up their data; and gloo
ends a process that is sent more than it waits for. So ranks compare what they are about to do and
the sizes that it depends on, whenever a call is not the one that all expect: see history.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import zip_longest
from typing import final

from meshfuse.base.errors import UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.dist.board import Board

_SEPARATOR = "\n"
_DIGEST_BYTES = 16

Gather = Callable[[Sequence[int]], list[list[int]]]
"""What every rank of a team says, in team order; all say equally many numbers of 64 bits."""


@final
@frozen_dataclass
class CommunicationSequence:
    """What the ranks of `team`, ascending, do together: one line for each collective, in order.

    `symbols` are the sizes that it depends on, which the last line names, with what is to be said
    of each. `digest` stands for all but that.
    """

    team: tuple[int, ...]
    entries: tuple[str, ...]
    digest: str
    symbols: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(
        team: Sequence[int], entries: Sequence[str], symbols: Mapping[str, str] | None = None
    ) -> CommunicationSequence:
        team = tuple(sorted(team))
        named = tuple(sorted((symbols or {}).items()))
        told = (f"for sizes {', '.join(name for name, _ in named)}",) if named else ()
        entries = (*entries, *told)
        text = _SEPARATOR.join((str(team), *entries))
        digest = blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
        return CommunicationSequence(team, entries, digest, named)

    def at(self, sizes: Mapping[str, int]) -> Agreement:
        """For the sizes of a call."""
        values = tuple(sizes[name] for name, _ in self.symbols)
        return Agreement(self, values, (self.digest, *values))


@final
@frozen_dataclass
class Agreement:
    """What the ranks of a team must agree on before a call: `key` is all of it."""

    sequence: CommunicationSequence
    sizes: tuple[int, ...]
    key: tuple[object, ...]

    @property
    def team(self) -> tuple[int, ...]:
        return self.sequence.team

    @property
    def purpose(self) -> str:
        """What messages say that the ranks meet for."""
        return self.sequence.entries[0] if self.sequence.entries else "no collective"


def find_difference(mine: Agreement, board: Board, gather: Gather) -> str | None:
    """Compare what all ranks of the board's team are about to do, in one exchange if it is the
    same: None then, else the first entry that differs.

    All ranks of the team come to one answer. Raises what `gather` does, and UserError, on all
    ranks, if they run one program for different sizes.
    """
    said = gather([*_as_numbers(mine.sequence.digest), *_as_numbers(_digest_of(mine.sizes))])
    if all(theirs == said[0] for theirs in said):
        return None
    digests = [theirs[: _DIGEST_BYTES // 8] for theirs in said]
    if all(digest == digests[0] for digest in digests):
        _refuse_sizes(mine, gather(mine.sizes))
        return None
    board.notices.set(f"entries {board.rank}", _SEPARATOR.join(mine.sequence.entries))
    gather([0])  # now all have said it
    place = board.team.index(board.rank)
    other = next(k for k, digest in enumerate(digests) if digest != digests[place])
    text = board.notices.get(f"entries {board.team[other]}").decode()
    theirs = text.split(_SEPARATOR) if text else []
    return _difference(board.rank, mine.sequence.entries, board.team[other], theirs)


def _refuse_sizes(mine: Agreement, found: Sequence[Sequence[int]]) -> None:
    """UserError, where the ranks of a team that runs one program have different sizes."""
    for rank, theirs in zip(mine.team, found, strict=True):
        for (_, text), first, size in zip(mine.sequence.symbols, found[0], theirs, strict=True):
            if size != first:
                raise UserError(
                    f"ranks {mine.team[0]} and {rank} disagree on the global size {text}: {first} "
                    f"and {size}, before {mine.purpose}; where blocks are not equal, global sizes "
                    "must be given, or be static"
                )


def _digest_of(sizes: Sequence[int]) -> str:
    return blake2b(repr(sizes).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _as_numbers(digest: str) -> list[int]:
    data = bytes.fromhex(digest)
    return [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]


def _difference(rank: int, mine: Sequence[str], other: int, theirs: Sequence[str]) -> str:
    pairs = enumerate(zip_longest(mine, theirs, fillvalue="nothing more"))
    place, (here, there) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    return (
        f"ranks {rank} and {other} run different programs: their collective {place} is\n"
        f"  {here} on rank {rank}\n  {there} on rank {other}\n"
        "All ranks of a mesh must execute the same definitions, with the same options, in the same "
        "order."
    )
