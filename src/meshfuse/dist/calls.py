"""Which call of which program this rank is in, and which calls its peers have refused.

A rank that refuses a call, for arguments that do not fit say, has posted nothing, and its groups
are sound; but its peers may be waiting for it already. So it says so in the store, and those that
wait in the same call of the same program give up. Where all refuse alike, nobody waits.
"""

# torch.distributed documents its stores but does not declare them as exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch.distributed as dist

_ANY = "any refused"

Call = tuple[str, int]
"""A program, by a text that all ranks have, and the number of one of its calls, from 1."""

IN_ANOTHER_THREAD = (
    "execute: another thread of this rank executes a definition that communicates; ranks cannot "
    "tell which calls belong together: let one thread make them all, or one after the other in the "
    "same order on all ranks"
)
"""What is said to a call that comes to its collectives while another one is at its own."""


@final
class CallLog:
    """The calls of one rank that may communicate, and the part of the store where ranks say what
    they refused.

    `current` is the call that is at its collectives. `turn` holds what stands for it, so that it is
    the only one: ranks would pair the collectives of several at random. That is a table, not a
    lock, as an interrupt may come behind any function: who has put something into a table finds it
    there then, and who has acquired a lock cannot know. `entered` is the latest call that has gone
    on from there to peers; before, it looks whether it is expected. CallEntry.enter sets all three
    itself, for a frame less.
    """

    __slots__ = (
        "_counts",
        "_has_refused",
        "_refused",
        "_store",
        "current",
        "entered",
        "turn",
    )

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.current: Call | None = None
        self.entered: Call | None = None
        self._has_refused = False
        self._counts: dict[str, int] = {}
        self._store = store
        self._refused = str(rank)
        self.turn: dict[None, object] = {}

    def count(self, program: str) -> Call:
        """A call of this program begins; what was refused may have been mended."""
        if self._has_refused:
            self._has_refused = False
            self._store.set(self._refused, "")
        number = self._counts[program] = self._counts.get(program, 0) + 1
        return program, number

    def leave(self) -> None:
        """The call that CallEntry.enter let in is done with its collectives."""
        self.current = None
        self.turn.clear()

    def refuse(self, call: Call, error: BaseException) -> None:
        """Tell the peers that this rank does not come to the collectives of a call, which ended
        with `error`. Not of one that has entered: its peers learn in other ways."""
        if call is self.entered:
            return
        self._has_refused = True
        reason = f"{type(error).__name__}: {error}"
        try:
            self._store.set(self._refused, f"{_text(call)} {reason}")
            self._store.set(_ANY, "yes")
        except RuntimeError:
            return  # The store is gone, and with it the process that every peer waits for.

    def refusals(self, peers: Iterable[int]) -> dict[int, str]:
        """Peers that refused the call that this rank is in, and why. One look at the store while
        nobody has refused anything."""
        call = self.current
        if call is None or not self._store.check([_ANY]):
            return {}
        found: dict[int, str] = {}
        for rank in peers:
            text = self._store.get(str(rank)).decode() if self._store.check([str(rank)]) else ""
            if text.startswith(f"{_text(call)} "):
                reason = text.removeprefix(f"{_text(call)} ")
                found[rank] = f"did not come, as its call was refused: {reason}"
        return found


def _text(call: Call) -> str:
    program, number = call
    return f"{program} {number}"
