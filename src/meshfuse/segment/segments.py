"""Segments: parts of a program that one executor runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from meshfuse.facts.refusal import Refusal
from meshfuse.ir.program import Program


@final
@dataclass(frozen=True, slots=True)
class Segment:
    """A Program of its own, with global shapes and the whole's tensor names, and who takes it.

    `scheduler`: a kernel scheduler ("pointwise", "reduction", "normalization"), "expr_eval" or
    "communication". `refusals` are the answers of the schedulers that did not take it.
    """

    name: str
    program: Program
    scheduler: str
    refusals: tuple[Refusal, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class SegmentedProgram:
    """The whole program and its segments in an order that defines before use."""

    program: Program
    segments: tuple[Segment, ...]
