"""Interval arithmetic on inclusive integer ranges; None stands for an unbounded end."""

from __future__ import annotations

from itertools import product

Interval = tuple[int | None, int | None]


def add(left: Interval, right: Interval) -> Interval:
    """Range of a + b."""
    low = None if left[0] is None or right[0] is None else left[0] + right[0]
    high = None if left[1] is None or right[1] is None else left[1] + right[1]
    return low, high


def scale(interval: Interval, factor: int) -> Interval:
    """Range of factor * a."""
    if factor == 0:
        return 0, 0
    low, high = interval
    scaled = (
        None if low is None else low * factor,
        None if high is None else high * factor,
    )
    return scaled if factor > 0 else (scaled[1], scaled[0])


def multiply(left: Interval, right: Interval) -> Interval:
    """Range of a * b for independent a and b."""
    if left[0] is not None and left[0] == left[1]:
        return scale(right, left[0])
    corners = [_times(x, y) for x, y in product(_ends(left), _ends(right))]
    low, high = min(corners), max(corners)
    return None if low[0] else low[1], None if high[0] else high[1]


def power(interval: Interval, exponent: int) -> Interval:
    """Range of a ** exponent for exponent >= 1; an even power is never negative."""
    result = interval
    for _ in range(exponent - 1):
        result = multiply(result, interval)
    if exponent % 2 == 0 and (result[0] is None or result[0] < 0):
        return 0, result[1]
    return result


def floordiv(left: Interval, right: Interval) -> Interval:
    """Range of a // b over the b that are not zero."""
    positive = _floordiv_positive(left, right)
    negative = _floordiv_positive(scale(left, -1), scale(right, -1))
    if positive is None or negative is None:
        return positive or negative or (None, None)
    return minimum(positive, negative)[0], maximum(positive, negative)[1]


def mod(left: Interval, right: Interval) -> Interval:
    """Range of a % b with the sign of b, over the b that are not zero."""
    low = None if right[0] is None else min(0, right[0] + 1)
    high = None if right[1] is None else max(0, right[1] - 1)
    if low == 0 and left[0] is not None and left[0] >= 0:
        return 0, _least(high, left[1])
    return low, high


def minimum(left: Interval, right: Interval) -> Interval:
    """Range of min(a, b)."""
    low = None if left[0] is None or right[0] is None else min(left[0], right[0])
    return low, _least(left[1], right[1])


def maximum(left: Interval, right: Interval) -> Interval:
    """Range of max(a, b)."""
    low, high = minimum(scale(left, -1), scale(right, -1))
    return None if high is None else -high, None if low is None else -low


def _least(left: int | None, right: int | None) -> int | None:
    if left is None or right is None:
        return right if left is None else left
    return min(left, right)


# An end of an interval as (sign of infinity or 0, value); the tuples sort as the numbers do.
_End = tuple[int, int]


def _ends(interval: Interval) -> tuple[_End, _End]:
    low, high = interval
    return (-1, 0) if low is None else (0, low), (1, 0) if high is None else (0, high)


def _times(left: _End, right: _End) -> _End:
    if left == (0, 0) or right == (0, 0):
        return 0, 0
    if left[0] == 0 and right[0] == 0:
        return 0, left[1] * right[1]
    return _sign(left) * _sign(right), 0


def _sign(end: _End) -> int:
    return end[0] or (1 if end[1] > 0 else -1)


def _floordiv_positive(left: Interval, right: Interval) -> Interval | None:
    """Range of a // b over the b >= 1, None if there are none."""
    smallest = 1 if right[0] is None else max(1, right[0])
    largest = right[1]
    if largest is not None and largest < smallest:
        return None
    low, high = left
    if low is not None:
        if low < 0:
            low //= smallest
        else:
            low = 0 if largest is None else low // largest
    if high is not None:
        if high >= 0:
            high //= smallest
        else:
            high = -1 if largest is None else high // largest
    return low, high
