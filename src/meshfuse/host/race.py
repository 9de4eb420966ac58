"""Forms of a program run against one another, and which of them is to be kept.

Rounds are interleaved, so that what slows the machine down slows all forms, and in them each comes
behind each other one about equally often: behind one that kept a GPU busy there is less power left,
and behind itself a form finds the host warm. One takes the place of the plain form only if it
is quicker beyond doubt: times are compared round by round, and the upper end of a confidence
interval of the median ratio counts, which no single outlier moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from statistics import median
from typing import Final, Protocol, final

from meshfuse.base.errors import InvariantError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.turns import balanced_orders
from meshfuse.facts.overlap_form import PLAIN, Overlap

WARM_UP_ROUNDS: Final = 2
"""By the second, all is compiled and allocated."""
ROUNDS: Final = 15
"""Of which three may be spoilt by something else before a better form is not seen to be better."""
WORTH_IT: Final = 0.95
"""A form that takes more of the plain one's time than this is not worth another program. What is
measured to be a little quicker now may be a little slower at another hour."""
_CONFIDENCE: Final = 0.95
ROW_NANOSECONDS: Final = 6_000_000
MOST_CALLS: Final = 8
"""Short calls are timed in rows, as programs run them: behind others, which a GPU is still busy
with while the host issues the next. Alone, the form that is issued soonest would win."""

Nanoseconds = int


class Track(Protocol):
    """Where a race is run: one rank's part of it. All ranks call the same, in the same order."""

    def prepare(self, form: Overlap) -> None:
        """Make a form ready to run, without the other ranks. Raises what that does."""
        ...

    def run(self, form: Overlap, calls: int) -> Nanoseconds:
        """Run a form `calls` times in a row, when all ranks are ready, and say how long each took
        here.

        Raises what running it does.
        """
        ...

    def settle(self, form: Overlap, error: Exception | None) -> str | None:
        """Why a form cannot go on, if on any rank there was an error; the same on all ranks."""
        ...

    def slowest(self, times: Sequence[Nanoseconds]) -> list[Nanoseconds]:
        """For each entry the greatest of all ranks."""
        ...


@final
@frozen_dataclass
class RaceRow:
    """How a form did: median milliseconds, and beside the plain form of the same rounds the median
    ratio, and the most that it may be; or the error for which it was dropped."""

    form: Overlap
    milliseconds: float | None
    ratio: float | None = None
    ratio_at_most: float | None = None
    error: str | None = None


def race(forms: Sequence[Overlap], track: Track) -> tuple[RaceRow, ...]:
    """Run the plain form and others in turn; a row for each.

    A form that fails on any rank is dropped; where the plain one fails, its error is raised.
    """
    errors: dict[Overlap, str] = {}
    track.prepare(PLAIN)
    for form in forms:
        _try(form, track.prepare, track, errors)
    running = [PLAIN, *(form for form in forms if form not in errors)]
    plain = _warm_up(running, track, errors)
    (slowest,) = track.slowest([plain])
    calls = max(1, min(MOST_CALLS, ROW_NANOSECONDS // max(slowest, 1)))
    times: dict[Overlap, list[Nanoseconds]] = {form: [] for form in running}
    for order in islice(balanced_orders(len(running)), ROUNDS):
        for form in (running[place] for place in order):
            times[form].append(track.run(form, calls))
    flat = track.slowest([taken for form in running for taken in times[form]])
    if len(flat) != ROUNDS * len(running):
        raise InvariantError(f"a race of {len(running)} forms has {len(flat)} times")
    found = {form: flat[k * ROUNDS : (k + 1) * ROUNDS] for k, form in enumerate(running)}
    return tuple(_row(form, found, errors) for form in (PLAIN, *forms))


def _warm_up(running: list[Overlap], track: Track, errors: dict[Overlap, str]) -> Nanoseconds:
    """Run all, and leave those that cannot out of `running`. How long the plain form took last."""
    plain = 0
    for _ in range(WARM_UP_ROUNDS):
        for form in list(running):
            if form == PLAIN:
                plain = track.run(form, 1)
                continue
            _try(form, lambda form: track.run(form, 1), track, errors)
            if form in errors:
                running.remove(form)
    return plain


def _try(
    form: Overlap,
    attempt: Callable[[Overlap], object],
    track: Track,
    errors: dict[Overlap, str],
) -> None:
    """Attempt something; where it fails on any rank, the form gets an error on all."""
    error = None
    try:
        attempt(form)
    except Exception as found:  # noqa: BLE001  # whatever a form raises, the plain one runs
        error = found
    reason = track.settle(form, error)
    if reason is not None:
        errors[form] = reason


def _row(
    form: Overlap, times: Mapping[Overlap, Sequence[Nanoseconds]], errors: Mapping[Overlap, str]
) -> RaceRow:
    if form in errors:
        return RaceRow(form, None, error=errors[form])
    milliseconds = median(times[form]) / 1e6
    if form == PLAIN:
        return RaceRow(form, milliseconds)
    ratios = [taken / max(plain, 1) for taken, plain in zip(times[form], times[PLAIN], strict=True)]
    return RaceRow(form, milliseconds, median(ratios), upper_bound_of_median(ratios))


def upper_bound_of_median(values: Sequence[float]) -> float:
    """What the median is below with a confidence of 95%, whatever the distribution.

    The k-th smallest of n is below the median only if at least k of n values are, which is a
    binomial's tail.
    """
    ordered, n = sorted(values), len(values)
    below = 0
    for k in range(n):
        below += math.comb(n, k)
        if below / 2**n >= _CONFIDENCE:
            return ordered[k]
    return ordered[-1]


def winner(rows: Sequence[RaceRow], *, is_required: bool) -> Overlap | None:
    """The form to keep: the quickest that beats the plain one beyond doubt, else that.

    `is_required`: the quickest besides the plain one, None if there is none.
    """
    others = [(row.ratio, k) for k, row in enumerate(rows) if row.ratio is not None]
    if not is_required:
        others = [(r, k) for r, k in others if (rows[k].ratio_at_most or 0.0) < WORTH_IT]
    if others:
        return rows[min(others)[1]].form
    return None if is_required else PLAIN
