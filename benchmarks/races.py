"""Variants timed in turns, round by round, in orders in which each comes behind each other one
equally often, so that clocks and power are on average the same for all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from ranks import Job

from meshfuse.base.turns import balanced_orders
from meshfuse.host.race import upper_bound_of_median

Call = Callable[[int], object]
"""One call of a variant, with its number, by which it may choose among inputs."""


@dataclass(frozen=True)
class Times:
    """Milliseconds a call: `of_rounds` of the slowest rank, and the median of the slowest rank."""

    of_rounds: tuple[float, ...]
    median: float

    def ratio_to(self, other: Times) -> float:
        return statistics.median(self._ratios(other))

    def upper_ratio_to(self, other: Times) -> float:
        """A bound that the median ratio of a round exceeds with a probability below 5 %.

        It is one of the ratios seen, and nothing is assumed about how they are distributed; of
        eight rounds it is the second largest.
        """
        return upper_bound_of_median(self._ratios(other))

    def _ratios(self, other: Times) -> list[float]:
        return [a / b for a, b in zip(self.of_rounds, other.of_rounds, strict=True)]


def race(
    job: Job, calls: Mapping[str, Call], *, iterations: int, rounds: int, warm_up: int = 3
) -> dict[str, Times]:
    """Each variant `iterations` times in a row, in each of `rounds`; `warm_up` calls come first.

    Behind one that kept a GPU busy all the time, another finds less power left than behind one that
    waited for transfers: see balanced_orders, of whose blocks `rounds` should be a multiple. Orders
    are the same on all ranks.
    """
    for call in calls.values():
        for number in range(warm_up):
            call(number)
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn, order in zip(range(rounds), balanced_orders(len(names)), strict=False):
        job.keep_watch()
        for name in (names[place] for place in order):
            found[name].append(_time(job, calls[name], iterations, turn * iterations))
    times: dict[str, Times] = {}
    for name, own in found.items():
        (median,) = job.largest([statistics.median(own)])
        times[name] = Times(tuple(job.largest(own)), median)
    return times


def _time(job: Job, call: Call, iterations: int, number: int) -> float:
    """Milliseconds a call, of one row of calls from `number` on. On GPUs by the device's clock, and
    behind one more: a first call would count the time of a host that has just woken up, 0.1 ms and
    more."""
    job.meet()
    if not job.is_cuda:
        start = time.perf_counter()
        for place in range(iterations):
            call(number + place)
        return (time.perf_counter() - start) * 1000 / iterations
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call(number)  # what is timed comes behind this: as in a program, the GPU is busy meanwhile
    begin.record()
    for place in range(iterations):
        call(number + place)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / iterations


def host_microseconds(
    job: Job, calls: Mapping[str, Call], *, iterations: int, rounds: int
) -> dict[str, float]:
    """How long the host takes to issue a call, the device having nothing queued before.

    The median over rounds on the slowest rank. Means something only where calls return at once.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        job.keep_watch()
        for name, call in calls.items():
            job.meet()
            start = time.perf_counter()
            for place in range(iterations):
                call(turn * iterations + place)
            found[name].append((time.perf_counter() - start) * 1e6 / iterations)
    job.synchronize()
    medians = job.largest([statistics.median(own) for own in found.values()])
    return dict(zip(found, medians, strict=True))
