"""Share what equal definitions have compiled, up to a number of programs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from threading import Lock
from typing import Any, final

from meshfuse.api.definition import FusionDefinition
from meshfuse.api.executor_cache import FusionExecutorCache
from meshfuse.api.fusion_view import FusionView
from meshfuse.base.errors import UserValueError
from meshfuse.cache import fingerprint

DEFAULT_MAX_FUSIONS = 16384


@final
@dataclass(slots=True, eq=False, repr=False)
class _Entry:
    fec: FusionExecutorCache
    hits: int = 0


@final
class LRUCache:
    """FusionExecutorCaches by program; the least recently used goes when there are too many.

    Equal programs are those of equal text: types, constants, static shapes, layouts, parameters of
    operations and the order of inputs and outputs all count. Safe to use from several threads.
    """

    __slots__ = ("_entries", "_hits", "_lock", "_lookups", "_max_fusions")

    def __init__(self, max_fusions: int) -> None:
        if max_fusions < 1:
            raise UserValueError(f"LRUCache({max_fusions}): must hold at least one fusion")
        self._max_fusions = max_fusions
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = Lock()
        self._lookups = 0
        self._hits = 0

    def cache_compile(self, fusion: FusionView) -> FusionExecutorCache:
        """What has been compiled for a program like this, or something new to compile it."""
        key = fingerprint(fusion.recording.program)
        with self._lock:
            self._lookups += 1
            entry = self._entries.get(key)
            if entry is None:
                fusion_id = self._lookups - self._hits - 1
                entry = self._entries[key] = _Entry(FusionExecutorCache(fusion, fusion_id))
                if len(self._entries) > self._max_fusions:
                    self._entries.popitem(last=False)
            else:
                self._hits += 1
                entry.hits += 1
                self._entries.move_to_end(key)
            return entry.fec

    def num_fusions(self) -> int:
        """How many are kept."""
        return len(self._entries)

    def stats(self) -> str:
        """Counts as text; entries by use, the most recent one first."""
        with self._lock:
            lines = [f"Max Fusions Allowed: {self._max_fusions}"]
            if not self._entries:
                return "\n".join([*lines, "The fusion cache is empty.", ""])
            lines += [
                f"Total Fusions in Cache: {len(self._entries)}",
                f"Total Unique Fusions Compiled: {self._lookups - self._hits}",
                "Cache Hits by LRU ordering:",
            ]
            recent_first = reversed(self._entries.values())
            lines += [f"\t{k} -> {entry.hits} hits" for k, entry in enumerate(recent_first)]
            lines += [
                f"Cache Lookups: {self._lookups}",
                f"Cache Hits: {self._hits}",
                f"Hit Rate: {100 * self._hits / self._lookups:g}%",
                "",
            ]
            return "\n".join(lines)


@final
class LruFusionCache:
    """Decorator of functions that return a FusionDefinition: equal ones share what they compiled.

    @LruFusionCache(max_fusions=100)
    def add_one(x):
        with FusionDefinition() as fd: ...
        return fd
    add_one(x).execute([x])
    print(add_one.stats())
    """

    def __init__(self, max_fusions: int = DEFAULT_MAX_FUSIONS) -> None:
        self._cache = LRUCache(max_fusions)

    def __call__(self, define: Callable[..., FusionDefinition]) -> CachedDefinitions:
        return CachedDefinitions(define, self._cache)


@final
class CachedDefinitions:
    """A function that returns FusionDefinitions, under a LruFusionCache."""

    def __init__(self, define: Callable[..., FusionDefinition], cache: LRUCache) -> None:
        self._define = define
        self._cache = cache
        update_wrapper(self, define)

    def __call__(self, *arguments: Any, **keywords: Any) -> FusionDefinition:
        fd = self._define(*arguments, **keywords)
        fd.freeze("LruFusionCache")
        fd.fec = self._cache.cache_compile(fd.fusion)
        return fd

    def stats(self) -> str:
        return self._cache.stats()

    def num_fusions(self) -> int:
        return self._cache.num_fusions()
