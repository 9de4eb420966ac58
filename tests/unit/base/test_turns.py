"""Orders of turns: who comes where, and behind whom."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice, pairwise

import pytest

from meshfuse.base.turns import balanced_orders


@pytest.mark.parametrize("count", range(3, 12))
def test_all_come_everywhere_and_behind_all_others_equally_often(count: int) -> None:
    times = 2 if count % 2 else 1
    rounds = list(islice(balanced_orders(count), 3 * times * count))
    assert all(sorted(order) == list(range(count)) for order in rounds)
    assert all(a != b for a, b in pairwise(chain.from_iterable(rounds)))
    for block in (rounds[: times * count], rounds[times * count : 2 * times * count]):
        places = Counter((place, one) for order in block for place, one in enumerate(order))
        assert set(places.values()) == {times} and len(places) == count**2
        pairs = Counter(pair for order in block for pair in pairwise(order))
        assert set(pairs.values()) == {times} and len(pairs) == count * (count - 1)


@pytest.mark.parametrize(("count", "order"), [(1, (0,)), (2, (0, 1))])
def test_up_to_two(count: int, order: tuple[int, ...]) -> None:
    assert list(islice(balanced_orders(count), 3)) == [order] * 3
