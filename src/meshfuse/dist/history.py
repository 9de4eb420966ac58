"""What the ranks of a team have agreed on, call by call, and so what each expects to be next."""

from __future__ import annotations

from typing import final

from meshfuse.base.bounded import BoundedTable

MOST_CONTEXTS = 1024
"""Places in the course of calls for which a team remembers what came next."""

Key = tuple[object, ...]
_Context = tuple[Key | None, Key | None, int]


@final
class CallHistory:
    """The calls of one team as one of its ranks saw them.

    A call is expected if it follows the ones before it as it did last time; where nothing is known,
    if it is like the last. Ranks compare calls that they do not expect, and only those. That is
    enough: a history changes only by calls that all ranks of the team have made, so all expect the
    same; a rank that makes another call compares, and finds that its peers do not.

    What came before is told by the last call, how often it was made in a row, and the call before
    those: a layer that runs twelve times and then gives way to the next one is expected to.
    """

    __slots__ = ("_before", "_last", "_next", "_run")

    def __init__(self) -> None:
        self._before: Key | None = None
        self._last: Key | None = None
        self._run = 0
        self._next: BoundedTable[_Context, Key] = BoundedTable(MOST_CONTEXTS)

    def expects(self, key: Key) -> bool:
        return (self._next.get((self._before, self._last, self._run)) or self._last) == key

    def has_followed(self, key: Key) -> bool:
        """`note`, of a call that is expected; nothing for another."""
        if not self.expects(key):
            return False
        self._go_on(key)
        return True

    def note(self, key: Key) -> None:
        """All ranks of the team make this call."""
        if not self.expects(key):
            self._next.put((self._before, self._last, self._run), key)
        self._go_on(key)

    def _go_on(self, key: Key) -> None:
        if key == self._last:
            self._run += 1
        else:
            self._before, self._last, self._run = self._last, key, 1
