"""Races of forms: by a clock that the test sets, one rank or several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from meshfuse.facts.overlap_form import PLAIN, Overlap
from meshfuse.host.race import (
    ROUNDS,
    WARM_UP_ROUNDS,
    RaceRow,
    race,
    upper_bound_of_median,
    winner,
)

TWO, FOUR = Overlap.chunks(2), Overlap.chunks(4)
MILLISECOND = 1_000_000


@dataclass
class Track:
    """`milliseconds` says how long the k-th run of a form takes; `fails` when a form raises."""

    milliseconds: Mapping[Overlap, Callable[[int], float]]
    fails: Mapping[Overlap, int] = field(default_factory=dict)
    ran: list[Overlap] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def prepare(self, form: Overlap) -> None:
        if self.fails.get(form) == -1:
            raise RuntimeError(f"{form} does not compile")

    def run(self, form: Overlap, calls: int) -> int:
        k = self.ran.count(form)
        self.ran.append(form)
        self.calls.append(calls)
        if self.fails.get(form) == k:
            raise RuntimeError(f"{form} does not run")
        return round(self.milliseconds[form](k) * MILLISECOND)

    def settle(self, form: Overlap, error: Exception | None) -> str | None:
        return None if error is None else str(error)

    def slowest(self, times: Sequence[int]) -> list[int]:
        return list(times)


def always(milliseconds: float) -> Callable[[int], float]:
    return lambda k: milliseconds


def raced(two: Callable[[int], float], four: Callable[[int], float], **more: object) -> Track:
    return Track({PLAIN: always(10), TWO: two, FOUR: four}, **more)  # pyright: ignore[reportArgumentType]


def chosen(track: Track, *, is_required: bool = False) -> Overlap | None:
    return winner(race([TWO, FOUR], track), is_required=is_required)


def test_the_quickest_form_wins() -> None:
    assert chosen(raced(always(9), always(8))) == FOUR


def test_the_plain_form_wins_where_it_is_quickest() -> None:
    assert chosen(raced(always(11), always(12))) == PLAIN


@pytest.mark.parametrize(("plain", "calls"), [(10.0, 1), (2.9, 2), (0.001, 8), (0.0, 8)])
def test_short_calls_are_timed_in_rows(plain: float, calls: int) -> None:
    track = Track({PLAIN: always(plain), TWO: always(1), FOUR: always(1)})
    race([TWO, FOUR], track)
    assert track.calls == 3 * WARM_UP_ROUNDS * [1] + 3 * ROUNDS * [calls]


@pytest.mark.parametrize("milliseconds", [10.0, 9.85])
def test_a_tie_is_the_plain_form(milliseconds: float) -> None:
    assert chosen(raced(always(milliseconds), always(10))) == PLAIN


def test_a_form_that_is_quicker_now_and_then_is_no_better() -> None:
    """Its median is below, but it might as well not be."""
    noisy = raced(lambda k: 7 if k % 2 else 10.5, always(12))
    rows = race([TWO, FOUR], noisy)
    assert rows[1].ratio_at_most is not None and rows[1].ratio_at_most > 1
    assert winner(rows, is_required=False) == PLAIN


def test_one_outlier_changes_nothing() -> None:
    assert chosen(raced(lambda k: 500 if k == WARM_UP_ROUNDS + 1 else 8, always(12))) == TWO


def test_a_form_that_is_required_need_not_be_quicker() -> None:
    assert chosen(raced(always(14), always(12)), is_required=True) == FOUR


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_each_comes_behind_each_other_and_the_first_rounds_do_not_count(count: int) -> None:
    others = [Overlap.chunks(chunks) for chunks in range(2, count + 1)]
    times = {PLAIN: always(10), **{form: always(12) for form in others}}
    times[TWO] = lambda k: 1000 if k < WARM_UP_ROUNDS else 5
    track = Track(times)
    rows = race(others, track)
    assert all(track.ran.count(form) == WARM_UP_ROUNDS + ROUNDS for form in (PLAIN, *others))
    raced_in_turn = track.ran[count * WARM_UP_ROUNDS :]
    assert all(form != following for form, following in pairwise(raced_in_turn))
    rounds = [raced_in_turn[count * k : count * (k + 1)] for k in range(ROUNDS)]
    behind = Counter(pair for one in rounds for pair in pairwise(one))
    assert len(behind) == count * (count - 1)
    assert max(behind.values()) - min(behind.values()) <= 2, behind
    assert rows[1] == RaceRow(TWO, 5.0, 0.5, 0.5)


@pytest.mark.parametrize("when", [-1, 0, 1])
def test_a_form_that_fails_is_dropped(when: int) -> None:
    track = raced(always(1), always(8), fails={TWO: when})
    rows = race([TWO, FOUR], track)
    does = "does not compile" if when < 0 else "does not run"
    assert rows[1] == RaceRow(TWO, None, error=f"2 chunks {does}")
    assert winner(rows, is_required=False) == FOUR
    assert track.ran.count(TWO) == when + 1


def test_the_error_of_the_plain_form_is_everybody_s() -> None:
    with pytest.raises(RuntimeError, match="plain does not run"):
        race([TWO], raced(always(1), always(1), fails={PLAIN: 0}))


def test_nothing_can_be_required_of_forms_that_fail() -> None:
    rows = race([TWO], Track({PLAIN: always(1), TWO: always(1)}, {TWO: -1}))
    assert winner(rows, is_required=True) is None


def test_the_bound_of_a_median() -> None:
    """Of nine values the median is below the eighth in 98 of 100 cases, below the seventh in 91."""
    assert upper_bound_of_median([9, 1, 2, 3, 4, 5, 6, 7, 8]) == 8
    assert upper_bound_of_median([3.0]) == 3.0
