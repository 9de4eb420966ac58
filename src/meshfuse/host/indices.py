"""Which indices of a tensor's axis a piece of memory has, and which of a sum it is a term of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.facts.holdings import Runs, run_length

_LONGEST: Final = 1 << 14
"""As many indices are compared one by one, no more."""


@final
@frozen_dataclass
class Indices:
    """Some of the indices of an axis of `extent`, in the order in which they lie in memory."""

    extent: int
    runs: Runs

    @staticmethod
    def all_of(extent: int) -> Indices:
        return Indices(extent, (range(extent),) if extent else ())

    def __len__(self) -> int:
        return run_length(self.runs)

    def __str__(self) -> str:
        return ", ".join(map(_text, self.runs)) or "none"

    @property
    def are_all(self) -> bool:
        return self.runs == ((range(self.extent),) if self.extent else ())

    def part(self, low: int, high: int) -> Indices:
        """Those at these places."""
        if low == 0 and high == len(self):
            return self
        return Indices(self.extent, tuple(_part(self.runs, low, high)))

    def shifted(self, by: int, extent: int) -> Indices:
        return Indices(extent, tuple(range(r.start + by, r.stop + by, r.step) for r in self.runs))


def _text(run: range) -> str:
    if len(run) == 1:
        return str(run[0])
    return f"{run[0]} to {run[-1]}{'' if run.step == 1 else f' by {run.step}'}"


def _part(runs: Runs, low: int, high: int) -> Iterator[range]:
    first = 0
    for run in runs:
        found = run[max(low - first, 0) : max(high - first, 0)]
        if found:
            yield range(found[0], found[0] + 1) if len(found) == 1 else found
        first += len(run)


def joined(parts: Sequence[Indices]) -> Indices | None:
    """What lies side by side, as one; None if it is not of one axis."""
    if len({part.extent for part in parts}) != 1:
        return None
    found: list[range] = []
    for run in chain(*(part.runs for part in parts)):
        if found and found[-1].stop == run.start and (found[-1].step, run.step) == (1, 1):
            found[-1] = range(found[-1].start, run.stop)
        else:
            found.append(run)
    return Indices(parts[0].extent, tuple(found))


def differ(one: Indices | None, other: Indices | None) -> bool:
    """Whether two that should be the same are surely not. Those of different extents are indices of
    different things: one of the two stretches, or was counted anew."""
    if one is None or other is None or one.extent != other.extent or one.runs == other.runs:
        return False
    if len(one) != len(other):
        return True
    pairs = zip(chain(*one.runs), chain(*other.runs), strict=True)
    return len(one) > _LONGEST or any(a != b for a, b in pairs)


# Other axes.


def reshaped(
    axes: Sequence[Indices | None], before: Sequence[int], after: Sequence[int]
) -> tuple[Indices | None, ...]:
    """The indices of what axes become where they are read as one row and cut anew; the lengths of
    axes were `before`, and are `after`.

    6 to 7 of 8, and all of 4, as one   ->   24 to 31 of 32

    Known where of axes that are taken together only the first is in parts. Of an axis of which
    there is a single index, lengths do not tell what became of it.
    """
    made: list[Indices | None] = []
    for old, new in _groups(before, after):
        made += cut_row(in_a_row(axes[old.start : old.stop]), after[new.start : new.stop])
    made += [None] * (len(after) - len(made))
    if any(length == 1 and not _is_all(axis) for axis, length in zip(axes, before, strict=True)):
        made = [None if length == 1 else axis for axis, length in zip(made, after, strict=True)]
    return tuple(made)


def _is_all(axis: Indices | None) -> bool:
    return axis is not None and axis.are_all


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The fewest axes that have as many elements on both sides, as far as there are such."""
    i = j = 0
    while i < len(before) and j < len(after) and 0 not in (*before, *after):
        m, n = i + 1, j + 1
        while (size := math.prod(before[i:m])) != (wanted := math.prod(after[j:n])):
            if max(m - len(before), n - len(after)) > 0:
                return
            m, n = (m + 1, n) if size < wanted else (m, n + 1)
        yield range(i, m), range(j, n)
        i, j = m, n


def in_a_row(axes: Sequence[Indices | None]) -> Indices | None:
    """What axes are as one."""
    known = [found for found in axes if found is not None]
    if len(known) < len(axes) or len(axes) == 1:
        return axes[0] if len(axes) == 1 else None
    first, *others = known
    inner = math.prod(found.extent for found in others)
    if not all(found.are_all for found in others) or any(r.step != 1 for r in first.runs):
        return None
    runs = tuple(range(run.start * inner, run.stop * inner) for run in first.runs)
    return Indices(first.extent * inner, runs)


