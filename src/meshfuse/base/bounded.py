"""A table that forgets: for what can be made again."""

from __future__ import annotations

from threading import Lock
from typing import Generic, TypeVar, final

Key = TypeVar("Key")
Value = TypeVar("Value")


@final
class BoundedTable(Generic[Key, Value]):
    """At most `most` entries; the one that was put first goes first. Safe to use from threads."""

    __slots__ = ("_entries", "_lock", "get", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: dict[Key, Value] = {}
        self._lock = Lock()
        self.get = self._entries.get
        """`get(key)`: the value, or None. The dictionary's own, for the sake of hot calls."""

    def put(self, key: Key, value: Value) -> None:
        with self._lock:
            self._entries[key] = value
            while len(self._entries) > self.most:
                del self._entries[next(iter(self._entries))]

    def values(self) -> list[Value]:
        """All that are kept, the one that was put first first."""
        with self._lock:
            return list(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)
