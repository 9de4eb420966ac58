"""What the calls of one definition run, by what they are compiled for."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch

from meshfuse.api.bound_call import CallKey
from meshfuse.api.frozen_program import FrozenProgram
from meshfuse.api.prepared import Prepared, prepare
from meshfuse.api.user_schedule import UserSchedules
from meshfuse.base.trace import Trace
from meshfuse.cache import FusionCache
from meshfuse.pipeline import USER


@final
class PreparedCalls:
    """Those of a program that a scheduler has taken, if it is a segment of another, or that its
    user schedules as one kernel; else how it is cut is the compiler's to say."""

    __slots__ = ("_prepared", "_scheduler", "_user_schedules")

    def __init__(self, scheduler: str, user_schedules: UserSchedules | None) -> None:
        self._prepared: dict[CallKey, Prepared] = {}
        self._scheduler = scheduler
        self._user_schedules = user_schedules

    @property
    def are_scheduled(self) -> bool:
        """Whether their user schedules them."""
        return self._user_schedules is not None

    @property
    def are_segments(self) -> bool:
        """Whether the program is one segment, which a scheduler has taken."""
        return bool(self._scheduler)

    def find(self, key: CallKey) -> Prepared | None:
        """What was made for the key."""
        return self._prepared.get(key)

    def make(
        self, frozen: FrozenProgram, key: CallKey, trace: Trace | None = None, redo: bool = False
    ) -> Prepared:
        """Compile for the key, unless this process has done so; `redo` asks for the user's schedule
        again."""
        program, text = frozen.program, frozen.key
        if self._user_schedules is not None and key.is_scheduled:
            scheduled = self._user_schedules.find(program, key.signature, key.device, redo=redo)
            program, text = scheduled.program, scheduled.key
        compiled = FusionCache.instance().find(
            program,
            text,
            key.signature,
            torch.device(key.device),
            key.options,
            scheduler=USER if key.is_scheduled else self._scheduler,
            form=key.form,
            trace=trace,
        )
        prepared = prepare(compiled)
        if key.is_scheduled:
            plain = tuple(replace(sharding, mesh=None) for sharding in prepared.outputs)
            prepared = replace(prepared, outputs=plain)
        self._prepared[key] = prepared
        return prepared
