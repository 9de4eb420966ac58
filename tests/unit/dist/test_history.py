"""Which calls ranks expect, and so do not compare."""

from __future__ import annotations

from collections.abc import Iterable

from meshfuse.dist.history import MOST_CONTEXTS, CallHistory


def compared(history: CallHistory, calls: Iterable[str]) -> int:
    """How many of the calls were not expected; each is made, as ranks make it."""
    count = 0
    for call in calls:
        is_expected = history.expects((call,))
        assert history.has_followed((call,)) == is_expected
        if not is_expected:
            history.note((call,))
            count += 1
    return count


def test_a_call_like_the_last_is_expected() -> None:
    assert compared(CallHistory(), "a" * 50) == 1


def test_calls_in_turn_are_expected_once_they_have_come_round() -> None:
    history = CallHistory()
    assert compared(history, "abc" * 3) > 0
    assert compared(history, "abc" * 50) == 0


def test_a_layer_that_repeats_gives_way_where_it_did() -> None:
    history = CallHistory()
    step = "e" + "l" * 12 + "h" + "b" * 12
    assert compared(history, step * 3) < 12
    assert compared(history, step * 50) == 0
    step = "e" + "l" * 40 + "h" + "b" * 40
    assert compared(history, step * 3) < 12
    assert compared(history, step * 50) == 0


def test_whatever_leaves_the_course_is_compared() -> None:
    history = CallHistory()
    compared(history, "ab" * 10)
    for other in "bcd":
        assert not history.expects((other,))
    assert history.expects(("a",))


def test_a_layer_that_repeats_once_more_than_it_did_is_compared() -> None:
    """Ranks that are right give way to the next one here, and compare nothing."""
    history = CallHistory()
    for layer, length in zip("abcde", (3, 15, 16, 17, 40), strict=True):
        row = layer * length
        compared(history, (row + "h") * 4 + row)
        for _ in range(2):
            assert not history.has_followed((layer,))
        assert history.has_followed(("h",))


def test_the_latest_successor_counts() -> None:
    history = CallHistory()
    compared(history, "ab" * 5)
    assert compared(history, "c") == 1
    assert compared(history, "ab" * 5) > 0
    assert compared(history, "ab") == 0


def test_calls_that_never_repeat_are_all_compared_and_take_bounded_memory() -> None:
    history, calls = CallHistory(), [str(number) for number in range(2 * MOST_CONTEXTS)]
    assert compared(history, calls) == len(calls)
    for table in (history._next_by_long, history._next_by_short, history._numbers):
        assert len(table) <= MOST_CONTEXTS


def test_buffers_in_turn_that_give_way_to_another_are_expected_to() -> None:
    """Eight calls on two buffers, eight on none of them: what follows b depends on how long."""
    history = CallHistory()
    assert compared(history, ("abababab" + 8 * "-") * 3) > 0
    assert compared(history, ("abababab" + 8 * "-") * 20) == 0


def test_more_calls_than_are_told_apart() -> None:
    history = CallHistory()
    many = [str(k) for k in range(MOST_CONTEXTS + 10)]
    compared(history, many)
    compared(history, "ab" * 4)
    assert compared(history, "ab" * 50) == 0


def test_nothing_is_a_call_like_others() -> None:
    """As of memory in which no input lies."""
    history = CallHistory()
    for key in (("a",), (), ("a",), ()):
        history.note(key)
    assert history.has_followed(("a",))
    assert history.expects(()) and not history.expects(("a",))
