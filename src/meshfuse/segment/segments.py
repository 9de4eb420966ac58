"""Segments: parts of a program that one executor runs."""

from __future__ import annotations

from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.facts.refusal import Refusal
from meshfuse.ir.program import Program


@final
@frozen_dataclass
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
@frozen_dataclass
class SegmentedProgram:
    """The whole program and its segments in an order that defines before use."""

    program: Program
    segments: tuple[Segment, ...]
