"""Equal definitions share what they compiled, and the least recently used goes."""

from __future__ import annotations

import pytest
import torch

import meshfuse
from meshfuse import FusionCache, FusionDefinition, LRUCache, LruFusionCache, SchedulerType

X = torch.ones(2, 3)


def add_constant(value: float) -> FusionDefinition:
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.add(fd.from_pytorch(X), value))
    return fd


def test_an_empty_cache() -> None:
    cache = LRUCache(5)
    assert cache.stats() == "Max Fusions Allowed: 5\nThe fusion cache is empty.\n"
    assert cache.num_fusions() == 0
    with pytest.raises(ValueError, match="at least one fusion"):
        LRUCache(0)


def test_equal_programs_share() -> None:
    cache = LRUCache(5)
    first = cache.cache_compile(add_constant(1.0).fusion)
    assert cache.cache_compile(add_constant(1.0).fusion) is first
    other = cache.cache_compile(add_constant(2.0).fusion)
    assert other is not first
    assert (first.fusion_id, other.fusion_id) == (0, 1)
    assert torch.equal(other.execute([X])[0], X + 2)


def test_counts_and_eviction() -> None:
    cached = LruFusionCache(max_fusions=2)(add_constant)
    for value in (1.0, 2.0, 1.0, 1.0, 3.0):
        assert torch.equal(cached(value).execute([X])[0], X + value)
    assert cached.num_fusions() == 2
    assert cached.stats() == (
        "Max Fusions Allowed: 2\n"
        "Total Fusions in Cache: 2\n"
        "Total Unique Fusions Compiled: 3\n"
        "Cache Hits by LRU ordering:\n"
        "\t0 -> 0 hits\n"
        "\t1 -> 2 hits\n"
        "Cache Lookups: 5\n"
        "Cache Hits: 2\n"
        "Hit Rate: 40%\n"
    )


def test_cached_definitions_compile_once() -> None:
    cached = LruFusionCache()(add_constant)
    FusionCache.instance().reset()
    assert cached(1.0).fec is cached(1.0).fec
    cached(1.0).execute([X])
    cached(1.0).execute([X])
    assert FusionCache.instance().statistics().compilations == 1


def test_scheduler_types_are_listed_as_scripts_expect() -> None:
    entries = vars(SchedulerType)["__entries"]
    assert list(entries) == [kind.name for kind in SchedulerType]
    assert entries["inner_persistent"][0] is SchedulerType.inner_persistent
    assert str(SchedulerType.inner_persistent) == "inner_persistent"
    assert {backend.name for backend in meshfuse.CommunicatorBackend} >= {"nccl", "gloo"}
