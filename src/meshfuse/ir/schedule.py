"""The schedule of a tensor: how loops derive from logical axes, and what each is bound to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.expr.nodes import IntExpr
from meshfuse.ir.axes import AxisName
from meshfuse.ir.mesh import DeviceMesh, ParallelType


@final
@frozen_dataclass
class Split:
    """source -> (outer, inner). index(source) = index(outer) * extent(inner) + index(inner).

    inner_split: inner has extent `factor` and outer ceil(n / factor); otherwise outer has extent
    `factor` and inner ceil(n / factor). The children have the kind of `source`.
    """

    source: AxisName
    outer: AxisName
    inner: AxisName
    factor: IntExpr
    inner_split: bool


@final
@frozen_dataclass
class Merge:
    """(outer, inner) -> out. index(out) = index(outer) * extent(inner) + index(inner)."""

    outer: AxisName
    inner: AxisName
    out: AxisName


@final
@frozen_dataclass
class Swizzle1d:
    """source -> out. index(source) = (index(out) + rank along `mesh_axis` + `offset`) mod extent.

    A rank begins with the iteration of its own number, so that ranks that loop in step are never at
    the same chunk: ring algorithms. With an `offset` of 1 it ends there. Extent and memory order
    stay.
    """

    source: AxisName
    out: AxisName
    mesh_axis: ParallelType
    offset: int = 0


Step = Split | Merge | Swizzle1d


def step_sources(step: Step) -> tuple[AxisName, ...]:
    """The axes that a step consumes."""
    match step:
        case Split():
            return (step.source,)
        case Merge():
            return (step.outer, step.inner)
        case Swizzle1d():
            return (step.source,)


def step_results(step: Step) -> tuple[AxisName, ...]:
    """The axes that a step makes."""
    match step:
        case Split():
            return (step.outer, step.inner)
        case Merge() | Swizzle1d():
            return (step.out,)


def steps_above(steps: Sequence[Step], axes: Iterable[AxisName]) -> tuple[Step, ...]:
    """Those of `steps` that any of `axes` derives by, in their order."""
    found: list[Step] = []
    pending = set(axes)
    for step in reversed(steps):
        if pending.intersection(step_results(step)):
            pending.update(step_sources(step))
            found.insert(0, step)
    return tuple(found)


class MemoryType(Enum):
    """Where a tensor lives. `global` is a keyword: getattr has it, or `MemoryType.global_`."""

    tensor = "tensor"
    local = "local"
    shared = "shared"
    global_ = "global"
    symmetric = "symmetric"


setattr(MemoryType, "global", MemoryType.global_)


@final
@frozen_dataclass
class Allocation:
    """Memory layout: the logical tensor axes, slowest first, and a contiguity flag for each.

    A true flag: the axis' stride is size * stride of the next non-broadcast axis to its right (1
    for the last). False: any stride. None: a broadcast axis, or an expanded one (stride 0). Mesh
    and stream leaves never stand here.
    """

    order: tuple[AxisName, ...]
    contiguity: tuple[bool | None, ...]


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """Derivation steps, leaves (the loop nest), and what each is bound to. Law 4: extend only.

    A leaf that `bindings` does not name is serial. A mesh axis on a reduction leaf says that the
    reduction crosses ranks; at most one iteration leaf carries a given mesh axis. `inline_depth` is
    the number of outer leaves shared with the consumers. `allocation` None: row-major and
    contiguous. `answers` remembers what was derived from it: see Program.remember.
    """

    leaves: tuple[AxisName, ...]
    steps: tuple[Step, ...] = ()
    bindings: Mapping[AxisName, ParallelType] = field(default_factory=dict[AxisName, ParallelType])
    mesh: DeviceMesh | None = None
    allocation: Allocation | None = None
    memory: MemoryType = MemoryType.global_
    inline_depth: int = 0
    stages: int = 1
    answers: dict[str, tuple[object, object, object]] = field(
        default_factory=dict[str, tuple[object, object, object]],
        init=False,
        compare=False,
        repr=False,
    )

    def binding(self, leaf: AxisName) -> ParallelType:
        return self.bindings.get(leaf, ParallelType.serial)
