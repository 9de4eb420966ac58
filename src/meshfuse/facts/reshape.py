"""How a sharding passes through the root steps of a tensor: from root to logical axes."""

from __future__ import annotations

from collections.abc import Mapping

from meshfuse.expr import IntExpr, const_value, is_const
from meshfuse.facts.digits import in_blocks, weights
from meshfuse.facts.holdings import is_even
from meshfuse.facts.sharding import Digit, Digits, add_root_digits, canonical, deal_digits
from meshfuse.ir.axes import AxisName, IterDomain, TensorName
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

    None where no digits say what a rank would hold: parts of blocks, blocks that are not as even as
    they could be, or of a merge's inner axis uneven ones. That axis becomes strided. Axes that
    `root` leaves out are whole.
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
    made = {a.name: canonical(found[a.name], a.extent, mesh) for a in definition.logical}
    if not all(_cut_alike(found[name], digits) for name, digits in made.items()):
        return None
    return made if _leads_back(program, out, root, made, mesh) else None


def _leads_back(
    program: Program,
    out: TensorName,
    root: Mapping[AxisName, Digits],
    made: Mapping[AxisName, Digits],
    mesh: DeviceMesh | None,
) -> bool:
    """Whether the digits of the result say of the root axes what these have.

    Of an axis of unknown size that merges with another they may not: what is a digit of which?
    """
    back = dict(made)
    add_root_digits(program, out, back)
    return all(
        axis.name in back
        and digits_of_root(back[axis.name], axis, mesh)
        == canonical(root.get(axis.name, ()), axis.extent, mesh)
        for axis in program.tensor(out).root
    )


def digits_of_root(digits: Digits, axis: IterDomain, mesh: DeviceMesh | None) -> Digits:
    """Canonical digits of an axis of an operand, or a root axis, from those that the result has;
    whole without any.

    An axis that gets a known size, 2@x of 2, is [2@x, (i0 + 1) // 2] of i0 before.
    """
    found = canonical(digits, axis.extent, mesh)
    if is_const(axis.extent) or any(digit.owner is None for digit in found):
        return found
    return canonical((*found, Digit(axis.extent)), axis.extent, mesh)


def _cut_alike(digits: Digits, normal: Digits) -> bool:
    """Whether normal form, which makes blocks of an axis as small as they can be, changes none.

    Blocks of 2 rows of 5 in 4 parts are [4@x, 2]; of the 15 elements of 3 columns they would be
    [4@x, 4], and 6 elements are what 2 rows have. Blocks of sizes not known are even, as a run
    demands of them.
    """
    wanted = weights(normal)
    return all(
        const_value(weight) is None or const_value(wanted[owner]) in (None, const_value(weight))
        for owner, weight in weights(digits).items()
        if owner in wanted
    )


def is_whole_pieces(digits: Digits, extent: IntExpr) -> bool:
    """Whether a free tensor may take these digits: consecutive pieces, or strided ones of one size.

    Whether strided pieces of an unknown size are alike is not known before a run.
    """
    return in_blocks(digits) or is_even(digits, extent)
