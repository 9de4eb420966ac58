"""Schedules that users write for a whole program as one kernel, kept by signature, then device."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from meshfuse.api.recording import Recording
from meshfuse.base.errors import UserError
from meshfuse.base.frozen import frozen_dataclass
from meshfuse.cache import fingerprint
from meshfuse.ir.program import Program
from meshfuse.pipeline import prepare_for_schedule
from meshfuse.runtime.arguments import Signature


@final
@frozen_dataclass
class ScheduledProgram:
    """A program as its user scheduled it, and its fingerprint."""

    program: Program
    key: str


@final
class UserSchedules:
    """What a `schedule()` hook made of a program, once for each signature and device.

    The hook calls schedule methods on the definition's own handles. While it runs they stand for a
    copy of the program, concretised; afterwards they show the unscheduled one again.
    """

    __slots__ = ("_hook", "_kept", "_recording")

    def __init__(self, recording: Recording, hook: Callable[[], None]) -> None:
        self._recording = recording
        self._hook = hook
        self._kept: dict[Signature, dict[str, ScheduledProgram]] = {}

    def find(
        self, program: Program, signature: Signature, device: str, *, redo: bool = False
    ) -> ScheduledProgram:
        """`program` as scheduled for a signature and device; `redo` runs the hook again.

        Raises what the hook raises, and UserError for one that changes what the program computes.
        """
        with self._recording.lock:
            by_device = self._kept.setdefault(signature, {})
            if redo or device not in by_device:
                by_device[device] = self._run(program)
            return by_device[device]

    def _run(self, program: Program) -> ScheduledProgram:
        before = prepare_for_schedule(program)
        after = self._recording.change_copy(before, self._hook)
        was, now = before.fusion, after.fusion
        if (was.inputs, was.outputs) != (now.inputs, now.outputs):
            raise UserError(
                "schedule(): a schedule may not define inputs or outputs; write them into the "
                "definition"
            )
        return ScheduledProgram(after, fingerprint(after))
