"""A compiled program as a definition keeps it."""

from __future__ import annotations

from typing import final

from meshfuse.api.overlap_choice import OverlapChoice
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.cache import CompiledProgram
from meshfuse.facts import sharding as facts


@final
@frozen_dataclass
class Prepared:
    """A compiled program, and the shardings of what it returns."""

    compiled: CompiledProgram
    outputs: tuple[facts.Sharding, ...]
    updates: tuple[tuple[int, facts.Sharding], ...]
    """Inputs that are updated in place, by position, in the order of their outputs."""
    choice: OverlapChoice | None = None
    """Why it is in this form of overlap, where there was a choice."""


def prepare(compiled: CompiledProgram) -> Prepared:
    """Look up the shardings of a program's outputs."""
    program = compiled.compilation.segmented.whole
    fusion = program.fusion
    updates = tuple(
        (fusion.inputs.index(output.alias), facts.sharding_of(program, output.alias))
        for output in fusion.outputs
        if output.alias is not None
    )
    shown = (output.tensor for output in fusion.outputs if output.alias is None)
    shardings = tuple(facts.written_sharding_of(program, name) for name in shown)
    return Prepared(compiled, shardings, updates)
