"""Forms of overlap raced on the inputs of a call; rank 0 decides, and all ranks take its choice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, final

import torch

from meshfuse.api.bound_call import Bound
from meshfuse.api.overlap_choice import (
    OverlapChoice,
    choice_as_read,
    reason_of,
    written_choice,
)
from meshfuse.base.errors import CommunicationError, Unsupported
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.base.trace import Note
from meshfuse.cache import FusionCache
from meshfuse.dist.agreement import CommunicationSequence
from meshfuse.dist.communicator import Communicator
from meshfuse.facts.overlap_form import PLAIN, Overlap
from meshfuse.host.executors import run_executable
from meshfuse.host.plan import Executable
from meshfuse.host.race import Nanoseconds, race, winner
from meshfuse.runtime.arguments import Argument
from meshfuse.runtime.remembered_choices import cache_directory, read_choice, write_choice

STAGE: Final = "overlap"
_UNKNOWN: Final = -1
_PURPOSE: Final = "a race of forms of overlap"

InForm = Callable[[Overlap], Bound]
"""The call in another form of its program, compiled."""


@final
@frozen_dataclass
class Contest:
    """What a race is about: the call, its program by name, and what may be better than plain.

    `sizes` are the global ones by symbol. `key` is what the choice holds for. `notes` say what
    forms cannot do.
    """

    bound: Bound
    in_form: InForm
    program: str
    sizes: Mapping[str, int]
    team: tuple[int, ...]
    device: torch.device
    forms: tuple[Overlap, ...]
    notes: tuple[Note, ...]
    key: Mapping[str, object]
    is_required: bool


def settle_form(contest: Contest, communicator: Communicator) -> OverlapChoice:
    """The form that all ranks of the team run. They meet here, whatever each knows.

    What rank 0 of the team remembers holds, of this process or on disk; else forms are raced, on
    copies of the inputs that the program updates, and without a trace in the random numbers.
    Raises what the plain form does, Unsupported if one is required and none runs.
    """
    sequence = CommunicationSequence.of(
        contest.team,
        [f"{_PURPOSE} of program {contest.program}: {', '.join(map(str, contest.forms))}"],
        {name: name for name in contest.sizes},
    )
    first, *others = contest.team
    if others:
        communicator.compare(sequence.at(contest.sizes))
    is_first = communicator.rank() == first
    known = _remembered(contest) if is_first else None
    every = (PLAIN, *contest.forms)
    said = _UNKNOWN if known is None else every.index(known.form)
    place = _as_first_says(contest, communicator, said)
    if place == _UNKNOWN:
        choice = _raced(contest, communicator)
        if is_first:
            _remember(contest, choice)
    elif known is None:
        form = every[place]
        choice = OverlapChoice(form, "memory", f"rank {first} knew that it is best")
    else:
        choice = known
    return replace(choice, notes=contest.notes)


def _raced(contest: Contest, communicator: Communicator) -> OverlapChoice:
    track = Track(contest, communicator, _race_arguments(contest.bound), {})
    with _generators_as_they_were(contest.device):
        rows = race(contest.forms, track)
    found = winner(rows, is_required=contest.is_required)
    every = (PLAIN, *contest.forms)
    mine = _UNKNOWN if found is None else every.index(found)
    place = _as_first_says(contest, communicator, mine)
    if place == _UNKNOWN:
        errors = "; ".join(f"{row.form}: {row.error}" for row in rows if row.error)
        raise Unsupported(f"execute(overlap='require'): no form but the plain one runs: {errors}")
    return OverlapChoice(every[place], "race", reason_of(every[place], rows), rows)


def _as_first_says(contest: Contest, communicator: Communicator, mine: int) -> int:
    """The number that the first rank of the team has."""
    told = communicator.gather(contest.team, [mine], _PURPOSE)
    return told[0][0]


# What is remembered.


def _remembered(contest: Contest) -> OverlapChoice | None:
    choices, every = FusionCache.instance().choices, (PLAIN, *contest.forms)
    known = choice_as_read(choices.get(_frozen_key(contest)), every, "memory")
    if known is None:
        read = read_choice(cache_directory(os.environ), contest.key)
        known = choice_as_read(read, every, "disk")
    return known


def _remember(contest: Contest, choice: OverlapChoice) -> None:
    written = written_choice(choice)
    FusionCache.instance().choices.put(_frozen_key(contest), written)
    write_choice(cache_directory(os.environ), contest.key, written)


def _frozen_key(contest: Contest) -> str:
    return repr(sorted(contest.key.items()))


# Running.


@final
@dataclass(slots=True, eq=False, repr=False)
class Track:
    """One rank's part of a race: see host/race.py. `executables`: what is ready to run."""

    contest: Contest
    communicator: Communicator
    arguments: list[Argument]
    executables: dict[Overlap, Executable]

    def prepare(self, form: Overlap) -> None:
        """Compile a form, load it, and make the plan for these inputs."""
        bound = self.contest.in_form(form)
        executable = bound.prepared.compiled.executor.compile(self.communicator.rank())
        executable.start(self.arguments, bound.given)
        self.executables[form] = executable

    def run(self, form: Overlap, calls: int) -> Nanoseconds:
        is_cuda = self.contest.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize(self.contest.device)
        self.communicator.gather(self.contest.team, [0], _PURPOSE)
        if is_cuda:
            return self._time_on_stream(form, calls)
        begin = time.perf_counter_ns()
        self._call(form, calls)
        return (time.perf_counter_ns() - begin) // calls

    def _time_on_stream(self, form: Overlap, calls: int) -> Nanoseconds:
        with torch.cuda.device(self.contest.device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._call(form, 1)  # while it runs the host gets ahead, as it does between calls
            begin.record()
            self._call(form, calls)
            end.record()
            end.synchronize()
            return round(begin.elapsed_time(end) * 1e6 / calls)

    def _call(self, form: Overlap, calls: int) -> None:
        executable, given = self.executables[form], self.contest.bound.given
        for _ in range(calls):
            run_executable(executable, self.arguments, self.communicator, given=given)

    def settle(self, form: Overlap, error: Exception | None) -> str | None:
        """Groups that failed amid a communication are broken for all ranks; all make new ones."""
        text = "" if error is None else f"{type(error).__name__}: {error}"
        told: list[str]
        try:
            told = self.communicator.gather_texts(self.contest.team, text, _PURPOSE)
        except CommunicationError as lost:
            self.communicator.close()
            text = text or f"{type(lost).__name__}: {lost}"
            told = self.communicator.gather_texts(self.contest.team, text, _PURPOSE)
        return _first_cause(self.contest.team, told)

    def slowest(self, times: Sequence[Nanoseconds]) -> list[Nanoseconds]:
        found = self.communicator.gather(self.contest.team, times, _PURPOSE)
        return [max(each) for each in zip(*found, strict=True)]


def _first_cause(team: Sequence[int], told: Sequence[str]) -> str | None:
    """What went wrong first: peers of a rank that fails can only say that they lost it."""
    said = [(text, rank) for rank, text in zip(team, told, strict=True) if text]
    own = [pair for pair in said if not pair[0].startswith(CommunicationError.__name__)]
    for text, rank in own or said:
        return f"{text} (rank {rank})" if len(team) > 1 else text
    return None


def _race_arguments(bound: Bound) -> list[Argument]:
    """The arguments, with copies of those that the program updates, laid out alike."""
    arguments = list(bound.arguments)
    for position, _ in bound.prepared.updates:
        value = arguments[position]
        assert isinstance(value, torch.Tensor)
        copy = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
        arguments[position] = copy.copy_(value)
    return arguments


@contextmanager
def _generators_as_they_were(device: torch.device) -> Iterator[None]:
    """Give torch's generators back the states that they had."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
