"""A list schedule: streams share a device and a link, by numbers found by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from meshfuse.base.errors import InvariantError
from meshfuse.host.events import CALLER, AwaitMark, Mark
from meshfuse.host.list_schedule import Action, Arrival, Computation, Posting, schedule
from meshfuse.host.timeline import Item, Kind, Label

Row = tuple[str, int | None, float, float]


def computing(name: str, seconds: float) -> Computation:
    return Computation(Label(name, Kind.gemm, ""), seconds, 0, 0)


def sent(number: int, seconds: float, *, in_order: bool = True) -> Posting:
    return Posting(number, Label(f"t{number}", Kind.communication, ""), seconds, 0, in_order)


def rows(items: tuple[Item, ...]) -> list[Row]:
    return [(item.label.name, item.stream, item.start, item.end) for item in items]


def iteration(stream: int, number: int, transfer: float, work: float) -> list[tuple[int, Action]]:
    """A transfer and what reads it."""
    return [
        (stream, AwaitMark(Mark(0, 0))),
        (stream, sent(number, transfer)),
        (stream, Arrival(number)),
        (stream, computing(f"c{number}", work)),
        (stream, Mark(1, number)),
    ]


def test_a_transfer_is_under_way_while_the_one_before_is_read() -> None:
    """Three iterations on two streams: the third begins behind the first."""
    actions: list[tuple[int, Action]] = [(CALLER, computing("before", 1)), (CALLER, Mark(0, 0))]
    for k in range(3):
        actions += iteration(k % 2, k, transfer=2, work=3)
    actions += [(CALLER, AwaitMark(Mark(1, k))) for k in (2, 1)]
    actions += [(CALLER, computing("behind", 1))]
    assert rows(schedule(actions)) == [
        ("before", None, 0, 1),
        ("t0", 0, 1, 3),
        ("wait for t0", 0, 1, 3),
        ("wait for t1", 1, 1, 5),
        ("t1", 1, 3, 5),
        ("c0", 0, 3, 6),
        ("t2", 0, 6, 8),
        ("wait for t2", 0, 6, 8),
        ("c1", 1, 6, 9),
        ("c2", 0, 9, 12),
        ("behind", None, 12, 13),
    ]


def test_of_what_can_begin_the_first_in_order_of_issue_does() -> None:
    """`late` is issued before `other`, but cannot begin when the device is free."""
    actions: list[tuple[int, Action]] = [
        (0, sent(0, 4)),
        (0, Arrival(0)),
        (0, computing("late", 1)),
        (1, computing("early", 3)),
        (2, computing("other", 2)),
        (1, computing("last", 1)),
    ]
    found = [row for row in rows(schedule(actions)) if not row[0].startswith(("t", "wait"))]
    assert found == [("early", 1, 0, 3), ("other", 2, 3, 5), ("late", 0, 5, 6), ("last", 1, 6, 7)]


@pytest.mark.parametrize(
    ("in_order", "wanted"),
    [(True, [("t0", 0, 3, 5), ("t1", 1, 5, 6)]), (False, [("t1", 1, 0, 1), ("t0", 0, 3, 5)])],
)
def test_collectives_keep_their_order_and_transfers_between_two_do_not(
    in_order: bool, wanted: list[Row]
) -> None:
    actions: list[tuple[int, Action]] = [
        (0, computing("first", 3)),
        (0, sent(0, 2, in_order=in_order)),
        (1, sent(1, 1, in_order=in_order)),
        (1, Arrival(1)),
        (0, Arrival(0)),
    ]
    assert [row for row in rows(schedule(actions)) if row[0] in ("t0", "t1")] == wanted


def test_a_transfer_begins_while_the_link_carries_another() -> None:
    """Each begins for a second and is on the link for three: the second begins meanwhile."""
    posts = [replace(sent(k, 3.0, in_order=False), begin=1.0) for k in range(2)]
    found = schedule([*enumerate(posts), *((k, Arrival(k)) for k in range(2))])
    assert rows(found) == [
        ("t0", 0, 0.0, 4.0),
        ("wait for t0", 0, 0.0, 4.0),
        ("wait for t1", 1, 0.0, 7.0),
        ("t1", 1, 4.0, 7.0),
    ]


def test_what_takes_no_time_holds_nobody_up() -> None:
    """A transfer of nothing needs no link, and no turn; instances below 0 were never marked."""
    actions: list[tuple[int, Action]] = [
        (0, AwaitMark(Mark(0, -1))),
        (0, computing("first", 3)),
        (0, sent(0, 2)),
        (1, sent(1, 0)),
        (1, Arrival(1)),
        (1, computing("second", 1)),
    ]
    assert rows(schedule(actions)) == [
        ("first", 0, 0, 3),
        ("t0", 0, 3, 5),
        ("second", 1, 3, 4),
    ]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_nothing_is_longer_than_all_in_a_row(order: tuple[int, ...]) -> None:
    """And nothing shorter than what the device does, or the link: whatever waits for whatever."""
    actions: list[tuple[int, Action]] = [(CALLER, Mark(0, 0))]
    times = [(2.0, 5.0), (7.0, 1.0), (3.0, 3.0)]
    for number in order:
        actions += iteration(number % 2, number, *times[number])
    end = max(item.end for item in schedule(actions))
    moved, worked = (sum(column) for column in zip(*times, strict=True))
    assert max(moved, worked) < end < moved + worked


def test_what_never_happens_is_no_timeline() -> None:
    circle: list[tuple[int, Action]] = [
        (0, AwaitMark(Mark(0, 0))),
        (0, Mark(1, 0)),
        (1, AwaitMark(Mark(1, 0))),
        (1, Mark(0, 0)),
    ]
    with pytest.raises(InvariantError, match="streams wait for what never happens"):
        schedule(circle)
    with pytest.raises(InvariantError, match="streams wait for what never happens"):
        schedule([(0, Arrival(3))])
