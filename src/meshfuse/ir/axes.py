"""Axes and names. Tensors, scalars and axes are names, which tables of the Program describe."""

from __future__ import annotations

from enum import Enum
from typing import NewType, final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr.nodes import IntExpr

TensorName = NewType("TensorName", str)
"""`T0`, `T1`, ... in order of definition."""
ScalarName = NewType("ScalarName", str)
"""`c0`, `c1`, ...: a scalar input or the result of arithmetic on scalars."""
AxisName = NewType("AxisName", str)
"""`a0`, `a1`, ...: unique in a definition, never shared between tensors."""


class AxisKind(Enum):
    """What an axis is to its tensor. The value is the letter of program text.

    iteration: a tensor axis. broadcast: a tensor axis of extent 1 that stretches against others.
    reduction: reduced by the defining op; no tensor axis. partial: the ranks along a mesh axis each
    hold one term of a reduction that is still to be done across them; no tensor axis, no local
    size.
    """

    iteration = "i"
    broadcast = "b"
    reduction = "r"
    partial = "p"

    @property
    def is_tensor_axis(self) -> bool:
        return self in (AxisKind.iteration, AxisKind.broadcast)


@final
@frozen_dataclass
class IterDomain:
    """One axis: its kind and its global extent (law 1)."""

    name: AxisName
    kind: AxisKind
    extent: IntExpr

    def __repr__(self) -> str:
        return f"{self.name}:{self.kind.value}{{{self.extent}}}"
