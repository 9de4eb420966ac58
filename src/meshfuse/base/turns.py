"""Orders in which things take turns, so that what one leaves behind meets all others alike."""

from __future__ import annotations

from collections.abc import Iterator


def balanced_orders(count: int) -> Iterator[tuple[int, ...]]:
    """Orders of `count` things, by number from 0, for one round after another, without end.

    In a block of `count` rounds, twice as many if that is odd, each comes at each place equally
    often, and within rounds behind each other one equally often. None comes behind itself, unless
    it is alone; so of two the same one is always first.

    Source: E. J. Williams, "Experimental designs balanced for the estimation of residual effects of
    treatments", 1949.
    """
    if count <= 2:
        block = [tuple(range(count))]
    else:
        steps = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
        block = [tuple((shift + step) % count for step in steps) for shift in range(count)]
        if count % 2:
            block += [order[::-1] for order in block]
    last = None
    while True:
        left = list(block)
        while left:
            order = next((order for order in left if order[0] != last), left[0])
            left.remove(order)
            last = order[-1]
            yield order
