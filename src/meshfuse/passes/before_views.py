"""Communications before views instead of after: what several views need moves once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from meshfuse.base.frozen import frozen_dataclass
from meshfuse.facts.digits import is_whole
from meshfuse.facts.sharding import Digit, Sharding, sharding_of
from meshfuse.facts.views import View
from meshfuse.ir.axes import AxisKind, TensorName
from meshfuse.ir.ops import Expr, Reshape
from meshfuse.ir.program import Program
from meshfuse.ir.rewrite import Name, map_names
from meshfuse.passes.operands import with_operands
from meshfuse.passes.placement import (
    Placement,
    needed_sharding,
    new_local_result,
    produced_sharding,
)


@final
@frozen_dataclass
class Lifted:
    """`need` of `tensor`, instead of what the last of `views` needs; they follow, in order.

    With each view goes the placement at which it makes what the next one needs.
    """

    tensor: TensorName
    need: Sharding
    views: tuple[tuple[View, Placement, Sharding], ...]


def lift(
    program: Program,
    tensor: TensorName,
    need: Sharding,
    views: Mapping[TensorName, View],
    readers: Mapping[Name, int],
) -> Lifted | None:
    """The first tensor above `tensor` that others read as well; None where there is none.

    T1 = squeeze(T0), T2 = permute(T1), T2 needed whole, T0 read elsewhere  ->  T0 is needed whole
    """
    found: Lifted | None = None
    passed: tuple[tuple[View, Placement, Sharding], ...] = ()
    while tensor in views and not need.partial:
        view = views[tensor]
        placement = _placement_for(program, view, need)
        if placement is None or need.mesh is None:
            return found
        passed = ((view, placement, need), *passed)
        tensor, need = view.src, needed_sharding(program, view, 0, placement, need.mesh)
        if readers.get(tensor, 0) > 1 and not sharding_of(program, tensor).partial:
            found = Lifted(tensor, need, passed)
    return found


def _placement_for(program: Program, view: View, need: Sharding) -> Placement | None:
    """Where `view` makes its result as `need` says; None where it cannot."""
    definition = program.tensor(view.out)
    if need.mesh is None:
        return None
    if isinstance(view, Reshape):
        if not all(map(is_whole, need.axes)):
            return None
        placement = tuple((Digit(axis.extent),) for axis in definition.root)
    elif definition.root or len(definition.logical) != len(need.axes):
        return None
    else:
        placement = tuple(
            (Digit(axis.extent),) if axis.kind is AxisKind.broadcast else digits
            for axis, digits in zip(definition.logical, need.axes, strict=True)
        )
    made = produced_sharding(program, view, view.out, placement, need.mesh)
    return placement if made == need else None


def view_again(
    program: Program, view: View, placement: Placement, made: Sharding, src: TensorName
) -> tuple[Program, Expr, TensorName]:
    """`view` of `src`, which has the elements of its operand placed otherwise, and its result."""
    program, out = new_local_result(program, view.out, placement, made)
    return program, map_names(with_operands(view, [src]), {view.out: out}), out
