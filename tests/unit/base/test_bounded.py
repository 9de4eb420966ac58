"""The oldest entries go, and nothing else does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from meshfuse.base.bounded import BoundedTable


def test_the_oldest_entry_goes_first() -> None:
    table: BoundedTable[int, str] = BoundedTable(2)
    for key in (1, 2, 1, 3):
        table.put(key, str(key))
    assert [table.get(key) for key in (1, 2, 3)] == [None, "2", "3"]
    assert len(table) == 2


def test_threads() -> None:
    table: BoundedTable[int, int] = BoundedTable(10)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: table.put(key, key), range(2000)))
    assert len(table) == 10
