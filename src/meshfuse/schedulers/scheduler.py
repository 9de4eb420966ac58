"""What a scheduler is: it takes a segment or says why not, and schedules its tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.facts.refusal import Refusal
from meshfuse.ir.program import Program


@final
@frozen_dataclass
class LaunchHints:
    """How to run a kernel where the target has a say: warps of a program, stages of its loops."""

    warps: int = 4
    stages: int = 1


class Scheduler(ABC):
    """Abstract. `can` and `estimate` see global or local extents, `apply` local ones."""

    __slots__ = ()
    name: str

    @abstractmethod
    def can(self, program: Program) -> Refusal | None:
        """Why this scheduler does not take the segment; None if it does."""

    @abstractmethod
    def estimate(self, program: Program) -> float:
        """Expected time in microseconds on sizes of a nominal kind. Only for what `can` takes."""

    @abstractmethod
    def apply(self, program: Program) -> tuple[Program, LaunchHints]:
        """The localized program with its tensors scheduled. Only for what `can` takes."""
