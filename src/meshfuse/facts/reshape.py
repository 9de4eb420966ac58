"""How a sharding passes through the root steps of a tensor: from root to logical axes."""

from __future__ import annotations

from collections.abc import Mapping

from meshfuse.expr import IntExpr
from meshfuse.facts.holdings import is_even
from meshfuse.facts.sharding import Digit, Digits, canonical, deal_digits
from meshfuse.ir.axes import AxisName, TensorName
from meshfuse.ir.mesh import DeviceMesh
from meshfuse.ir.program import Program
from meshfuse.ir.schedule import Merge, Split, Swizzle1d


def digits_after_reshape(
    program: Program,
    out: TensorName,
    root: Mapping[AxisName, Digits],
    mesh: DeviceMesh | None,
) -> dict[AxisName, Digits] | None:
    """Canonical digits of the logical axes of `out`, its root axes lying as `root` says.

    [2@x, h/2] split by k  ->  [2@x, h/k/2], [k]     [2@x, a/2], [k] merged  ->  [2@x, a*k/2]

    None where a rank would hold parts of blocks: an outer axis that the ranks do not divide, or the
    inner axis of a merge that is not known to be shared evenly. If it is, it becomes strided. Axes
    that `root` leaves out are whole.
    """
    definition, axes = program.tensor(out), program.all_axes(out)
    found = {axis.name: root.get(axis.name, (Digit(axis.extent),)) for axis in definition.root}
    for step in definition.root_steps:
        match step:
            case Split(source, outer, inner):
                pair = deal_digits(found[source], axes[outer], axes[inner])
                if pair is None:
                    return None
                found[outer], found[inner] = pair
            case Merge(outer, inner, merged):
                if not is_even(found[inner], axes[inner].extent):
                    return None
                found[merged] = found[outer] + found[inner]
            case Swizzle1d(source, swizzled):
                found[swizzled] = found[source]
    return {a.name: canonical(found[a.name], a.extent, mesh) for a in definition.logical}


def in_blocks(digits: Digits) -> bool:
    """Whether no local digit stands above one of a mesh axis: ranks hold consecutive pieces."""
    owned = [digit.owner is not None for digit in digits]
    return owned == sorted(owned, reverse=True)


def is_whole_pieces(digits: Digits, extent: IntExpr) -> bool:
    """Whether a free tensor may take these digits: consecutive pieces, or strided ones of one size.

    Whether strided pieces of an unknown size are alike is not known before a run.
    """
    return in_blocks(digits) or is_even(digits, extent)
