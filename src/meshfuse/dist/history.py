"""What the ranks of a team have agreed on, call by call, and so what each expects to be next."""

from __future__ import annotations

from typing import final

from meshfuse.base.bounded import BoundedTable

MOST_CONTEXTS = 1024
"""Places in the course of calls for which a team remembers what came next; and calls that it tells
apart."""
_LONG = 16
"""Calls that a long context is made of."""
_BITS = 16
"""For the number of a call."""
_ALL = (1 << _LONG * _BITS) - 1
"""The bits of a long context."""

_NONE = 0
"""In place of a call's number, where there was none."""

Key = tuple[object, ...]


@final
class CallHistory:
    """The calls of one team as one of its ranks saw them.

    A call is expected if it follows the ones before it as it did last time; where nothing is known,
    if it is like the last. Ranks compare calls that they do not expect, and only those. That is
    enough: a history changes only by calls that all ranks of the team have made, so all expect the
    same; a rank that makes another call compares, and finds that its peers do not.

    What came before is told in two ways. By the sixteen last calls: buffers that take turns for a
    while, and then give way to something else, are expected to. Where those are new, or all one, by
    the last call, how often it was made in a row, and the call before those: a layer that runs
    forty times and then gives way to the next one is expected to.
    """

    __slots__ = ("_before", "_last", "_long", "_next_by_long", "_next_by_short", "_numbers", "_run")

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._before = self._last = _NONE
        self._run = 0
        self._long = 0
        self._next_by_short: BoundedTable[tuple[int, int, int], int] = BoundedTable(MOST_CONTEXTS)
        self._next_by_long: BoundedTable[int, int] = BoundedTable(MOST_CONTEXTS)

    def expects(self, key: Key) -> bool:
        return self._numbers.get(key) == self._expected()

    def has_followed(self, key: Key) -> bool:
        """`note`, of a call that is expected; nothing for another."""
        number, last = self._numbers.get(key), self._last
        if number == last and self._run >= _LONG:  # most calls by far; else as below, in one frame
            if self._next_by_short.get((self._before, last, self._run), last) != last:
                return False
            self._run += 1
            return True
        if number is None or number != self._expected():
            return False
        self._go_on(number)
        return True

    def note(self, key: Key) -> None:
        """All ranks of the team make this call."""
        number = self._numbers.get(key)
        if number is None:
            number = self._count(key)
        if number != self._expected():
            self._next_by_long.put(self._long, number)
            self._next_by_short.put((self._before, self._last, self._run), number)
        self._go_on(number)

    def _expected(self) -> int:
        found = self._next_by_long.get(self._long) if self._run < _LONG else None
        if found is None:
            found = self._next_by_short.get((self._before, self._last, self._run))
        return self._last if found is None else found

    def _go_on(self, number: int) -> None:
        if number != self._last:
            self._before, self._last, self._run = self._last, number, 0
        self._run += 1
        if self._run <= _LONG:  # in a longer run it has nothing but this call, and stays
            self._long = (self._long << _BITS | number) & _ALL

    def _count(self, key: Key) -> int:
        """The number of a call that is new. The same on all ranks, as are the calls."""
        if len(self._numbers) == MOST_CONTEXTS:
            self._numbers.clear()  # numbers then mean other calls; at worst ranks compare more
        number = self._numbers[key] = len(self._numbers) + 1
        return number
