"""The schedulers, and who takes a segment: all are asked, the lowest estimate wins."""

from __future__ import annotations

from typing import Final

from meshfuse.facts.refusal import Refusal
from meshfuse.ir.program import Program
from meshfuse.schedulers.normalization import NormalizationScheduler
from meshfuse.schedulers.pointwise import PointwiseScheduler
from meshfuse.schedulers.reduction import ReductionScheduler
from meshfuse.schedulers.scheduler import LaunchHints, Scheduler
from meshfuse.schedulers.single_operation import CommunicationScheduler, ExprEvalScheduler

SCHEDULERS: Final[tuple[Scheduler, ...]] = (
    PointwiseScheduler(),
    ReductionScheduler(),
    NormalizationScheduler(),
    ExprEvalScheduler(),
    CommunicationScheduler(),
)
"""In the order that breaks ties."""


def accepts(program: Program) -> str | tuple[Refusal, ...]:
    """The name of the scheduler that takes a segment at the lowest estimate, or all refusals."""
    refusals: list[Refusal] = []
    takers: list[Scheduler] = []
    for scheduler in SCHEDULERS:
        refusal = scheduler.can(program)
        if refusal is None:
            takers.append(scheduler)
        else:
            refusals.append(refusal)
    if not takers:
        return tuple(refusals)
    return min(takers, key=lambda scheduler: scheduler.estimate(program)).name


def refusals_of(program: Program) -> tuple[Refusal, ...]:
    """The answers of the schedulers that do not take a segment."""
    answers = (scheduler.can(program) for scheduler in SCHEDULERS)
    return tuple(answer for answer in answers if answer is not None)


def refusal_of(program: Program, name: str) -> Refusal | None:
    """Why the scheduler `name` does not take a segment; None if it does."""
    return _named(name).can(program)


def schedule(program: Program, name: str) -> tuple[Program, LaunchHints]:
    """A localized segment scheduled by the scheduler `name`, which takes it."""
    return _named(name).apply(program)


def _named(name: str) -> Scheduler:
    return next(scheduler for scheduler in SCHEDULERS if scheduler.name == name)
