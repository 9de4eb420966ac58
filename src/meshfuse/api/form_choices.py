"""The forms of overlap that one definition has settled on, by the sizes of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import torch

from meshfuse.api.bound_call import Bound
from meshfuse.api.frozen_program import FrozenProgram
from meshfuse.api.overlap_choice import (
    OverlapChoice,
    Overlapping,
    memory_key,
    one_team,
    reason_against_race,
    size_class,
)
from meshfuse.api.overlap_race import Contest, InForm, settle_form
from meshfuse.base.bounded import BoundedTable
from meshfuse.base.errors import Unsupported
from meshfuse.dist.communicator import Communicator
from meshfuse.facts.overlap_form import CANDIDATES, PLAIN, REPEATABLE, Overlap
from meshfuse.pipeline import forms_of

MOST_CHOICES: Final = 1024


@final
class FormChoices:
    """What was chosen for a definition's calls.

    A choice depends on the program, options, the kind of device and global sizes by powers of two,
    never on how one rank's inputs lie: all ranks come to a choice at the same call. So they must
    not be without one where others have it: there is a table for each definition, and what other
    definitions or processes know is rank 0's alone to say.
    """

    __slots__ = ("_choices",)

    def __init__(self) -> None:
        self._choices: BoundedTable[tuple[object, ...], OverlapChoice] = BoundedTable(MOST_CHOICES)

    def find(
        self,
        frozen: FrozenProgram,
        bound: Bound,
        in_form: InForm,
        wanted: Overlapping,
        is_one_part: bool,
        communicator: Communicator,
        is_captured: bool = False,
    ) -> OverlapChoice | None:
        """The choice for a call in its plain form; None where there is none to make.

        `is_one_part`: the program is one kernel or segment, and has no other form. `is_captured`:
        the form is to be one that a graph can repeat. Raises as `settle_form`, Unsupported where a
        form is required and there is none.
        """
        if wanted == "off" or (not frozen.meshes and wanted == "auto"):
            return None
        if isinstance(wanted, Overlap) and not is_one_part:
            return OverlapChoice(wanted, "asked", "the call asks for it")
        is_required = wanted != "auto"
        compilation = bound.prepared.compiled.compilation
        team = None if is_one_part else one_team(compilation)
        if team is None:
            if is_required:
                raise _unsupported(wanted, _why_no_race(is_one_part))
            return None
        executable = bound.prepared.compiled.executor.compile(communicator.rank())
        if executable.is_outside:
            return None
        own = {coordinate.symbol for coordinate in compilation.host.coordinates}
        known = executable.sizes(bound.arguments, bound.given).items()
        sizes = {name: size for name, size in known if name not in own}
        device = torch.device(bound.key.device)
        key = (is_required, is_captured, bound.key.options, device.type, size_class(sizes))
        choice = self._choices.get(key)
        if choice is None:
            candidates = REPEATABLE if is_captured else CANDIDATES
            found = _contest(
                frozen, bound, in_form, sizes, team, device, candidates, is_required=is_required
            )
            choice = settle_form(found, communicator) if isinstance(found, Contest) else found
            self._choices.put(key, choice)
        return choice


def _contest(
    frozen: FrozenProgram,
    bound: Bound,
    in_form: InForm,
    sizes: dict[str, int],
    team: tuple[int, ...],
    device: torch.device,
    candidates: Sequence[Overlap],
    *,
    is_required: bool,
) -> Contest | OverlapChoice:
    """The race to be run between `candidates`, or the choice that needs none."""
    if not is_required:
        reason = reason_against_race(bound.prepared.compiled.compilation, sizes, device)
        if reason is not None:
            return OverlapChoice(PLAIN, "rule", reason)
    forms, notes = forms_of(frozen.program, candidates)
    if not forms:
        if is_required:
            raise _unsupported("require", "; ".join(map(str, notes)) or "no form changes anything")
        return OverlapChoice(PLAIN, "rule", "no form changes anything", (), notes)
    mode = f"{'require' if is_required else 'auto'} of {', '.join(map(str, candidates))}"
    key = memory_key(
        frozen.key, bound.key.signature, bound.key.options, sizes, device, len(team), mode
    )
    return Contest(bound, in_form, frozen.key, sizes, team, device, forms, notes, key, is_required)


def _why_no_race(is_one_part: bool) -> str:
    if is_one_part:
        return "the program is one kernel, as its user scheduled it, or one segment"
    return "nothing moves between the ranks of its mesh, or there are several meshes"


def _unsupported(wanted: Overlapping, reason: str) -> Unsupported:
    return Unsupported(f"execute(overlap={wanted!r}): no form but the plain one: {reason}")
