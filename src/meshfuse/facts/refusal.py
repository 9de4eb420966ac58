"""Refusals: why something does not take a segment. Values with a reason, not exceptions."""

from __future__ import annotations

from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.ir.axes import TensorName


@final
@frozen_dataclass
class Refusal:
    """Why a scheduler does not take a segment; `tensor` stands in the way, where one does."""

    scheduler: str
    reason: str
    tensor: TensorName | None = None

    def __str__(self) -> str:
        subject = "" if self.tensor is None else f"{self.tensor}: "
        return f"{self.scheduler}: {subject}{self.reason}"