def cut_row(indices: Indices | None, lengths: Sequence[int]) -> Sequence[Indices | None]:
    """What one axis is as several of these lengths."""
    inner = math.prod(lengths[1:])
    if len(lengths) == 1 or indices is None or inner == 0:
        return [indices] if len(lengths) == 1 else [None] * len(lengths)
    bounds = [bound for run in indices.runs for bound in (run.start, run.stop, indices.extent)]
    if any(run.step != 1 for run in indices.runs) or any(bound % inner for bound in bounds):
        return [None] * len(lengths)
    runs = tuple(range(run.start // inner, run.stop // inner) for run in indices.runs)
    return [Indices(indices.extent // inner, runs), *map(Indices.all_of, lengths[1:])]


# Between ranks.


def led_to(pairs: Iterable[tuple[Indices, Indices]], wanted: Indices) -> Indices | str | None:
    """What `wanted` are, where ranks say what some indices are: pairs of both. Text, if ranks
    disagree; None if it is not known.
    """
    known = list(pairs)
    for named, found in known:
        if len(named) != len(found):
            return f"one has {len(found)} indices, of which it should have {len(named)}"
    known = [(named, found) for named, found in known if named.runs]
    if not known or len({found.extent for _, found in known}) != 1:
        return None
    if all(named is found for named, found in known):
        return wanted
    extent = known[0][1].extent
    shifts = {_shift(named, found) for named, found in known}
    if len(shifts) == 1 and None not in shifts:
        return wanted.shifted(next(iter(shifts)) or 0, extent)
    if sum(len(named) for named, _ in known) > _LONGEST:
        return None
    return _looked_up(known, wanted, extent)


def _shift(named: Indices, found: Indices) -> int | None:
    """By how much all of one are behind the other."""
    by = {b.start - a.start for a, b in zip(named.runs, found.runs, strict=False)}
    is_one = len(by) == 1 and named.shifted(min(by), found.extent).runs == found.runs
    return min(by) if is_one else None


def _looked_up(
    known: Sequence[tuple[Indices, Indices]], wanted: Indices, extent: int
) -> Indices | str | None:
    table: dict[int, int] = {}
    for named, found in known:
        for name, index in zip(chain(*named.runs), chain(*found.runs), strict=True):
            if table.setdefault(name, index) != index:
                return f"one has index {table[name]} where another has {index}"
    return _listed(table, wanted, extent)


def _listed(table: Mapping[int, int], wanted: Indices, extent: int) -> Indices | None:
    names = list(chain(*wanted.runs))
    if any(name not in table for name in names):
        return None
    found = [table[name] for name in names]
    return joined([Indices(extent, (range(index, index + 1),)) for index in found]) or Indices(
        extent, ()
    )


# Sums.

Terms = tuple[Indices, ...]
"""Of each axis that was summed over and of which not all is in the sum yet, what is. () is a sum of
all, or no sum."""


ZERO: Final[Terms] = (Indices(0, ()),)
"""What has no terms yet."""


def reduced(terms: Sequence[Terms | None], over: Iterable[Indices | None]) -> Terms | None:
    """What a sum has over these axes, of operands with these terms; None if that is not known."""
    some: list[Terms] = []
    for found in terms:
        if found is None:
            return None
        if found and found not in some:
            some.append(found)
    if len(some) > 1:
        return None
    rest: list[Indices] = []
    for indices in over:
        if indices is None:
            return None
        if not indices.are_all:
            rest.append(indices)
    return (*(some[0] if some else ()), *rest)


@final
@frozen_dataclass
class Twice:
    """Terms that are added more than once."""

    indices: Indices


def added(sums: Sequence[Terms | None], *, once: bool = True) -> Terms | Twice | None:
    """What the sum of several has, where they differ in one axis at most; None if it is not known.
    With `once` none of them may have a term of another."""
    known = [found for found in sums if found is not None]
    if ZERO in known and len(known) == len(sums):
        sums = known = [found for found in known if found != ZERO] or [ZERO]
    if len(known) < len(sums) or not known or len({len(found) for found in known}) != 1:
        return None
    columns = [list(column) for column in zip(*known, strict=True)]
    different = [k for k, column in enumerate(columns) if any(i != column[0] for i in column)]
    if len(different) > 1:
        return None
    if not different:
        is_twice = once and len(known) > 1 and known[0] and all(map(len, known[0]))
        return Twice(known[0][0]) if is_twice else known[0]
    place = different[0]
    together = _together(columns[place], once=once)
    if together is None or isinstance(together, Twice):
        return together
    kept = (*known[0][:place], *known[0][place + 1 :])
    return kept if together.are_all else (*kept, together)


def _together(parts: Sequence[Indices], *, once: bool) -> Indices | Twice | None:
    runs = list(chain(*(part.runs for part in parts)))
    if len({part.extent for part in parts}) != 1:
        return None
    if any(run.step != 1 for run in runs):
        if sum(map(len, runs)) > _LONGEST:
            return None
        runs = [range(index, index + 1) for index in chain(*runs)]
    runs.sort(key=lambda run: (run.start, run.stop))
    return _merged(runs, parts[0].extent, once=once)


def _merged(runs: Sequence[range], extent: int, *, once: bool) -> Indices | Twice:
    """Runs that begin in increasing order."""
    found: list[range] = []
    for run in runs:
        if found and run.start < found[-1].stop:
            if once:
                return Twice(Indices(extent, (range(run.start, min(run.stop, found[-1].stop)),)))
            found[-1] = range(found[-1].start, max(run.stop, found[-1].stop))
        elif found and run.start == found[-1].stop:
            found[-1] = range(found[-1].start, run.stop)
        else:
            found.append(run)
    return Indices(extent, tuple(found))
